"""Covariance families of a table of Gaussian components: estimation, density, sampling; one covariance a
component, or one for all components of all classes of a site.

Every family is a frozen table over M components in d dimensions with four operations: estimation
from responsibilities, log-density of points, conversion of standard normals to its noise, and
variance per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

from ..errors import SurrogateError

LOG_2PI = math.log(2 * math.pi)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of symmetric matrices.

    LAPACK's solver can fail in single precision, or say nothing and give NaN, as for the scatter of two
    records with many zeros; double precision then finds them.

    Args:
        matrix: (..., d, d), of which the lower triangle is read.

    Returns:
        Values (..., d) and vectors (..., d, d), in the matrix's precision.

    Example:
        >>> values, vectors = eigen(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> values.tolist()
        [1.0, 3.0]
    """
    single = matrix.dtype != torch.float64
    with suppress(*(RuntimeError,) if single else ()):
        values, vectors = torch.linalg.eigh(matrix)
        if not single or bool(values.isfinite().all() & vectors.isfinite().all()):
            return values, vectors
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix), vectors.to(matrix)


@dataclass(frozen=True)
class Cluster:
    """One class during a fit.

    Attributes:
        points: (n, d).
        responsibilities: of the K components for the points, (n, K).
        means: that they imply, (K, d).
        sizes: that they imply, (K,).
        squares: what the family needs of the squared points, see `CovarianceModel.squares`.
    """

    points: Tensor
    responsibilities: Tensor
    means: Tensor
    sizes: Tensor
    squares: Tensor


# Lower bound of variances, as a share of the mean variance, like scikit-learn's reg_covar for
# unit-scale data.
RELATIVE_FLOOR = 1e-6


class CovarianceModel(Protocol):
    """Interface of all families, as a table over M components in d dimensions.

    Attributes:
        shared: one covariance for all components.
        iterative: whether the estimate needs several steps even if each class has one component.
    """

    shared: ClassVar[bool] = False
    iterative: ClassVar[bool] = False

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], rank: int, gram: Tensor, previous: CovarianceModel | None
    ) -> Self:
        """M-step of EM; for lowrank one step that never lowers the likelihood.

        Args:
            clusters: one for each class, whose components follow each other in the table.
            rank: for lowrank, the columns of its factor.
            gram: for a shared covariance, X^T X of all points, (d, d).
            previous: the estimate of the step before; None in the first step.
        """

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """What every step of a fit needs of the squares of the points, which do not change.

        Args:
            points: (n, d).

        Returns:
            A tensor (n, ...), of a shape that the family chooses; by default none, (n, 0).
        """
        return points[:, :0]

    def log_density(self, points: Tensor, means: Tensor, squares: Tensor | None = None) -> Tensor:
        """Log-density of points under each component.

        Args:
            points: (n, d).
            means: of the components, (M, d).
            squares: those of `points`, if they are known.

        Returns:
            Log-densities (n, M), in nats.
        """

    def colour(self, normals: Tensor, component: Tensor) -> Tensor:
        """Turn standard normals into zero-mean noise of components.

        Args:
            normals: (n, width).
            component: of each sample, (n,), int64.

        Returns:
            Noise (n, d).
        """

    def variances_per_dimension(self) -> Tensor:
        """Variance of every dimension, broadcastable to (M, d)."""

    def scaled(self, factor: float) -> Self:
        """The same family after all points are multiplied by `factor`."""

    def width(self, dimension: int) -> int:
        """Number of standard normals per sample, by default one for each dimension."""
        return dimension


def products(points: Tensor, few: Tensor) -> Tensor:
    """Inner products of points with a few vectors. In this order they take a third of the time.

    Args:
        points: (n, d).
        few: (K, d).

    Returns:
        Products (n, K).
    """
    return (few @ points.T).T


# Numbers whose product with responsibilities takes longer than its preparation.
MANY = 2**15


def weighted_sums(responsibilities: Tensor, rows: Tensor) -> Tensor:
    """Sums of rows, weighted by responsibilities.

    Args:
        responsibilities: of K components, (n, K); those of a row sum to one.
        rows: (n, d).

    Returns:
        Sums (K, d). On a processor, one of many rows that one component has to the last digit is added
        to that one alone: it is read once, which takes a fifth of the time of a product.
    """
    # On a GPU, rows that are added to the same sum come in any order.
    if responsibilities.shape[1] == 1 or rows.numel() < MANY or rows.device.type != "cpu":
        return responsibilities.T @ rows
    most, own = responsibilities.max(1)
    shared = (most < 1).nonzero().flatten()
    sums = rows.new_zeros(responsibilities.shape[1], rows.shape[1]).index_add_(0, own, rows)
    change = responsibilities[shared]
    change[torch.arange(len(shared)), own[shared]] -= 1
    return sums.addmm_(change.T, rows[shared])


