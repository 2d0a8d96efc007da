"""Coded sums that no records can have are rejected, whatever a hostile site claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.targets.target import CODE, PRODUCTS, RECORDS, SQUARES, SUMS, TOTALS
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.pooling.site_weights import OTHER_SCALES, Total, moment_shares
from fedsurrogate.strategies.targets import strategy
from fedsurrogate.strategies.targets.residual_steps import TargetRounds
from fedsurrogate.strategies.targets.strategy import learn_from_sum
from tests import rounds_of_times

Tensors = dict[str, torch.Tensor]
Lie = Callable[[Tensors], Tensors]
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "number": {"task": "regression", "target_range": (-4, 4)},
    "labels": {"task": "multilabel", "label_columns": "edema,nodule"},
    "time": {"task": "survival", "horizon": 3.0, "bins": 1},
}


def honest(kind: str, size: int = 200, **more: Any) -> fs.Surrogate:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(size, 3)) + 2
    y = {
        "number": x[:, 0],
        "labels": (x[:, :2] > 2).astype(float),
        "time": np.stack([draw.exponential(2, size), draw.integers(0, 2, size)], 1),
    }[kind]
    return fs.fit(x, y, site="north", **KINDS[kind], **more)


def lied(sent: fs.Surrogate, lie: Lie) -> bytes:
    message = unpack_parameters(sent.payload)
    return pack_parameters(replace(message, tensors=lie(dict(message.tensors))))


def times(name: str, factor: float) -> Lie:
    return lambda tensors: tensors | {name: tensors[name] * factor}


def set_to(name: str, value: float) -> Lie:
    return lambda tensors: tensors | {name: torch.full_like(tensors[name], value)}


EXACT: dict[str, tuple[str, Lie]] = {
    "sums beyond the second moment": ("number", times(SUMS, 100.0)),
    "a code beyond its records": ("number", set_to(CODE, 300.0)),
    "a negative second moment": ("number", times(SQUARES, -1.0)),
    "negative products": ("number", times(PRODUCTS, -1.0)),
    "squares of numbers beyond their records": ("number", set_to(PRODUCTS, 300.0)),
    "no records": ("number", set_to(RECORDS, 0.0)),
    "a label of fewer records than none": ("labels", times(CODE, -1.0)),
    "a label of more records than there are": ("labels", times(CODE, 3.0)),
    "features of a label that are too long": ("labels", times(SUMS, 100.0)),
    "a cell of fewer records than none": ("time", times(CODE, -1.0)),
    "features that are not finite": ("time", set_to(TOTALS, float("inf"))),
}
NOISY: dict[str, tuple[str, Lie]] = {
    "sums beyond the records": ("number", times(SUMS, 1000.0)),
    "totals beyond the records": ("number", set_to(TOTALS, 1e4)),
    "a code beyond its records": ("number", set_to(CODE, 5000.0)),
    "products beyond the records": ("number", set_to(PRODUCTS, 5000.0)),
    "second moments beyond the records": ("number", times(SQUARES, 1000.0)),
    "far fewer records than none": ("number", set_to(RECORDS, -5000.0)),
    "a label of far fewer records than none": ("labels", set_to(CODE, -5000.0)),
    "a negative second moment": ("labels", times(SQUARES, -100.0)),
    "a cell whose features are too long": ("time", set_to(SUMS, 5000.0)),
}


LIES = {f"exact: {name}": (*lie, {}) for name, lie in EXACT.items()}
LIES |= {f"noisy: {name}": (*lie, PRIVATE) for name, lie in NOISY.items()}


@pytest.mark.parametrize("name", LIES)
def test_sums_that_no_records_have_are_rejected(name: str) -> None:
    kind, lie, budget = LIES[name]
    sent = honest(kind, **budget)
    stored = stored_strategy(sent.config)(sent.config)
    assert stored.unpack(sent.payload).header.site == "north"
    with pytest.raises(SurrogateError):
        stored.unpack(lied(sent, lie))


@pytest.mark.parametrize("name", NOISY)
def test_secure_aggregation_that_no_records_have_ends_the_run(name: str) -> None:
    kind, lie = NOISY[name]
    sent = honest(kind, **PRIVATE)
    message = unpack_parameters(lied(sent, lie))
    claim = sent.config.mechanism
    assert isinstance(claim, Mechanism)
    tensors = {name: tensor.double() for name, tensor in message.tensors.items()}
    sigmas = {name: sigma for name, (sigma, _) in claim.noise.items()}
    with pytest.raises(RunError, match="false numbers"):
        learn_from_sum(Total(message.header, tensors, sigmas, claim), sent.config)


@pytest.mark.parametrize("kind", KINDS)
def test_honest_noise_passes_also_for_few_records(kind: str) -> None:
    for _ in range(3):
        sent = honest(kind, size=2, **PRIVATE | {"epsilon": 0.5})
        assert stored_strategy(sent.config)(sent.config).unpack(sent.payload).claim is not None


def test_sums_of_other_rows_are_rejected() -> None:
    sent = honest("labels")
    stored = stored_strategy(sent.config)(sent.config)
    message = unpack_parameters(sent.payload)
    header = replace(message.header, classes=message.header.classes[::-1])
    with pytest.raises(SurrogateError, match="another order"):
        stored.unpack(pack_parameters(replace(message, header=header)))


def hospitals(kind: str, sizes: tuple[int, ...], seed: int = 0) -> list[tuple[Any, Any]]:
    """Hospitals, of which the last one is for tests."""
    draw = np.random.default_rng(seed)
    found = []
    for size in (*sizes, 1000):
        x = draw.normal(size=(size, 8)) + 0.3 * draw.normal(size=8) * (len(found) < len(sizes))
        score = x[:, 0] - x[:, 1] + 0.3 * draw.normal(size=size)
        y = {
            "number": score,
            "labels": np.stack([score > 0, score > 1], 1).astype(float),
            "time": np.stack([draw.exponential(2 * np.exp(-score)), np.ones(size)], 1),
        }[kind]
        found.append((x, y))
    return found


def agreement(kind: str, sites: list[tuple[Any, Any]]) -> float:
    """Correlation of the first score with the truth, at the last hospital, and less where numbers are
    wrong.
    """
    return agreement_of(fs.learn(all_sent(kind, sites[:-1])), kind, sites[-1])


def all_sent(kind: str, sites: list[tuple[Any, Any]]) -> list[fs.Surrogate]:
    settings = KINDS[kind] | ({"time_head": "cells"} if kind == "time" else {})
    return [fs.fit(x, y, site=f"s{at}", **settings) for at, (x, y) in enumerate(sites)]


def agreement_of(model: fs.Model, kind: str, site: tuple[Any, Any]) -> float:
    x, y = site
    if kind == "number":
        found = np.asarray(model.predict(x)).ravel()
        return float(1 - np.square(y - found).sum() / np.square(y - y.mean()).sum())
    score = model.answers(x)["edema" if kind == "labels" else "risk"]
    return float(np.corrcoef(np.asarray(score), x[:, 0] - x[:, 1])[0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_ten_with_long_features_and_false_records_spoils_no_model(kind: str) -> None:
    """Its second moment is 900 times the others'. With as many records it has no more weight than
    another site, and no less than one whose scanner differs.
    """
    sites = hospitals(kind, (200,) * 10)
    honest = agreement(kind, sites)
    false = hospitals(kind, (200,) * 10, seed=1)[3][1]
    sites[3] = 30 * sites[3][0], false
    assert agreement(kind, sites) > honest - 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_four_with_many_records_and_turned_values_spoils_no_model(kind: str) -> None:
    """What it sends is like the others', but for what it means."""
    sites = hospitals(kind, (200, 200, 200, 600))
    x, y = sites[3]
    turned = np.stack([3 - y[:, 0].clip(0, 3), y[:, 1]], 1) if kind == "time" else -y
    turned = 1 - y if kind == "labels" else turned
    sent = all_sent(kind, [*sites[:3], (x, turned)])

    def score(defence: str) -> float:
        return agreement_of(fs.learn(sent, defence=defence), kind, sites[-1])

    assert score("harm") > agreement(kind, [*sites[:3], sites[-1]]) - 0.15
    # Of times, it costs too little.
    assert score("harm") >= score("none") + (0 if kind == "time" else 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_hospitals_of_other_sizes_and_scales_keep_their_weight(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = hospitals(kind, (60, 100, 200, 400, 150, 120))
    scaled = [(x * (1, 1.5, 0.7, 1, 2, 1, 1)[at], y) for at, (x, y) in enumerate(sites)]
    found = agreement(kind, scaled)
    monkeypatch.setattr(strategy, "moment_shares", lambda sums, most: [1.0] * len(sums))
    assert found == pytest.approx(agreement(kind, scaled), abs=0.01)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    lengths=st.lists(st.floats(-3, 3), min_size=3, max_size=8),
    stretched=st.sampled_from([1.0, 30.0]),
    most=st.sampled_from([1.0, 3.0]),
)
def test_no_second_moment_is_more_than_so_many_times_the_median(
    seed: int, lengths: list[float], stretched: float, most: float
) -> None:
    """Nor is its largest eigenvalue, where the first site has one long column."""
    draw = torch.Generator().manual_seed(seed)
    sums, moments = [], []
    for length in lengths:
        x = 10.0**length * torch.randn(50, 40, generator=draw, dtype=torch.float64)
        x[:, 0] *= 1 if moments else stretched
        apart = x - x.mean(0)
        folded = fold(apart.T @ apart)
        sums.append({RECORDS: torch.tensor([50.0]), TOTALS: x.sum(0), SQUARES: folded})
        moments.append(x)
    shares = moment_shares(sums, most)
    middle = torch.stack([x.mean(0) for x in moments]).median(0).values
    traces = torch.stack([(x - middle).square().sum() / 50 for x in moments])
    longest = torch.stack([torch.linalg.matrix_norm(x - middle, 2) ** 2 / 50 for x in moments])
    # About the largest: a few multiplications find those that stand out.
    for sizes, room in ((traces, 1 + 1e-9), (longest, 1.5)):
        kept = sizes * torch.tensor(shares, dtype=torch.float64)
        allowed = OTHER_SCALES * most * float(sizes.median()) * room
        assert float(kept.max()) <= allowed
    within = (traces <= OTHER_SCALES * most * traces.median()).tolist()
    assert all(one or share < 1 for one, share in zip(within, shares, strict=True))
    assert moment_shares(sums, 0) == moment_shares(sums[:2], most) + [1.0] * (len(sums) - 2)


def test_a_site_with_long_features_has_less_weight_in_rounds_too() -> None:
    """In the second round of residuals, which has second moments."""
    run = parse_run({"task": "survival", "horizon": 3.0, "bins": 3, "time-head": "residuals"})
    sites = rounds_of_times.hospitals((60, 60, 60, 60))
    sites[2] = 30 * sites[2][0], sites[2][1]
    training = rounds_of_times.begun(run, 4)
    replies = [
        rounds_of_times.released(
            rounds_of_times.job_of(run, site, training.model, 2, name=f"s{at}")
        )
        for at, site in enumerate(sites)
    ]
    capped = TargetRounds(run).defend(training, replies).capped
    assert set(capped) == {"s2"}
    assert capped["s2"] < 0.02
