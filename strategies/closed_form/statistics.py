"""The statistics of records that a head in closed form needs. Those of several sites add up to
those of all records.

Statistics of the sites' records, from what the coordinator receives: mixtures, sums of each
site, or secure aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.covariances import (
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
    eigen,
)
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate, without_classes

from ..pooling.site_weights import Total, check_moments

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


# Fewest columns for which SciPy's BLAS and LAPACK are worth their import.
FEWEST = 256


def add_square(matrix: Tensor, factor: Tensor, weight: float) -> None:
    """Add weight F F^T to the upper triangle of a matrix, where that takes long on a processor in half
    the time of a product.

    Args:
        matrix: (d, d), float64. Its upper triangle is changed.
        factor: F, (d, r), float64.
        weight: of F F^T.
    """
    if matrix.is_cuda or len(matrix) < FEWEST:
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
        values, vectors = (part.double() for part in eigen(scaled))
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
    values, vectors = (part.double() for part in eigen(inner.mT))
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


# Half precision moves eigenvalues by about this share of the sum of all of them.
EIGENVALUE_ROUNDING = 1e-3


def check_tables(what: str, tables: Iterable[tuple[str, Tensor, tuple[int, ...]]]) -> None:
    """Check the shape and type of tables.

    Args:
        what: they are part of, for the error.
        tables: a name, the table, and the shape that it must have.

    Raises:
        ValueError: for another shape, or another type than float64.
    """
    for name, tensor, expected in tables:
        if tensor.dtype != torch.float64 or tensor.shape != expected:
            raise ValueError(
                f"{what}: {name} of shape {tuple(tensor.shape)} in {tensor.dtype}; {expected} in "
                "torch.float64 is needed"
            )


@dataclass(frozen=True)
class Statistics:
    """Number and mean of the records of each class, and the covariance of all records around the
    mean of their class.

    They are averages with the number of records that they stand for, so that sums over sites are
    exact for any partition of the records, and a site with a part of its weight has the same
    averages.

    Attributes:
        counts: records of each class, (C,), zero or more. Not always whole: a site may have a part
            of its weight.
        means: mean of each class, (C, d). Zero for a class without records, or noise under privacy.
        covariance: mean of (x - m_y)(x - m_y)^T over all records x of class y, (d, d): one matrix
            for all classes, divided by the number of records. A matrix, or `Factored` where few
            sites have sent factors of a low rank; solvers take both, and `matrix` is a matrix in
            each case.
        sampled: whether the covariance is an empirical one. False if it was restricted to a
            diagonal or to one variance, which few records determine.

    Raises:
        ValueError: if a tensor is not float64, or if shapes do not agree. In single precision, the
            square of a large mean would leave nothing of a small variance.

    Example:
        Two hospitals, two classes, two dimensions. The second hospital has no record of the second
        class.

        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> identity = torch.eye(2, dtype=torch.float64)
        >>> north = Statistics(table(2, 4), table([0, 0], [4, 2]), identity)
        >>> south = Statistics(table(2, 0), table([2, 2], [0, 0]), identity)
        >>> both = north + south
        >>> both.counts.tolist(), both.means.tolist()
        ([4.0, 4.0], [[1.0, 1.0], [4.0, 2.0]])

        The means of the first class differ, so its records are spread more widely in both hospitals
        together:

        >>> both.covariance.tolist()
        [[1.5, 0.5], [0.5, 1.5]]
        >>> both.total().round(decimals=9).tolist()
        [[3.75, 1.25], [1.25, 1.75]]
        >>> (north + south.scaled(0.5)).counts.tolist()
        [3.0, 4.0]
        >>> south.within(south.counts > 0).means.tolist()
        [[2.0, 2.0]]
    """

    counts: Tensor
    means: Tensor
    covariance: Tensor | Factored
    sampled: bool = True

    def __post_init__(self) -> None:
        shape = tuple(self.means.shape)
        if len(shape) != 2:
            raise ValueError(f"statistics: means of shape {shape}, which must be (C, d)")
        dimension = shape[1]
        tables = [("counts", self.counts, shape[:1]), ("means", self.means, shape)]
        if isinstance(self.covariance, Factored):
            factor, variances = self.covariance.factor, self.covariance.variances
            tables.append(("covariance's factor", factor, (dimension, *factor.shape[1:2])))
            tables.append(("covariance's variances", variances, (dimension,)))
        else:
            tables.append(("covariance", self.covariance, (dimension, dimension)))
        check_tables("statistics", tables)

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of the records of both, for the same classes in the same order."""
        return sum_of([self, other])

    def scaled(self, share: float) -> Statistics:
        """The same records with a share of their weight. Averages stay as they are."""
        return replace(self, counts=self.counts * share)

    def within(self, kept: Tensor) -> Statistics:
        """The statistics of some classes.

        The covariance, which all classes share, stays: how much each class adds to it is not known.
        It is exact where the other classes have no records.

        Args:
            kept: indices of the classes, (K,), or a mask, (C,).
        """
        return replace(self, counts=self.counts[kept], means=self.means[kept])

    def divided(self, scales: Tensor) -> Statistics:
        """The statistics of the same records with each column divided by a number.

        Args:
            scales: (d,), float64, not zero.
        """
        covariance = self.covariance
        return replace(
            self,
            means=self.means / scales,
            covariance=covariance.divided(scales)
            if isinstance(covariance, Factored)
            else covariance / scales / scales[:, None],
        )

    def total(self) -> Tensor:
        """The covariance of all records around their common mean: within classes, and between them.

        Returns:
            (d, d), float64.
        """
        between = self.between()
        return torch.addmm(self.matrix, between.T, between)

    def between(self) -> Tensor:
        """Class means minus the mean of all records, times the root of the class's share.

        Returns:
            B, (C, d): B^T B is the covariance between classes.
        """
        return (self.means - self.mean) * self.priors.sqrt()[:, None]

    @property
    def records(self) -> float:
        """The number of records."""
        return float(self.counts.sum())

    @property
    def priors(self) -> Tensor:
        """The share of each class of the records (C,)."""
        return self.counts / self.counts.sum()

    @property
    def mean(self) -> Tensor:
        """The mean of all records (d,)."""
        return self.priors @ self.means

    @property
    def matrix(self) -> Tensor:
        """The covariance within classes as a matrix (d, d)."""
        return dense(self.covariance)

    def whole(self) -> Statistics:
        """The same with the covariance as a matrix."""
        return replace(self, covariance=self.matrix)


