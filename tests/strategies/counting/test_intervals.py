"""Intervals of rates and AUROC from noisy counts hold the truth as often as they state."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedsurrogate.client_app.methods.counting import count_decisions
from fedsurrogate.common.methods.counting import tables_of
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, with_noise
from fedsurrogate.common.privacy.mechanism import Mechanism, NoisySums
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.protocol import noise_of_site, noise_of_sum, spare_of
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.terms import Counted
from fedsurrogate.strategies.counting.results import (
    PooledCounts,
    auroc,
    evaluation_result,
)

RUNS, SITES, DELTA = 500, 2, 1e-5
# Of 500 runs at 95 %, fewer than this many hold the truth in one of ten thousand tests.
FEWEST = 455


def settings(classes: int, bins: int = 16) -> Run:
    names = ",".join(f"c{k}" for k in range(classes))
    run = parse_run({"counting.kind": "survey", "classes": names, "counting.bins": bins})
    counting = run.settings.counting.model_copy(update={"kind": "evaluation"})
    return replace(run, settings=run.settings.model_copy(update={"counting": counting}))


def draw(generator: torch.Generator, count: int, apart: float) -> tuple[Tensor, Tensor]:
    """Logits of two classes whose difference is normal, and labels."""
    labels = torch.rand(count, generator=generator) < 0.4
    score = torch.randn(count, generator=generator, dtype=torch.float64) + apart * labels
    return torch.stack([torch.zeros_like(score), 1.7 * (score - apart / 2)], 1), labels.long()


def exact_area(score: Tensor, labels: Tensor) -> float:
    """AUROC of scores without ties, from the ranks of one class."""
    own, others = score[labels == 1], score[labels == 0].sort().values
    return float(torch.searchsorted(others, own).double().mean() / len(others))


def mechanism_of(counted: Sequence[Counted], epsilon: float) -> Mechanism:
    """The noise of one site on its own tables."""
    shares = {each.name: each.share for each in counted}
    bounds = {each.name: each.bound for each in counted}
    return NoisySums("counts", epsilon, DELTA, shares, bounds=bounds).mechanism()


def with_own_noise(sites: list[dict[str, IntegerSum]], epsilon: float) -> PooledCounts:
    """The sum of the tables of sites that each add the whole noise."""
    counted = tables_of(settings(2).settings.counting, 2)
    mechanism = mechanism_of(counted, epsilon)
    tables: dict[str, Tensor] = {}
    variances: dict[str, float] = {}
    for exact in sites:
        sums = [BoundedSum(each.name, exact[each.name], each.bound) for each in counted]
        for each in with_noise(sums, mechanism):
            tables[each.name] = tables.get(each.name, 0) + each.value.round()  # type: ignore[arg-type]
            variances[each.name] = variances.get(each.name, 0.0) + each.sigma**2 + 1 / 12
    return PooledCounts(tables, variances)


def with_distributed_noise(sites: list[dict[str, IntegerSum]], epsilon: float) -> PooledCounts:
    """The secure aggregation of the tables of sites that each add a part of the noise, without the masks,
    which cancel.

    No site is lost, so the noise for lost sites is taken out.
    """
    chosen = {
        "counting.kind": "evaluation",
        "counting.digest": "0" * 64,
        "classes": "c0,c1",
        "secure-aggregation": True,
    }
    run = parse_run(chosen | {"epsilon": epsilon, "delta": DELTA})
    claim, rules = run.mechanism, rules_of(run.settings, len(sites))
    assert claim is not None
    numbers, shapes = (
        numbers_of(run.plan, run.settings, len(sites)),
        shapes_of(run.plan, len(run.settings.classes), 1),
    )
    total = {name: np.zeros(math.prod(shape), dtype=np.uint32) for name, shape in shapes.items()}
    for exact in sites:
        seed = os.urandom(32)
        drawn, spare = (
            noise_of_site(claim, numbers, shapes, rules, seed),
            spare_of(claim, numbers, shapes, rules, seed),
        )
        parts = {
            name: numbers[name].encode(exact[name].value) + drawn[name] - spare.get(name, 0)
            for name in shapes
        }
        total = {name: total[name] + words(parts[name]) for name in shapes}
    tables = {
        name: numbers[name].decode(total[name]).reshape(shape) for name, shape in shapes.items()
    }
    sigmas = noise_of_sum(claim, numbers, shapes, rules, len(sites), removed=len(sites))
    return PooledCounts(tables, {name: sigma**2 for name, sigma in sigmas.items()})


def runs(
    apart: float, epsilon: float, count: int, sites: int = SITES, distributed: bool = False
) -> tuple[list[dict[str, object]], list[float], list[float]]:
    """Results of 500 runs over sites with own records each time, and the exact AUROC and accuracy
    of each.

    count: records of a site. joint: whether the noise is one distributed noise in secure aggregation.
    """
    run, generator = settings(2), torch.Generator().manual_seed(3)
    found, areas, accuracies = [], [], []
    for _ in range(RUNS):
        parts = [draw(generator, count, apart) for _ in range(sites)]
        exact = [
            count_decisions(
                *part, torch.ones(count, dtype=torch.float64), 2, run.settings.counting.bins
            )
            for part in parts
        ]
        pooled = (with_distributed_noise if distributed else with_own_noise)(exact, epsilon)
        scores, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        areas.append(exact_area(scores[:, 1] - scores[:, 0], labels))
        accuracies.append(float((scores.argmax(1) == labels).double().mean()))
        found.append(evaluation_result(pooled, run.settings.classes))
    return found, areas, accuracies


def held(results: list[dict[str, object]], at: tuple[str, ...], truths: list[float]) -> int:
    """In how many runs the interval holds the truth."""
    count = 0
    for result, truth in zip(results, truths, strict=True):
        for key in at:
            result = result[key]  # type: ignore[assignment]
        count += result["low"] is not None and result["low"] <= truth <= result["high"]  # type: ignore[operator]
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "epsilon", "count", "distributed"),
    [(1.0, 1.0, 600, False), (2.5, 1.0, 600, False), (2.5, 4.0, 100, False), (2.5, 4.0, 100, True)],
)
def test_intervals_of_noisy_rates_and_aurocs_hold_the_truth_in_95_of_100_runs(
    apart: float, epsilon: float, count: int, distributed: bool
) -> None:
    results, areas, exact = runs(apart, epsilon, count, distributed=distributed)
    truth = 0.5 * (1 + math.erf(apart / 2 / math.sqrt(2)))
    assert held(results, ("accuracy",), exact) >= FEWEST
    for at in (("accuracy",), ("classes", "c1", "sensitivity"), ("classes", "c1", "specificity")):
        assert held(results, at, [truth] * RUNS) >= FEWEST, at
    # The AUROC of the records themselves, and the one behind them.
    behind = [0.5 * (1 + math.erf(apart / 2))] * RUNS
    for area in (areas, behind):
        assert held(results, ("classes", "c1", "auroc"), area) >= FEWEST


def test_without_noise_the_auroc_is_scikit_learns_of_the_binned_scores() -> None:
    run, (scores, labels) = settings(2, 64), draw(torch.Generator().manual_seed(1), 500, 1.5)
    exact = count_decisions(
        scores, labels, torch.ones(500, dtype=torch.float64), 2, run.settings.counting.bins
    )
    found = auroc(exact["scores"].value[0], 0.0)
    true = exact_area(scores[:, 1] - scores[:, 0], labels)
    assert true == pytest.approx(
        roc_auc_score(labels.numpy(), (scores[:, 1] - scores[:, 0]).numpy())
    )
    bins = np.floor(((scores[:, 1] - scores[:, 0]).numpy() + 8) * 4)
    assert found.value == pytest.approx(roc_auc_score(labels.numpy(), bins))
    assert found.low is not None
    assert found.high is not None
    assert found.low < true < found.high