@dataclass(frozen=True)
class Diagonal(CovarianceModel):
    """Diagonal covariances.

    Attributes:
        variances: (M, d).

    Example:
        >>> table = Diagonal(torch.tensor([[1.0, 4.0]]))
        >>> table.colour(torch.ones(2, 2), torch.tensor([0, 0])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """

    variances: Tensor

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], rank: int, gram: Tensor, previous: CovarianceModel | None
    ) -> Self:
        """Weighted variance of each dimension."""
        tables = [
            weighted_sums(c.responsibilities, c.squares) / c.sizes[:, None] - c.means.square()
            for c in clusters
        ]
        return cls(torch.cat(tables).clamp_min(RELATIVE_FLOOR))

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """(n, d)."""
        return points.square()

    def log_density(self, points: Tensor, means: Tensor, squares: Tensor | None = None) -> Tensor:
        """(n, M). The square is expanded, so the cost is two matrix products."""
        precision, known = 1 / self.variances, self.squares(points) if squares is None else squares
        apart = (
            products(known, precision)
            - 2 * products(points, means * precision)
            + (means.square() * precision).sum(1)
        )
        return -0.5 * (apart.clamp_min(0) + self.variances.log().sum(1) + points.shape[1] * LOG_2PI)

    def colour(self, normals: Tensor, component: Tensor) -> Tensor:
        """(n, d) -> (n, d)."""
        return normals * self.variances.sqrt()[component]

    def variances_per_dimension(self) -> Tensor:
        """(M, d)."""
        return self.variances

    def scaled(self, factor: float) -> Self:
        """Variances scale with the square."""
        return type(self)(self.variances * factor**2)


@dataclass(frozen=True)
class Spherical(CovarianceModel):
    """Spherical covariances.

    Attributes:
        variances: (M,), one for all dimensions of a component.
    """

    variances: Tensor

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], rank: int, gram: Tensor, previous: CovarianceModel | None
    ) -> Self:
        """Mean over dimensions of the weighted variances."""
        tables = [
            c.responsibilities.T @ c.squares / c.sizes - c.means.square().sum(1) for c in clusters
        ]
        return cls((torch.cat(tables) / clusters[0].means.shape[1]).clamp_min(RELATIVE_FLOOR))

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """Squared norms (n,)."""
        return points.square().sum(1)

    def log_density(self, points: Tensor, means: Tensor, squares: Tensor | None = None) -> Tensor:
        """(n, M)."""
        dimension, known = points.shape[1], self.squares(points) if squares is None else squares
        apart = known[:, None] - 2 * products(points, means) + means.square().sum(1)
        return -0.5 * (
            apart.clamp_min(0) / self.variances + dimension * (self.variances.log() + LOG_2PI)
        )

    def colour(self, normals: Tensor, component: Tensor) -> Tensor:
        """(n, d) -> (n, d)."""
        return normals * self.variances.sqrt()[component, None]

    def variances_per_dimension(self) -> Tensor:
        """(M, 1)."""
        return self.variances[:, None]

    def scaled(self, factor: float) -> Self:
        """Variances scale with the square."""
        return type(self)(self.variances * factor**2)


@dataclass(frozen=True)
class Full(CovarianceModel):
    """Full covariances.

    Attributes:
        cholesky: factors (M, d, d), lower triangular; float64 in a fit, because scatters are nearly
            singular.
    """

    cholesky: Tensor

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], rank: int, gram: Tensor, previous: CovarianceModel | None
    ) -> Self:
        """Weighted scatter around each mean. The floor is added to its diagonal, like
        scikit-learn's reg_covar.
        """
        factors = []
        for cluster in clusters:
            points, means = cluster.points.double(), cluster.means.double()
            for mean, weight, size in zip(
                means, cluster.responsibilities.double().T, cluster.sizes.double(), strict=True
            ):
                centred = points - mean
                scatter = (centred * weight[:, None]).T @ centred / size
                factors.append(cholesky(scatter, RELATIVE_FLOOR))
        return cls(torch.stack(factors))

    def log_density(self, points: Tensor, means: Tensor, squares: Tensor | None = None) -> Tensor:
        """(n, M)."""
        columns = []
        for factor, mean in zip(self.cholesky.double(), means.double(), strict=True):
            whitened = torch.linalg.solve_triangular(
                factor, (points.double() - mean).T, upper=False
            )
            log_determinant = 2 * factor.diagonal().log().sum()
            columns.append(
                -0.5 * (whitened.square().sum(0) + log_determinant + points.shape[1] * LOG_2PI)
            )
        return torch.stack(columns, 1).to(points.dtype)

    def colour(self, normals: Tensor, component: Tensor) -> Tensor:
        """(n, d) -> (n, d), with one matrix product per component that occurs."""
        noise = torch.empty_like(normals)
        for index in torch.unique(component).tolist():
            rows = component == index
            noise[rows] = normals[rows] @ self.cholesky[index].T.to(normals.dtype)
        return noise

    def variances_per_dimension(self) -> Tensor:
        """(M, d)."""
        return self.cholesky.square().sum(2)

    def scaled(self, factor: float) -> Self:
        """Factors scale linearly."""
        return type(self)(self.cholesky * factor)


