"""A promise and intervals of metrics by scipy, torch and plain sums: limits of a share, divergences of
normal logits, and samples of patients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.client_app.model_use.evaluation import check_promise
from fedsurrogate.common.models.class_metrics import (
    Metric,
    bootstrap_weights,
    interval,
    measured,
    with_interval,
)
from fedsurrogate.common.models.classifiers import Ensemble, Head
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from tests.client_app.model_use.test_decisions import head, records


def test_a_promise_needs_a_linear_head_all_gaussians_and_records() -> None:
    x, labels = records(3, 30)
    own, gaussians = head(3), fit_gaussians(x, labels)
    assert check_promise(own, gaussians, x, labels) is not None
    two = fit_gaussians(x[labels < 2], labels[labels < 2])

    for model, known, rows in (
        (own, None, 30),
        (own, two, 30),
        (own, gaussians, 0),
        (Ensemble((own, own)), gaussians, 30),
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
            assert each == Metric(value, None, None, count), "no interval without its value"
        else:
            assert each == Metric(value, min(low, value), max(high, value), count)


def test_a_metric_that_is_not_finite_is_undefined() -> None:
    samples = np.arange(100.0)
    for value in (None, math.nan, math.inf):
        assert with_interval(value, samples, 5, 9) == Metric(None, None, None, 5)
    assert with_interval(1.0, np.zeros(0), 5, 9) == Metric(1.0, None, None, 5)
    low, high = interval(samples, 9) or (0.0, 0.0)
    assert with_interval(50.0, samples, 5, 9) == Metric(50.0, low, high, 5)
    assert with_interval(-1.0, samples, 5, 9) == Metric(-1.0, None, None, 5)
