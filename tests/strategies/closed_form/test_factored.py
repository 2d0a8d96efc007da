"""A covariance in factors gives what its matrix gives."""

from __future__ import annotations

import pytest
import torch

from fedsurrogate.strategies.closed_form.statistics import CovarianceSum, Factored


def covariance(d: int = 40, columns: int = 9, smallest: float = 0.1) -> Factored:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(d, columns, generator=generator, dtype=torch.float64)
    return Factored(factor, smallest + torch.rand(d, generator=generator, dtype=torch.float64))


def test_a_dimension_without_variance_is_left_to_the_matrix() -> None:
    found, right = covariance(smallest=0.0), torch.ones(40, 1, dtype=torch.float64)
    found.variances[3] = 0
    assert found.solved(1.0, 0.0, right) is None
    assert found.solved(0.9, 0.1, right) is not None


@pytest.mark.parametrize("parts", [1, 5])
def test_sums_are_the_same_with_few_factors_and_with_many(parts: int) -> None:
    total, exact = CovarianceSum(40), torch.zeros(40, 40, dtype=torch.float64)
    for _ in range(parts):
        part = covariance()
        total.add_factor(part.factor, 2.0)
        total.add_variances(part.variances)
        exact += 2 * part.factor @ part.factor.T + part.variances.diag()
    found = total.divided(4.0)
    assert isinstance(found, Factored) == (parts == 1)
    torch.testing.assert_close(found.dense() if isinstance(found, Factored) else found, exact / 4)
    total = CovarianceSum(40)
    total.add_factor(covariance().factor)
    total.add_matrix(exact, 0.5)
    torch.testing.assert_close(
        total.divided(1.0), exact / 2 + covariance().factor @ covariance().factor.T
    )
