"""A promise and intervals of measures by scipy, torch and plain sums: limits of a share, divergences of
normal logits, and samples of patients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest
from torch.distributions import MultivariateNormal, kl_divergence

from fedsurrogate.client_app.model_use import promise
from fedsurrogate.client_app.model_use.adapted import Neighbours
from fedsurrogate.client_app.model_use.promise import check_promise, clopper_pearson
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.intervals import (
    Measure,
    bootstrap_weights,
    interval,
    measured,
    with_interval,
)
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from tests.client_app.model_use.test_decisions import head, records


@settings(max_examples=30)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_limits_of_a_share_are_those_of_scipys_exact_interval(both: tuple[int, int]) -> None:
    wanted = binomtest(*both).proportion_ci(0.95, "exact")
    assert clopper_pearson(*both) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_a_bound_is_that_of_the_divergence_of_differences_of_logits(
    seed: int, classes: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    numbers = (classes - 1) * (classes + 2) // 2
    root = torch.randn(classes, classes + 2, generator=draw).double()
    mean, covariance = torch.randn(classes, generator=draw).double(), root @ root.T
    own = 2 * torch.randn(3 * numbers + 1, classes, generator=draw).double()
    # Three records for each number of the mean and the covariance are too few.
    assert promise._bretagnolle_huber(own[:-1], mean, covariance) is None
    apart = own[:, 1:] - own[:, :1]
    centred = apart - apart.mean(0)
    here = MultivariateNormal(apart.mean(0), centred.T @ centred / (len(own) - 1))
    base = torch.cat([-torch.ones(classes - 1, 1), torch.eye(classes - 1)], 1).double()
    there = MultivariateNormal(base @ mean, base @ covariance @ base.T)
    wanted = math.sqrt(1 - math.exp(-float(kl_divergence(here, there))))
    found = promise._bretagnolle_huber(own, mean, covariance)
    assert found == pytest.approx(wanted, rel=1e-6)
    # Logits that are all alike, here or there, have no density.
    assert promise._bretagnolle_huber(own * 0, mean, covariance) is None
    assert promise._bretagnolle_huber(own, mean, covariance * 0) is None


def test_a_promise_adds_classes_by_their_shares_here() -> None:
    x, labels = records(3, 90)
    own, gaussians = head(3), fit_gaussians(*records(4, 90))
    labels[:50] = 0
    # A class without records here counts for nothing.
    kept = labels != 2
    found = check_promise(own, gaussians, x[kept], labels[kept])
    assert found is not None
    decided = own.scores(x[kept]).argmax(1)
    wrong = float((decided != labels[kept]).double().mean())
    assert found.error == pytest.approx(wrong)
    count = int(kept.sum())
    assert (found.low, found.high) == clopper_pearson(round(wrong * count), count)
    assert [name for name, _, _ in found.classes] == ["a", "b"]
    shares = [float((labels[kept] == at).double().mean()) for at in (0, 1)]
    for at, (_, promised, error) in enumerate(found.classes):
        rows = labels[kept] == at
        assert error == pytest.approx(float((decided[rows] != at).double().mean()))
        assert 0 <= promised <= 1
    for at, value in ((1, found.promised), (2, found.error)):
        parts = [share * each[at] for share, each in zip(shares, found.classes, strict=True)]  # type: ignore[operator]
        assert value == pytest.approx(sum(parts))
    assert found.bound == pytest.approx(min(1.0, found.promised + found.distance))
    assert found.kept == (found.low <= found.promised)
    assert abs(found.error - found.promised) <= found.distance + 1e-9


def test_a_promise_needs_a_linear_head_all_gaussians_and_records() -> None:
    x, labels = records(3, 30)
    own, gaussians = head(3), fit_gaussians(x, labels)
    assert check_promise(own, gaussians, x, labels) is not None
    two = fit_gaussians(x[labels < 2], labels[labels < 2])

    for model, known, rows in (
        (own, None, 30),
        (own, two, 30),
        (own, gaussians, 0),
        (Neighbours(own.header, x, labels, 3), gaussians, 30),
    ):
        assert check_promise(model, known, x[:rows], labels[:rows]) is None
    assert isinstance(own, Head)


Rows = NDArray[np.int64]


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 12), st.booleans())
def test_samples_repeat_records_as_often_as_they_are_drawn(
    seed: int, count: int, grouped: bool
) -> None:
    values = np.random.default_rng(seed).normal(size=count)
    patients = [f"p{at // 2}" for at in range(count)] if grouped else None

    def points(rows: Rows) -> Mapping[str, float | None]:
        whole = float(values[rows].mean()) if len(rows) else None
        positive = values[rows][values[rows] > 0]
        return {"mean": whole, "positive": float(positive.mean()) if len(positive) else None}

    found = measured(points, count, patients, 25, seed)
    weights = bootstrap_weights(count, patients, 25, seed)
    units = (count + 1) // 2 if grouped else count
    for name, each in found.items():
        value = points(np.arange(count))[name]
        samples = []
        for row in weights if count else ():
            rows = np.array([at for at in range(count) for _ in range(int(row[at]))], np.int64)
            sample = points(rows)[name]
            samples.append(np.nan if sample is None else sample)
        limits = interval(np.array(samples), units) if value is not None else None
        low, high = limits or (None, None)
        if low is None or value is None or not low - 1e-9 <= value <= high + 1e-9:
            assert each == Measure(value, None, None, count), "no interval without its value"
        else:
            assert each == Measure(value, min(low, value), max(high, value), count)


def test_a_measure_that_is_not_finite_is_undefined() -> None:
    samples = np.arange(100.0)
    for value in (None, math.nan, math.inf):
        assert with_interval(value, samples, 5, 9) == Measure(None, None, None, 5)
    assert with_interval(1.0, np.zeros(0), 5, 9) == Measure(1.0, None, None, 5)
    low, high = interval(samples, 9) or (0.0, 0.0)
    assert with_interval(50.0, samples, 5, 9) == Measure(50.0, low, high, 5)
    assert with_interval(-1.0, samples, 5, 9) == Measure(-1.0, None, None, 5)
