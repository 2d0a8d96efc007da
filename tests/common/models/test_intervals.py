"""Intervals by samples of records and patients: how many they need, and who is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.class_metrics import bootstrap_weights, interval


@pytest.mark.parametrize(
    ("known", "units_", "exists"),
    [(10, 2, True), (5, 2, True), (4, 2, False), (10, 1, False), (10, 0, False), (0, 5, False)],
)
def test_an_interval_needs_two_units_and_half_of_the_samples(
    known: int, units_: int, exists: bool
) -> None:
    samples = np.array([0.1 * k for k in range(known)] + [math.nan] * (10 - known))
    assert (interval(samples, units_) is not None) == exists


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_samples_draw_as_many_units_as_there_are_each_alike(
    patients: int, images: int, seed: int
) -> None:
    names = [f"p{at % patients}" for at in range(patients * images)]
    weights = bootstrap_weights(len(names), names, 300, seed)
    first = weights[:, :patients]
    assert (weights == np.tile(first, images)).all(), "a patient is drawn with all of the images"
    assert (first.sum(1) == patients).all()
    # Six standard deviations of a multinomial share.
    assert np.abs(first.mean(0) - 1).max() < 6 * math.sqrt(1 / 300) + 1e-9
    plain = bootstrap_weights(len(names), None, 300, seed)
    assert (plain.sum(1) == len(names)).all()
    assert (bootstrap_weights(len(names), names, 300, seed) == weights).all()
    assert (
        bootstrap_weights(0, [], 3, seed).shape
        == bootstrap_weights(0, None, 3, seed).shape
        == (3, 0)
    )
