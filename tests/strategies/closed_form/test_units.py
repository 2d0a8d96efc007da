"""A head in closed form decides the same in any unit of the features."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.closed_form.solvers import Solution, lda, naive_bayes, ridge
from fedsurrogate.strategies.closed_form.statistics import Statistics
from tests.examples import statistics_of

SOLVERS = {"lda": lda, "naive bayes": naive_bayes, "ridge": ridge}


def drawn(seed: int, unit: float = 1.0) -> tuple[Statistics, torch.Tensor]:
    """Statistics of 90 records of 3 classes in 5 dimensions, and new records."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(90) % 3
    middle = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    x = middle[y] + torch.randn(90, 5, generator=generator, dtype=torch.float64)
    new = middle.repeat(10, 1) + torch.randn(30, 5, generator=generator, dtype=torch.float64)
    return statistics_of(unit * x, y, 3), unit * new


def decisions(found: Solution, x: torch.Tensor) -> list[int]:
    return [int(each) for each in (x @ found.weight.T + found.bias).argmax(1)]


@settings(max_examples=8)
@given(seed=st.integers(0, 99), power=st.integers(-5, 6))
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_the_unit_of_the_features_does_not_matter(
    name: str, shrinkage: float, seed: int, power: int
) -> None:
    one, x = drawn(seed)
    other, scaled = drawn(seed, 10.0**power)
    solver = SOLVERS[name]
    assert decisions(solver(one, shrinkage), x) == decisions(solver(other, shrinkage), scaled)


@pytest.mark.parametrize("unit", [1e-9, 1e-8, 1e8])
def test_small_features_still_have_a_covariance(unit: float) -> None:
    """What counts as no variance at all is a share of the means, not a number."""
    one, _ = drawn(0)
    small, _ = drawn(0, unit)
    first, second = lda(one, 0.0), lda(small, 0.0)
    torch.testing.assert_close(second.weight * unit, first.weight, rtol=1e-3, atol=1e-9)
    assert second.added < 1
