"""A covariance as few factors and a diagonal: systems with it take the time of its factors, not of
its dimensions.

A covariance in a basis where it is tridiagonal or diagonal: many shifted systems with it then
take linear time each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.models.training_parts import stream

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


# Fewest dimensions for which LAPACK's reduction is worth it.
FEWEST = 8
# A negative eigenvalue up to this share of the mean one is rounding that no shift in use turns into
# more than a percent.
NEGLIGIBLE = 5e-5
# Random vectors for the sums over all eigenvalues, and products with each vector, for the
# projection onto a Krylov space. With these, all of 18 shrinkages of real features are those of all
# eigenvectors; with 8 products, four were not.
PROBES, STEPS = 10, 12
# Largest share of the dimensions that this space may have to be worth it.
MOST_PROJECTED = 0.5


@dataclass(frozen=True)
class Tridiagonal:
    """Q^T S Q = T for orthonormal columns Q (d, n), and columns B as Q^T B. Negative eigenvalues
    count as zero.

    Attributes:
        diagonal: of T, (n,), float64.
        off: the entries of T next to its diagonal, (n - 1,), float64.
        columns: Q^T B, (n, C), float64.
        values: eigenvalues of T, (n,), float64.
        weights: how many of the d eigenvalues of S each of them stands for, (n,), float64.

    Example:
        >>> covariance = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> columns = torch.tensor([[3.0], [3.0]], dtype=torch.float64)
        >>> reduced = Tridiagonal.of(covariance, columns)
        >>> round(reduced.sum_of(reduced.values), 4)
        4.0
        >>> solution = reduced.solved(1.0, 0.0)
        >>> round(float((reduced.columns * solution).sum()), 4)
        6.0
    """

    diagonal: Tensor
    off: Tensor
    columns: Tensor
    values: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls,
        matrix: Tensor | Factored,
        columns: Tensor,
        whole: bool = False,
        projected: bool = False,
    ) -> Tridiagonal:
        """Reduce a covariance in single precision.

        Args:
            matrix: S, (d, d), whole or in factors.
            columns: B, (d, C), float64.
            whole: to a diagonal, which takes thrice the time; always on a GPU, and where SciPy is
                missing (`benchmarks.gpu` needs PyTorch alone).
            projected: a large one onto a Krylov space, which takes half the time or less, and gives
                sums over eigenvalues to a percent.

        Source: Householder's reduction, LAPACK's sytrd, ormqr and sterf.
        """
        scale, d = float(matrix.diagonal().abs().max()) or 1.0, len(columns)
        if projected and not whole and (columns.shape[1] + PROBES) * STEPS <= MOST_PROJECTED * d:
            return _projected(
                _product(matrix, scale), columns, float(matrix.diagonal().sum()), scale
            )
        scaled = (dense(matrix) / scale).float()
        if (
            not (whole or scaled.is_cuda or d < FEWEST)
            and (reduced := _reduced(scaled, columns, scale)) is not None
        ):
            return reduced
        values, vectors = (part.double() for part in torch.linalg.eigh(scaled))
        return cls.from_values((values * scale).clamp_min(0), vectors.T @ columns)

    @classmethod
    def from_values(
        cls, values: Tensor, columns: Tensor, weights: Tensor | None = None
    ) -> Tridiagonal:
        """The reduction to a diagonal.

        Args:
            values: eigenvalues, (n,).
            columns: in the basis of their vectors, (n, C).
            weights: as in the class, (n,); None for one each.
        """
        return cls(
            values,
            values.new_zeros(len(values) - 1),
            columns,
            values,
            torch.ones_like(values) if weights is None else weights,
        )

    def sum_of(self, of_values: Tensor) -> float:
        """The sum of a function over all d eigenvalues of S.

        Args:
            of_values: its values at the eigenvalues of T, (n,).
        """
        return float((self.weights * of_values).sum())

    def solved(self, factor: float, shift: float) -> Tensor:
        """(factor T + shift I)^-1 columns, for a positive definite sum.

        Args:
            factor: of T.
            shift: added to every diagonal entry.

        Returns:
            (n, C).
        """
        if not self.off.any():
            return self.columns / (factor * self.diagonal + shift)[:, None]
        from scipy.linalg.lapack import dptsv

        diagonal, off = (factor * self.diagonal + shift).numpy(), (factor * self.off).numpy()
        *_, solution, failed = dptsv(diagonal, off, self.columns.numpy())
        assert not failed, "the shifted matrix is not positive definite"
        return torch.from_numpy(np.ascontiguousarray(solution))

    def times(self, right: Tensor) -> Tensor:
        """T times columns.

        Args:
            right: the columns, (n, C).

        Returns:
            (n, C).
        """
        product = self.diagonal[:, None] * right
        product[:-1] += self.off[:, None] * right[1:]
        product[1:] += self.off[:, None] * right[:-1]
        return product


def _reduced(scaled: Tensor, columns: Tensor, scale: float) -> Tridiagonal | None:
    """The reduction without eigenvectors; None if the matrix has a negative eigenvalue that
    matters.
    """
    try:
        from scipy.linalg import lapack
    except ImportError:
        return None

    d = len(scaled)
    # The transpose of a symmetric matrix in rows is the same matrix in columns, as LAPACK has it.
    work = int(lapack.ssytrd_lwork(d, lower=1)[0])
    reflectors, diagonal, off, sizes, _ = lapack.ssytrd(scaled.numpy().T, lower=1, lwork=work)
    values, failed = lapack.ssterf(diagonal, off)
    if failed or values[0] < -NEGLIGIBLE * values.mean():
        return None
    # Below the first row, the reflectors are those of a QR decomposition.
    below, rest = np.asfortranarray(reflectors[1:, :-1]), columns[1:].float().numpy()
    lwork = int(lapack.sormqr("L", "T", below, sizes, rest, -1)[1][0])
    turned, _, _ = lapack.sormqr("L", "T", below, sizes, rest, lwork)
    parts = [
        torch.from_numpy(np.ascontiguousarray(part)).double() for part in (diagonal, off, values)
    ]
    rotated = torch.cat([columns[:1], torch.from_numpy(np.ascontiguousarray(turned)).double()])
    eigenvalues = (scale * parts[2]).clamp_min(0)
    return Tridiagonal(
        scale * parts[0], scale * parts[1], rotated, eigenvalues, torch.ones_like(eigenvalues)
    )


def _product(matrix: Tensor | Factored, scale: float) -> Callable[[Tensor], Tensor]:
    """The product of vectors (b, d) with the covariance over `scale`, in single precision. Rows: a
    tenth faster or more.
    """
    if isinstance(matrix, Tensor):
        scaled = (matrix / scale).float()
        return lambda vectors: vectors @ scaled
    factor, variances = matrix.factor.float() / scale**0.5, (matrix.variances / scale).float()
    return lambda vectors: torch.addmm(variances * vectors, vectors @ factor, factor.T)


def _projected(
    product: Callable[[Tensor], Tensor], columns: Tensor, trace: float, scale: float
) -> Tridiagonal:
    """The covariance in the space of its first powers times the columns and some random vectors.

    Solutions for the columns, and their products, are those of the whole space to rounding after
    few powers (block Lanczos, Golub & Underwood 1977). Sums over eigenvalues follow from the random
    vectors (stochastic Lanczos quadrature, Ubaru, Chen & Saad 2017), with weights that give the
    number of dimensions and the trace exactly.
    """
    d, width = len(columns), columns.shape[1] + PROBES
    probes = torch.randn(d, PROBES, generator=stream(0, "", "probes"))
    start = torch.linalg.qr(torch.cat([columns.float(), probes.to(columns.device)], 1))
    basis, block = start.Q.new_empty(STEPS * width, d), start.Q.T
    inner = basis.new_zeros(len(basis), len(basis))
    for step in range(STEPS):
        own, known = slice(step * width, (step + 1) * width), basis[: (step + 1) * width]
        basis[own], image = block, product(block)
        inner[: own.stop, own] = known @ image.T
        if own.stop < len(basis):
            block = torch.linalg.qr(image.T - known.T @ inner[: own.stop, own]).Q
            # Again, so that a direction that is not new becomes another one that is.
            block = torch.linalg.qr(block - known.T @ (known @ block)).Q.T
    values, vectors = (part.double() for part in torch.linalg.eigh(inner, UPLO="U"))
    inside = vectors[:width].T @ start.R.double()
    values = (scale * values).clamp_min(0)
    weights, ratios = (
        inside[:, columns.shape[1] :].square().mean(1),
        values * (d / trace if trace > 0 else 1.0),
    )
    # Weights that change in proportion, so that their sum is d and the sum of the values is the
    # trace.
    powers = torch.stack([torch.ones_like(ratios), ratios])
    missing = d - powers @ weights
    weights = weights * (
        1
        + torch.linalg.lstsq((powers * weights) @ powers.T, missing[:, None]).solution[:, 0]
        @ powers
    )
    return Tridiagonal.from_values(values, inside[:, : columns.shape[1]], weights)
