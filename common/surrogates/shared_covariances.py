"""Covariance families with one covariance for all components of all classes of a site; and the
names of all families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.covariances import (
    LOG_2PI,
    Cluster,
    CovarianceLimits,
    CovarianceModel,
    Diagonal,
    Full,
    Spherical,
    cholesky,
)

# Added to the diagonal before a Cholesky factor of a whole covariance, as a share of the mean
# variance.
RELATIVE_RIDGE = 1e-6


@dataclass(frozen=True)
class LowRank:
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
        cls, clusters: Sequence[Cluster], limits: CovarianceLimits, previous: CovarianceModel | None
    ) -> Self:
        """First principal components, then EM steps of factor analysis, on the pooled scatter.

        Source:
            Rubin & Thayer 1982.
        """
        return cls.of_scatter(
            _pooled_scatter(clusters, limits.gram), limits.rank, limits.floor, previous
        )

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
            values, vectors = torch.linalg.eigh(scatter)
            factor = vectors[:, -rank:] * values[-rank:].clamp_min(0).sqrt()
            return cls(factor, (total - factor.square().sum(1)).clamp_min(floor))
        whitened = previous.factor / previous.variances[:, None]
        identity = torch.eye(whitened.shape[1], dtype=total.dtype, device=total.device)
        posterior = torch.linalg.inv(identity + previous.factor.T @ whitened)
        projection = whitened @ posterior
        cross = scatter @ projection
        factor = torch.linalg.solve(posterior + projection.T @ cross, cross, left=False)
        return cls(factor, (total - (factor * cross).sum(1)).clamp_min(floor))

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """None are needed: (n, 0)."""
        return points[:, :0]

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
class Gram:
    """One whole covariance for ALL components. It is exact; one component a class.

    With the class means it is what linear discriminant analysis and least squares need of a site's
    records.

    Attributes:
        matrix: (d, d), symmetric.
    """

    matrix: Tensor
    shared: ClassVar[bool] = True
    iterative: ClassVar[bool] = False

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], limits: CovarianceLimits, previous: CovarianceModel | None
    ) -> Self:
        """The pooled scatter."""
        scatter = _pooled_scatter(clusters, limits.gram)
        return cls((scatter + scatter.T) / 2)

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """None are needed: (n, 0)."""
        return points[:, :0]

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

    def width(self, dimension: int) -> int:
        """One normal per dimension."""
        return dimension


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


def _pooled_scatter(clusters: Sequence[Cluster], squares: Tensor | None) -> Tensor:
    """Scatter around the component means, over all classes, divided by the number of points: (d,
    d).
    """
    if squares is None:
        squares = gram([cluster.points for cluster in clusters])
    means = torch.cat([cluster.means for cluster in clusters])
    sizes = torch.cat([cluster.sizes for cluster in clusters])
    return (squares - (means * sizes[:, None]).T @ means) / sum(
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
