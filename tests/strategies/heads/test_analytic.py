"""AFL: the sums of all sites give the head that least squares finds on all their records."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from common.errors import SurrogateError
from common.models.parameters import Parameters
from common.run import parse_run
from common.surrogates.class_sums import fold
from common.surrogates.surrogates import Header
from common.wire.model_proto import pack_parameters
from strategies.heads.analytic import Analytic, solve
from strategies.heads.pooled import Pooled

CLASSES = ("a", "b", "c")


def records(count: int = 200, d: int = 6) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 3
    features = torch.randn(count, d, generator=torch.Generator().manual_seed(1)) + 2 * torch.eye(3, d)[labels] + 1
    return features.double(), labels


def sums(features: Tensor, labels: Tensor, classes: tuple[str, ...] = CLASSES, site: str = "s") -> Parameters:
    targets = torch.eye(len(classes), dtype=torch.float64)[labels]
    counts, totals = targets.sum(0), targets.T @ features
    centred = features - (totals / counts.clamp_min(1)[:, None])[labels]
    tensors = {"counts": counts, "sums": totals, "squares": fold(centred.T @ centred)}
    return Parameters(Header("afl", run_of().run, site, "f", classes), 1, tensors, len(labels))


def run_of() -> Header:
    strategy = Analytic({"method": "afl", "sites": 1})
    return Header("afl", strategy.expectation().run, "s", "f", CLASSES)


def test_sites_of_one_class_each_give_the_head_of_all_records_together() -> None:
    features, labels = records()
    rows = [labels == index for index in range(3)]
    sites = [
        sums(features[own], torch.zeros(int(own.sum()), dtype=torch.int64), (CLASSES[i],)) for i, own in enumerate(rows)
    ]
    ridge = 0.05
    head = solve(Pooled.of(sites, [1.0] * 3, CLASSES), ridge)
    covariance = (features - features.mean(0)).square().mean()
    known = Ridge(alpha=float(ridge * covariance * len(labels))).fit(features.numpy(), torch.eye(3)[labels].numpy())
    torch.testing.assert_close(head.weight, torch.tensor(known.coef_).float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head.bias, torch.tensor(known.intercept_).float(), rtol=1e-4, atol=1e-6)


def test_a_site_that_keeps_half_of_its_weight_counts_half() -> None:
    features, labels = records()
    whole, half = sums(features, labels), sums(features[::2], labels[::2])
    twice = solve(Pooled.of([half, whole], [1.0, 1.0], CLASSES), 0.01)
    doubled = replace(whole, tensors={name: 2 * t for name, t in whole.tensors.items()}, records=2 * whole.records)
    torch.testing.assert_close(solve(Pooled.of([half, doubled], [1.0, 0.5], CLASSES), 0.01).weight, twice.weight)


def spoiled(name: str, value: Tensor, records: int = 200) -> bytes:
    sent = sums(*globals()["records"]())
    return pack_parameters(replace(sent, tensors=dict(sent.tensors) | {name: value}, records=records))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (lambda: spoiled("counts", torch.tensor([-1.0, 100, 101])), "counts: -1.* is outside 0"),
        (lambda: spoiled("counts", torch.tensor([1.0, 1, 1])), "3 records together, but 200"),
        (lambda: spoiled("squares", fold(-torch.eye(6).double())), "no records have"),
        (lambda: spoiled("squares", fold(torch.eye(6).double() - 0.9)), "no records have"),
        (lambda: spoiled("squares", torch.ones(20)), "shape"),
    ],
)
def test_sums_that_no_records_have_are_refused(payload: object, why: str) -> None:
    assert callable(payload)
    with pytest.raises(SurrogateError, match=why):
        Analytic({"method": "afl", "sites": 1}).unpack(payload())


def test_honest_sums_pass_at_half_precision() -> None:
    sent = Analytic({"method": "afl", "sites": 1}).unpack(pack_parameters(sums(*records(3, 40))))
    assert sent.records == 3


def test_a_ridge_below_zero_is_refused() -> None:
    with pytest.raises(Exception, match=r"afl\.ridge"):
        parse_run({"method": "afl", "afl.ridge": -1.0})
