"""A covariance cleaned of noise, and the ridge of one without an inverse, against loops in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.closed_form.solvers import cleaned, factor_of, repair_facts, solved

few = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 9999)


@few
@given(SEEDS, st.integers(2, 7), st.sampled_from([0.0, 0.05, 0.6]), st.sampled_from([0.0, 1.0]))
@example(1, 5, 0.6, 1.0)
@example(2, 5, 0.6, 0.0)
@example(3, 6, 0.05, 1.0)
def test_eigenvalues_are_moved_back_raised_and_kept_in_order(
    seed: int, d: int, noise: float, signal: float
) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(d, d)) * np.linspace(2, 0.1, d)
    table = draw.normal(size=(d, d))
    matrix = signal * rows @ rows.T / d + noise * (table + table.T) / 2
    found = cleaned(torch.from_numpy(matrix), noise)
    values, vectors = np.linalg.eigh(matrix)
    radius = noise * math.sqrt(2 * d)
    width = max(2 * radius / math.sqrt(d), 1e-12)
    back: list[float] = []
    for value in values:
        pushed = np.mean([(value - other) / ((value - other) ** 2 + width**2) for other in values])
        back.append(max([value - radius**2 / 2 * pushed, *back]))
    least = max(0.2 * values.sum() / d, 1e-9)
    kept = np.array([max(each, least) + 0.15 * radius for each in back])
    factor, variances = found.factor.numpy(), found.variances.numpy()
    whole = factor @ factor.T + np.diag(variances)
    np.testing.assert_allclose(whole, (vectors * kept) @ vectors.T, atol=1e-9 * kept.max())
    np.testing.assert_allclose(variances, kept.min())


@few
@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.sampled_from([1e-3, 1.0, 1e6]))
def test_the_smallest_ridge_of_a_series_is_added_and_named(
    seed: int, rank: int, d: int, scale: float
) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(rank, d))
    matrix = scale * rows.T @ rows
    mean = float(np.abs(np.diag(matrix)).mean())
    given_ = torch.from_numpy(matrix.copy())
    factor, added = factor_of(given_)
    # Ten times more at each try, and all of them together.
    tries = [0.0, *np.cumsum([1e-12 * 10**k for k in range(12)])]
    at = int(np.argmin([abs(each - added) for each in tries]))
    assert added == pytest.approx(tries[at], rel=1e-9)
    np.testing.assert_allclose(given_, matrix + added * mean * np.eye(d), rtol=1e-12, atol=0)
    np.testing.assert_allclose(factor @ factor.T, given_, atol=1e-12 * scale * d * 100)
    if rank >= d and np.linalg.cond(matrix) < 1e9:
        assert added == 0
    if rank < d:
        assert 0 < added < 1e-8
    right = torch.from_numpy(draw.normal(size=(2, d)))
    product, again = solved(torch.from_numpy(matrix.copy()), right)
    assert again == added
    torch.testing.assert_close(product @ given_, right, rtol=1e-2, atol=1e-2)
    assert repair_facts(added) == ({"added-ridge": added} if added else {})


def test_zeros_get_a_whole_ridge_and_a_hole_in_a_matrix_none() -> None:
    factor, added = factor_of(torch.zeros(3, 3).double())
    assert added == 1
    assert bool((factor.diagonal() > 0).all())
    for hole in (torch.nan, torch.inf):
        for at in ((0, 0), (2, 2), (2, 0)):
            matrix = torch.eye(3).double()
            matrix[at] = matrix[at[::-1]] = hole
            with pytest.raises(
                RunError, match="the pooled covariance holds a number that is not fin"
            ):
                factor_of(matrix)
    # Of a mean of two thirds, the fifth ridge is the first that lifts what is below zero.
    below = torch.diag(torch.tensor([1.0, 1.0, -1e-9], dtype=torch.float64))
    assert factor_of(below)[1] == pytest.approx(1.1111e-8)
    # A pivot that is rounding alone is not taken for one.
    for least, wanted in ((3e-14, 0.0), (3e-15, 1e-12)):
        corner = math.sqrt(1 - least)
        matrix = torch.tensor([[1.0, corner], [corner, 1.0]], dtype=torch.float64)
        assert factor_of(matrix)[1] == pytest.approx(wanted)
