"""A covariance as few factors and a diagonal: systems with it take the time of its factors, not of
its dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Most columns of the factors, as a share of the dimensions, for which the factors save time.
MOST_COLUMNS = 2 / 3
# Smallest shifted variance, as a share of the mean one, for which the inverse is precise to half of
# double precision.
LEAST_DIAGONAL = 1e-8


@dataclass(frozen=True)
class Factored:
    """F F^T + diag(v), a covariance in few numbers.

    Attributes:
        factor: F, (d, m), float64.
        variances: v, (d,), float64.

    Example:
        >>> factor = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
        >>> covariance = Factored(factor, torch.ones(2, dtype=torch.float64))
        >>> covariance.diagonal().tolist(), covariance.dense().tolist()
        ([2.0, 2.0], [[2.0, 1.0], [1.0, 2.0]])
        >>> covariance.solved(1.0, 0.0, factor).round(decimals=9).tolist()
        [[0.333333333], [0.333333333]]
    """

    factor: Tensor
    variances: Tensor

    def diagonal(self) -> Tensor:
        """The variance of each dimension (d,)."""
        return self._diagonal

    @cached_property
    def _diagonal(self) -> Tensor:
        return self.variances + self.factor.square().sum(1)

    def divided(self, scales: Tensor) -> Factored:
        """The covariance of the same records whose columns are divided by scales (d,), not zero."""
        return Factored(self.factor / scales[:, None], self.variances / scales.square())

    def dense(self) -> Tensor:
        """The matrix (d, d)."""
        matrix = self.variances.new_zeros(len(self.factor), len(self.factor))
        add_square(matrix, self.factor, 1.0)
        matrix.diagonal().add_(self.variances)
        return from_upper(matrix)

    def solved(self, factor: float, shift: float, right: Tensor) -> Tensor | None:
        """The solution of a shifted system: (factor (F F^T + diag(v)) + shift I)^-1 right.

        Args:
            factor: of the covariance, zero or more.
            shift: added to every variance.
            right: columns, (d, C), float64.

        Returns:
            Columns (d, C); None where rounding would spoil them.

        Source: the matrix inversion lemma (Woodbury 1950), with a system of m unknowns.
        """
        base = factor * self.variances + shift
        if float(base.min()) < LEAST_DIAGONAL * float(factor * self.diagonal().mean() + shift):
            return None
        scaled = self.factor * (factor / base).sqrt()[:, None]
        inner = torch.eye(self.factor.shape[1], dtype=torch.float64, device=base.device)
        add_square(inner, scaled.T, 1.0)
        triangle, failed = torch.linalg.cholesky_ex(inner, upper=True)
        if failed or not triangle.diagonal().isfinite().all():
            return None
        # Products with rows: with columns, which `right` often holds as a transpose, they take up
        # to four times as long.
        root = (1 / base).sqrt()
        whitened = (right.T * root).contiguous()
        inside = torch.cholesky_solve((whitened @ scaled).T, triangle, upper=True)
        return ((whitened - inside.T @ scaled.T) * root).T


class CovarianceSum:
    """A sum of covariances in d dimensions, kept as factors while they are few, and as a matrix
    from then on.

    Args:
        d: the number of dimensions.
        device: of what is added.

    Example:
        >>> total = CovarianceSum(2)
        >>> total.add_factor(torch.tensor([[1.0], [1.0]]), weight=2.0)
        >>> total.add_variances(torch.tensor([2.0, 4.0]))
        >>> dense(total.divided(2.0)).round(decimals=9).tolist()
        [[2.0, 1.0], [1.0, 3.0]]
    """

    def __init__(self, d: int, device: torch.device | None = None) -> None:
        self._d, self._columns = d, 0
        self._factors: list[tuple[Tensor, float]] = []
        self._variances = torch.zeros(d, dtype=torch.float64, device=device)
        self._matrix: Tensor | None = None

    def add(self, covariance: Tensor | Factored, weight: float) -> None:
        """Add weight times a covariance.

        Args:
            covariance: (d, d), whole or in factors.
            weight: of it, zero or more.
        """
        if isinstance(covariance, Factored):
            self.add_factor(covariance.factor, weight)
            self.add_variances(covariance.variances * weight)
        else:
            self.add_matrix(covariance, weight)

    def add_factor(self, factor: Tensor, weight: float = 1.0) -> None:
        """Add weight F F^T.

        Args:
            factor: F, (d, r).
            weight: of its square, zero or more.
        """
        self._columns += factor.shape[1]
        if self._matrix is None and self._columns > MOST_COLUMNS * self._d:
            self._to_matrix()
        if self._matrix is None:
            self._factors.append((factor, weight))
        else:
            add_square(self._matrix, factor.double(), weight)

    def add_variances(self, variances: Tensor) -> None:
        """Add a diagonal matrix.

        Args:
            variances: its diagonal, (d,), float64.
        """
        self._variances += variances

    def add_matrix(self, matrix: Tensor, weight: float) -> None:
        """Add weight times a symmetric matrix.

        Args:
            matrix: (d, d).
            weight: of it.
        """
        self._to_matrix().add_(matrix, alpha=weight)

    def divided(self, by: float) -> Tensor | Factored:
        """The sum, divided by a number.

        Args:
            by: the number, above zero.

        Returns:
            Float64: in factors while they are few, otherwise a matrix (d, d).
        """
        if self._matrix is None:
            return Factored(self._joined(by), self._variances / by)
        self._matrix.diagonal().add_(self._variances)
        return from_upper(self._matrix.div_(by))

    def _to_matrix(self) -> Tensor:
        if self._matrix is None:
            self._matrix = self._variances.new_zeros(self._d, self._d)
            add_square(self._matrix, self._joined(1.0), 1.0)
            self._factors = []
        return self._matrix

    def _joined(self, by: float) -> Tensor:
        """All factors side by side (d, m), float64, of the sum over `by`."""
        widths = [factor.shape[1] for factor, _ in self._factors]
        joined = self._variances.new_empty(self._d, sum(widths))
        for (factor, weight), part in zip(
            self._factors, torch.split(joined, widths, 1), strict=True
        ):
            part.copy_(factor).mul_((weight / by) ** 0.5)
        return joined


def dense(covariance: Tensor | Factored) -> Tensor:
    """The covariance as a matrix (d, d)."""
    return covariance.dense() if isinstance(covariance, Factored) else covariance


def sum_of_squares(covariance: Tensor | Factored) -> float:
    """The sum of the squared entries of a covariance, which is that of its squared eigenvalues.

    Args:
        covariance: (d, d), whole or in factors.

    Example:
        >>> sum_of_squares(Factored(torch.zeros(2, 0).double(), torch.tensor([1.0, 2.0]).double()))
        5.0
    """
    if isinstance(covariance, Tensor):
        return float(covariance.norm()) ** 2
    inner = covariance.variances.new_zeros(2 * (covariance.factor.shape[1],))
    add_square(inner, covariance.factor.T, 1.0)
    crossed = float((covariance.factor.square().sum(1) * covariance.variances).sum())
    return (
        float(from_upper(inner).norm()) ** 2
        + 2 * crossed
        + float(covariance.variances.square().sum())
    )


def add_square(matrix: Tensor, factor: Tensor, weight: float) -> None:
    """Add weight F F^T to the upper triangle of a matrix, on a processor in half the time of a
    product.

    Args:
        matrix: (d, d), float64. Its upper triangle is changed.
        factor: F, (d, r), float64.
        weight: of F F^T.
    """
    if matrix.is_cuda:
        matrix.addmm_(factor, factor.T, alpha=weight)
        return
    from scipy.linalg.blas import dsyrk

    if factor.numel():
        # The transpose has the order of columns that BLAS has, so its lower triangle is the upper
        # one here.
        dsyrk(weight, factor.numpy(), beta=1.0, c=matrix.numpy().T, lower=1, overwrite_c=1)


def from_upper(matrix: Tensor) -> Tensor:
    """The symmetric matrix (d, d) with the upper triangle of a matrix (d, d), which is changed."""
    upper = matrix.triu_()
    return upper + upper.triu(1).T