def cholesky(scatter: Tensor, floor: float) -> Tensor:
    """Cholesky factor of scatter + floor I.

    The floor grows tenfold until rounding no longer makes the sum indefinite.

    Args:
        scatter: (d, d), symmetric.
        floor: positive.

    Returns:
        The factor (d, d), lower triangular.

    Raises:
        SurrogateError: for a matrix that is not finite.
    """
    while math.isfinite(floor) and floor > 0:
        ridge = floor * torch.eye(len(scatter), dtype=scatter.dtype, device=scatter.device)
        factor, failed = torch.linalg.cholesky_ex(scatter + ridge)
        if not failed:
            return cast(Tensor, factor)
        floor *= 10
    raise SurrogateError(
        f"no Cholesky factor of a covariance with the floor {floor:g}: it has a number that is not "
        "finite"
    )


# Added to the diagonal before a Cholesky factor of a whole covariance, as a share of the mean
# variance.
RELATIVE_RIDGE = 1e-6


@dataclass(frozen=True)
class LowRank(CovarianceModel):
    """One covariance W W^T + diag(variances) for ALL components.

    Differs from the paper (FedPFT has only full, diag and spherical): one covariance for all
    classes of a site takes d (r + 1) numbers and keeps the main directions of variation.

    Attributes:
        factor: W, (d, r).
        variances: (d,).

    Example:
        >>> table = LowRank(torch.tensor([[2.0], [1.0]]), torch.tensor([0.5, 0.5]))
        >>> table.variances_per_dimension().tolist(), table.width(2)
        ([[4.5, 1.5]], 3)
    """

    factor: Tensor
    variances: Tensor
    shared: ClassVar[bool] = True
    iterative: ClassVar[bool] = True

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], rank: int, gram: Tensor, previous: CovarianceModel | None
    ) -> Self:
        """First principal components, then EM steps of factor analysis, on the pooled scatter.

        Source:
            Rubin & Thayer 1982.
        """
        return cls.of_scatter(_pooled_scatter(clusters, gram), rank, RELATIVE_FLOOR, previous)

    @classmethod
    def of_scatter(
        cls, scatter: Tensor, rank: int, floor: float, previous: CovarianceModel | None
    ) -> Self:
        """The same step as `estimate`, from the scatter.

        Args:
            scatter: pooled scatter divided by the number of points, (d, d).
            rank: columns of the factor.
            floor: lower bound of variances.
            previous: the estimate of the step before; None in the first step.
        """
        total = scatter.diagonal()
        if not isinstance(previous, LowRank):
            values, vectors = eigen(scatter)
            factor = vectors[:, -rank:] * values[-rank:].clamp_min(0).sqrt()
            return cls(factor, (total - factor.square().sum(1)).clamp_min(floor))
        whitened = previous.factor / previous.variances[:, None]
        identity = torch.eye(whitened.shape[1], dtype=total.dtype, device=total.device)
        posterior = torch.linalg.inv(identity + previous.factor.T @ whitened)
        projection = whitened @ posterior
        cross = scatter @ projection
        factor = torch.linalg.solve(posterior + projection.T @ cross, cross, left=False)
        return cls(factor, (total - (factor * cross).sum(1)).clamp_min(floor))

    def log_density(self, points: Tensor, means: Tensor, squares: Tensor | None = None) -> Tensor:
        """(n, M).

        The squared distance is computed as |x - L z|^2 + |z|^2, with z the expected factors for x.
        The Woodbury identity would subtract large numbers if a dimension has almost no variance of
        its own, and lose all digits in single precision.
        """
        scale = self.variances.rsqrt()
        loadings = self.factor * scale[:, None]
        wide = loadings.double()
        core = torch.linalg.cholesky(
            torch.eye(wide.shape[1], dtype=wide.dtype, device=wide.device) + wide.T @ wide
        )
        expected = torch.cholesky_solve(wide.T, core).T.to(points.dtype)

        def residuals_and_factors(rows: Tensor) -> Tensor:
            scaled = rows * scale
            factors = scaled @ expected
            return torch.cat([torch.addmm(scaled, factors, loadings.T, alpha=-1), factors], 1)

        x, m = residuals_and_factors(points), residuals_and_factors(means)
        apart = x.square().sum(1, keepdim=True) - 2 * x @ m.T + m.square().sum(1)
        log_determinant = self.variances.log().sum() + 2 * core.diagonal().log().sum().to(
            points.dtype
        )
        density: Tensor = -0.5 * (apart.clamp_min(0) + log_determinant + points.shape[1] * LOG_2PI)
        return density

    def colour(self, normals: Tensor, component: Tensor) -> Tensor:
        """(n, r + d) -> (n, d)."""
        rank = self.factor.shape[1]
        return torch.addmm(
            normals[:, rank:] * self.variances.sqrt(), normals[:, :rank], self.factor.T
        )

    def variances_per_dimension(self) -> Tensor:
        """(1, d)."""
        return (self.factor.square().sum(1) + self.variances)[None]

    def scaled(self, factor: float) -> Self:
        """The factor scales linearly, variances with the square."""
        return type(self)(self.factor * factor, self.variances * factor**2)

    def width(self, dimension: int) -> int:
        """One normal per dimension and one per factor."""
        return dimension + self.factor.shape[1]