def sum_of(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of the records of all parts, which come one at a time; memory is that of two
    of them.

    Class means and the scatter around them are updated by each part (Chan, Golub & LeVeque 1983).
    Nothing is subtracted from sums of squares: the huge mean of one part would leave only rounding
    of the covariance of the others.

    Args:
        parts: statistics of the same classes in the same order.

    Returns:
        Their sum. Its covariance is `Factored` while the parts have few factors together.

    Raises:
        ValueError: without parts, or for parts with other classes or dimensions.
    """
    remaining = iter(parts)
    first = next(remaining, None)
    if first is None:
        raise ValueError("no statistics to add")
    counts, means, sampled = first.counts, first.means, first.sampled
    scatter = CovarianceSum(means.shape[1], means.device)
    scatter.add(first.covariance, first.records)
    for part in remaining:
        if part.means.shape != means.shape:
            shapes = f"{tuple(part.means.shape)} and {tuple(means.shape)}"
            raise ValueError(f"statistics of other classes or dimensions: means of {shapes}")
        both = (counts > 0) & (part.counts > 0)
        counts = counts + part.counts
        share, apart = part.counts / counts.clamp_min(1e-300), part.means - means
        # n m / (n + m), for n records so far and m more.
        weights = part.counts * (1 - share)
        scatter.add(part.covariance, part.records)
        scatter.add_factor((apart[both] * weights[both].sqrt()[:, None]).T)
        means = means + apart * share[:, None]
        sampled = sampled and part.sampled
    return Statistics(counts, means, scatter.divided(float(counts.sum())), sampled)


def pooled(surrogates: Iterable[Surrogate], classes: Sequence[str]) -> Statistics:
    """The statistics of all sites together, with a whole covariance.

    Args:
        surrogates: of the sites, one at a time, so memory is O(d^2) for any number of them.
        classes: of the statistics, C, which hold all classes of every site.

    Returns:
        Statistics with a covariance (d, d).
    """
    return sum_of(of_mixtures(each, classes) for each in surrogates).whole()


def of_mixtures(surrogate: Surrogate, classes: Sequence[str]) -> Statistics:
    """The statistics of one site's records from its mixtures.

    Components of a class count as its parts, so mixtures of several components are as exact as
    those of one.

    Args:
        surrogate: of the site.
        classes: of the statistics, C, which hold all of the site's.
    """
    table = surrogate.mixtures
    counts, means, rows = _class_means(surrogate, classes)
    sizes, own = _records_of_components(table), table.means.double()
    shares = sizes / sizes.sum()
    covariance = _mean_covariance(table, shares)
    if len(rows) > len(surrogate.header.classes):
        around = CovarianceSum(own.shape[1])
        around.add(covariance, 1.0)
        around.add_factor(((own - means[rows]) * shares.sqrt()[:, None]).T)
        covariance = around.divided(1.0)
    return Statistics(
        counts, means, covariance, sampled=not isinstance(table.covariance, Diagonal | Spherical)
    )


def _class_means(surrogate: Surrogate, classes: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Records (C,) and mean (C, d) of each class, and the class of each component (M,)."""
    table = surrogate.mixtures
    rows = class_indices(classes, surrogate.header.classes)[table.labels]
    sizes = _records_of_components(table)
    counts, totals = (
        _placed(each, rows, len(classes)) for each in (sizes, sizes[:, None] * table.means.double())
    )
    return counts, totals / counts.clamp_min(1e-300)[:, None], rows


# Records (C,) and mean (C, d) of each class, and the trace of the covariance.
Outline = tuple[Tensor, Tensor, Tensor]


def outline(statistics: Statistics) -> Outline:
    """What statistics say of a site without directions."""
    return statistics.counts, statistics.means, statistics.covariance.diagonal().sum()


def outline_of_mixtures(surrogate: Surrogate, classes: Sequence[str]) -> Outline:
    """The outline of `of_mixtures`; no stored covariance of one component a class is read for it."""
    table = surrogate.mixtures
    if isinstance(table.covariance, Gram) and len(table.labels) == len(surrogate.header.classes):
        trace = table.covariance.variances_per_dimension().double().sum()
        return *_class_means(surrogate, classes)[:2], trace
    return outline(of_mixtures(surrogate, classes))


def of_sums(sent: Parameters, classes: Sequence[str]) -> Statistics:
    """The statistics of one site's records from its class sums.

    Args:
        sent: counts (C_k,) and sums (C_k, d), whose covariance is not known: zero.
        classes: of the run, C, which hold all of the site's.
    """
    rows = class_indices(classes, sent.header.classes)
    counts, sums = sent.tensors["counts"].double(), sent.tensors["sums"].double()
    means = sums / counts.clamp_min(1e-30)[:, None]
    return Statistics(
        _placed(counts, rows, len(classes)),
        _placed(means, rows, len(classes)),
        _no_covariance(sums.shape[1]),
    )


def of_noisy_sums(tensors: Mapping[str, Tensor]) -> Statistics:
    """The statistics of records behind noisy sums, whose means are used as they are.

    A class whose noisy count is below zero has zero records here, and noise for a mean.

    Args:
        tensors: counts (C,) and sums (C, d), float64, of features of norm at most one.
    """
    counts, sums = tensors["counts"].clamp_min(0), tensors["sums"]
    return Statistics(counts, sums / counts.clamp_min(1)[:, None], _no_covariance(sums.shape[1]))


def _no_covariance(dimension: int) -> Factored:
    """Stands where sites send no second moment."""
    return Factored(
        torch.zeros(dimension, 0, dtype=torch.float64), torch.zeros(dimension, dtype=torch.float64)
    )


def of_total(total: Total) -> tuple[Statistics, Header]:
    """The statistics of all records from secure aggregation.

    Args:
        total: counts (C,), sums (C, d) and, without noise, perhaps squares around zero, folded, float64.

    Returns:
        The statistics, and their header: without noise, of the classes that have any records; with
        noise, of all classes of the run.

    Raises:
        RunError: when no class has a record, or when no records have these sums.
    """
    check_moments(total)
    if total.claim is not None:
        return of_noisy_sums(total.tensors), total.header
    counts, sums = total.tensors["counts"].round(), total.tensors["sums"]
    kept = counts > 0
    if not kept.any():
        raise RunError("the secure aggregation has no record of any class of the run")
    names = tuple(
        name for name, there in zip(total.header.classes, kept.tolist(), strict=True) if there
    )
    means = sums / counts.clamp_min(1)[:, None]
    if "squares" not in total.tensors:
        return Statistics(counts, means, _no_covariance(sums.shape[1])).within(kept), replace(
            total.header, classes=names
        )
    scatter = (
        unfold(total.tensors["squares"], sums.shape[1])
        - (means[kept] * counts[kept][:, None]).T @ means[kept]
    )
    covariance = (scatter + scatter.T) / (2 * counts.sum())
    return Statistics(counts, means, covariance).within(kept), replace(total.header, classes=names)


def pooled_by_class(
    surrogates: Sequence[Surrogate], classes: Sequence[str]
) -> Iterator[Statistics]:
    """The statistics of each class alone, one at a time: memory is O(d^2) for any number of classes
    that sites name.

    Args:
        surrogates: of the sites, one or more.
        classes: to give, in this order.

    Returns:
        For each class, statistics with C = 1. Covariances stay diagonal if they are so at all
        sites. A class without records has zeros.
    """
    if all(isinstance(each.mixtures.covariance, Diagonal | Spherical) for each in surrogates):
        yield from _diagonal_by_class(surrogates, classes)
        return
    for name in classes:
        parts = [part for each in surrogates if (part := without_classes(each, [name])) is not None]
        if parts:
            yield pooled([part for part in parts if isinstance(part, Surrogate)], (name,))
        else:
            d = surrogates[0].dimension
            zeros = [torch.zeros(shape, dtype=torch.float64) for shape in ((1,), (1, d), (d, d))]
            yield Statistics(zeros[0], zeros[1], zeros[2])


def _diagonal_by_class(
    surrogates: Sequence[Surrogate], classes: Sequence[str]
) -> Iterator[Statistics]:
    counts = torch.zeros(len(classes), dtype=torch.float64)
    sums, squares = (
        torch.zeros(len(classes), surrogates[0].dimension, dtype=torch.float64) for _ in range(2)
    )
    for surrogate in surrogates:
        table = surrogate.mixtures
        rows = class_indices(classes, surrogate.header.classes)[table.labels]
        sizes = torch.where(rows < 0, 0.0, _records_of_components(table))
        rows, means = rows.clamp_min(0), table.means.double()
        counts.index_add_(0, rows, sizes)
        sums.index_add_(0, rows, sizes[:, None] * means)
        spread = (
            table.covariance.variances_per_dimension().double().expand_as(means) + means.square()
        )
        squares.index_add_(0, rows, sizes[:, None] * spread)
    for count, total, square in zip(counts, sums, squares, strict=True):
        mean = total / count.clamp_min(1e-300)
        variances = (square / count.clamp_min(1e-300) - mean.square()).clamp_min(0)
        yield Statistics(count[None], mean[None], variances.diag(), sampled=False)


def _placed(table: Tensor, rows: Tensor, classes: int) -> Tensor:
    """Sums of the rows of a table by class: row i is added to row rows[i] of (classes, ...)."""
    return torch.zeros(classes, *table.shape[1:], dtype=torch.float64).index_add_(0, rows, table)


def _records_of_components(table: Mixtures) -> Tensor:
    """How many records each component stands for (M,), float64."""
    return table.weights.double() * table.counts.double()[table.labels]


def _mean_covariance(table: Mixtures, shares: Tensor) -> Tensor | Factored:
    """The mean of the components' covariances with weights `shares` (M,), which sum to one."""
    covariance, d = table.covariance, table.means.shape[1]
    match covariance:
        case Gram():
            return covariance.matrix.double()
        case LowRank():
            return Factored(covariance.factor.double(), covariance.variances.double())
        case Spherical() | Diagonal():
            variances = (shares[:, None] * covariance.variances_per_dimension().double()).sum(0)
            return Factored(variances.new_zeros(d, 0), variances.expand(d))
        case Full():
            mean = CovarianceSum(d)
            for share, factor in zip(shares.tolist(), covariance.cholesky, strict=True):
                mean.add_factor(factor, share)
            return mean.divided(1.0)
