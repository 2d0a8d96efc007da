"""Heads of numbers by their formulas in numpy: what the fit is given, and what follows from it, with noise,
with rounding, and for a given strength.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.targets.number import (
    Directions,
    Fitted,
    NumberHead,
    Outcomes,
    cross_validated,
    expected,
    number_head,
)
from fedsurrogate.strategies.targets.sums import CodedSums
from tests.coded import noisy, number_sums

few = settings(max_examples=30, deadline=None)
LOW, HIGH = [-1.0, -1.0], [1.0, 1.0]
# In the unit of the numbers, which have been scaled to [-1, 1].
ENDS = ([10.0, -3.0], [20.0, 1.0])
MIDDLE, HALF = np.array([15.0, -1.0]), np.array([5.0, 2.0])


def cohort(seed: int, n: int) -> CodedSums:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 4)) * np.array([1.0, 0.5, 0.2, 0.1]) + draw.normal(size=4) / 5
    y = np.tanh(x[:, :2] + 0.3 * draw.normal(size=(n, 2)) + np.array([0.1, -0.4]))
    return number_sums(torch.from_numpy(y), torch.from_numpy(x), -1, 1)


def check(head: NumberHead, sums: CodedSums, fitted: Fitted, variance: np.ndarray, more: np.ndarray) -> None:  # fmt: skip
    n = max(float(sums.code[0]), 1.0)
    weight, error = fitted.weight.numpy(), fitted.error.numpy()
    mean = sums.mean.numpy()
    np.testing.assert_allclose(head.weight, HALF[:, None] * weight, rtol=1e-7)
    bias = MIDDLE + HALF * (sums.code[1:].numpy() / n - weight @ mean)
    np.testing.assert_allclose(head.bias, bias, rtol=1e-7)
    np.testing.assert_allclose(head.deviation, HALF * np.sqrt(error + more), rtol=1e-7)
    np.testing.assert_allclose(head.explained, 1 - error / variance, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(head.strength, fitted.strength)


@few
@given(st.integers(0, 9999), st.integers(30, 400), st.sampled_from([0.1, 1.0, 2.5]), st.booleans())
def test_a_head_under_noise_is_given_what_the_noise_leaves(
    seed: int, n: int, scale: float, centre: bool
) -> None:
    code, table = (scale * torch.tensor(each).double() for each in ([2.0, 0.5, 1.5], [0.3, 0.7, 1]))
    sums = noisy(cohort(seed, n), code, table, 1.3 * scale, seed, 0.8 * scale, centre)
    assert sums.products is not None
    records = max(float(sums.code[0]), 1.0)
    means = sums.code[1:].numpy() / records
    squares = np.diag(sums.products.numpy()) / records
    variance = squares - means**2
    blur = (0.8 * scale) ** 2 + (2 * means * code[1:].numpy()) ** 2
    blur = np.sqrt(blur + ((squares - 2 * means**2) * float(code[0])) ** 2) / records
    if (bad := np.flatnonzero(variance <= np.maximum(blur, 1e-12))).size:
        reason = (
            f"number {bad[0] + 1} has the variance .* is within the noise of {blur[bad[0]]:.2g}:"
        )
        with pytest.raises(RunError, match=reason):
            number_head(sums, *ENDS)
        return
    cross = sums.sums[1:].numpy() / records - np.outer(means, sums.mean)
    entry = np.hypot(table[1:].numpy(), means * float(table[0])) / records
    given_ = (cross, variance, np.full(2, records), entry)
    directions = Directions.of_noisy(sums.covariance, 1.3 * scale / records, 0.2)
    fitted = expected(directions, Outcomes(*map(torch.from_numpy, given_)))
    check(number_head(sums, *ENDS), sums, fitted, variance, blur)


@few
@given(st.integers(0, 9999), st.integers(12, 200), st.sampled_from([0.0, 0.02]))
def test_a_head_of_exact_sums_knows_what_rounding_has_changed(
    seed: int, n: int, rounding: float
) -> None:
    sums = replace(cohort(seed, n), rounding=rounding)
    assert sums.products is not None
    means = sums.code[1:].numpy() / n
    variance = np.diag(sums.products.numpy()) / n - means**2
    cross = sums.sums[1:].numpy() / n - np.outer(means, sums.mean)
    outcomes = Outcomes(
        *map(torch.from_numpy, (cross, variance, np.full(2, float(n)), np.zeros(2)))
    )
    fitted = cross_validated(Directions.of(sums.covariance, rounding), outcomes)
    check(number_head(sums, *ENDS), sums, fitted, variance, np.zeros(2))
    assert float(fitted.strength.min()) >= rounding