@dataclass(frozen=True)
class Gram(CovarianceModel):
    """One whole covariance for ALL components. It is exact; one component a class.

    With the class means it is what linear discriminant analysis and least squares need of a site's
    records.

    Attributes:
        matrix: (d, d), symmetric.
    """

    matrix: Tensor
    shared: ClassVar[bool] = True

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], rank: int, gram: Tensor, previous: CovarianceModel | None
    ) -> Self:
        """The pooled scatter."""
        scatter = _pooled_scatter(clusters, gram)
        return cls((scatter + scatter.T) / 2)

    def log_density(self, points: Tensor, means: Tensor, squares: Tensor | None = None) -> Tensor:
        """(n, M)."""
        factor = self._cholesky()
        x, m = (
            torch.linalg.solve_triangular(factor, each.double().T, upper=False)
            for each in (points, means)
        )
        apart = x.square().sum(0)[:, None] - 2 * x.T @ m + m.square().sum(0)
        log_determinant = 2 * factor.diagonal().log().sum()
        density: Tensor = -0.5 * (apart.clamp_min(0) + log_determinant + points.shape[1] * LOG_2PI)
        return density.to(points.dtype)

    def colour(self, normals: Tensor, component: Tensor) -> Tensor:
        """(n, d) -> (n, d)."""
        return normals @ self._cholesky().T.to(normals)

    def _cholesky(self) -> Tensor:
        mean = abs(float(self.matrix.diagonal().mean())) or 1.0
        return cholesky(self.matrix.double(), RELATIVE_RIDGE * mean)

    def variances_per_dimension(self) -> Tensor:
        """(1, d)."""
        return self.matrix.diagonal().clamp_min(0)[None]

    def scaled(self, factor: float) -> Self:
        """The matrix scales with the square."""
        return type(self)(self.matrix * factor**2)


class StoredGram(Gram):
    """A Gram whose matrix is read again at each use: the coordinator holds one matrix, not one for
    each site.

    Args:
        read: gives the matrix (d, d).
        variances: per dimension, (1, d).
    """

    def __init__(self, read: Callable[[], Tensor], variances: Tensor) -> None:
        object.__setattr__(self, "_read", read)
        object.__setattr__(self, "_variances", variances)

    @property
    def matrix(self) -> Tensor:
        """The matrix (d, d)."""
        matrix: Tensor = self.__dict__["_read"]()
        return matrix

    def variances_per_dimension(self) -> Tensor:
        """(1, d)."""
        variances: Tensor = self.__dict__["_variances"]
        return variances

    def scaled(self, factor: float) -> StoredGram:
        """Read again, too."""
        return StoredGram(
            lambda: self.matrix * factor**2, self.variances_per_dimension() * factor**2
        )


def gram(parts: Sequence[Tensor]) -> Tensor:
    """X^T X of all points. It stays the same in all EM steps.

    Args:
        parts: the points of each class, (n, d).

    Returns:
        The matrix (d, d).
    """
    points = torch.cat(list(parts))
    return points.T @ points


def _pooled_scatter(clusters: Sequence[Cluster], gram: Tensor) -> Tensor:
    """Scatter around the component means, over all classes, divided by the number of points: (d,
    d).
    """
    means = torch.cat([cluster.means for cluster in clusters])
    sizes = torch.cat([cluster.sizes for cluster in clusters])
    return (gram - (means * sizes[:, None]).T @ means) / sum(
        len(cluster.points) for cluster in clusters
    )


AnyCovariance = Diagonal | Full | Gram | LowRank | Spherical
FAMILIES: dict[str, type[Diagonal] | type[Full] | type[Gram] | type[LowRank] | type[Spherical]] = {
    "full": Full,
    "diag": Diagonal,
    "spherical": Spherical,
    "lowrank": LowRank,
    "gram": Gram,
}
