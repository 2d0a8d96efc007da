"""Covariance families of a table of Gaussian components: estimation, density, sampling. Here: one
covariance a component.

Every family is a frozen table over M components in d dimensions with four operations: estimation
from responsibilities, log-density of points, conversion of standard normals to its noise, and
variance per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError

LOG_2PI = math.log(2 * math.pi)


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


@dataclass(frozen=True)
class CovarianceLimits:
    """Limits of an estimate.

    Attributes:
        floor: lower bound of variances.
        rank: for lowrank, the columns of its factor.
        gram: for a shared covariance, X^T X of the points, (d, d); computed where it is None.
    """

    floor: float
    rank: int = 1
    gram: Tensor | None = None


class CovarianceModel(Protocol):
    """Interface of all families, as a table over M components in d dimensions.

    Attributes:
        shared: one covariance for all components.
        iterative: whether the estimate needs several steps even if each class has one component.
    """

    shared: ClassVar[bool]
    iterative: ClassVar[bool]

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], limits: CovarianceLimits, previous: CovarianceModel | None
    ) -> Self:
        """M-step of EM; for lowrank one step that never lowers the likelihood.

        Args:
            clusters: one for each class, whose components follow each other in the table.
            limits: of the estimate.
            previous: the estimate of the step before; None in the first step.
        """

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """What every step of a fit needs of the squares of the points, which do not change.

        Args:
            points: (n, d).

        Returns:
            A tensor (n, ...), of a shape that the family chooses.
        """

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
        """Number of standard normals per sample."""


def products(points: Tensor, few: Tensor) -> Tensor:
    """Inner products of points with a few vectors. In this order they take a third of the time.

    Args:
        points: (n, d).
        few: (K, d).

    Returns:
        Products (n, K).
    """
    return (few @ points.T).T


@dataclass(frozen=True)
class Diagonal:
    """Diagonal covariances.

    Attributes:
        variances: (M, d).

    Example:
        >>> table = Diagonal(torch.tensor([[1.0, 4.0]]))
        >>> table.colour(torch.ones(2, 2), torch.tensor([0, 0])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """

    variances: Tensor
    shared: ClassVar[bool] = False
    iterative: ClassVar[bool] = False

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], limits: CovarianceLimits, previous: CovarianceModel | None
    ) -> Self:
        """Weighted variance of each dimension."""
        tables = [
            c.responsibilities.T @ c.squares / c.sizes[:, None] - c.means.square() for c in clusters
        ]
        return cls(torch.cat(tables).clamp_min(limits.floor))

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

    def width(self, dimension: int) -> int:
        """One normal per dimension."""
        return dimension


@dataclass(frozen=True)
class Spherical:
    """Spherical covariances.

    Attributes:
        variances: (M,), one for all dimensions of a component.
    """

    variances: Tensor
    shared: ClassVar[bool] = False
    iterative: ClassVar[bool] = False

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], limits: CovarianceLimits, previous: CovarianceModel | None
    ) -> Self:
        """Mean over dimensions of the weighted variances."""
        tables = [
            c.responsibilities.T @ c.squares / c.sizes - c.means.square().sum(1) for c in clusters
        ]
        return cls((torch.cat(tables) / clusters[0].means.shape[1]).clamp_min(limits.floor))

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

    def width(self, dimension: int) -> int:
        """One normal per dimension."""
        return dimension


@dataclass(frozen=True)
class Full:
    """Full covariances.

    Attributes:
        cholesky: factors (M, d, d), lower triangular; float64 in a fit, because scatters are nearly
            singular.
    """

    cholesky: Tensor
    shared: ClassVar[bool] = False
    iterative: ClassVar[bool] = False

    @classmethod
    def estimate(
        cls, clusters: Sequence[Cluster], limits: CovarianceLimits, previous: CovarianceModel | None
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
                factors.append(cholesky(scatter, limits.floor))
        return cls(torch.stack(factors))

    @classmethod
    def squares(cls, points: Tensor) -> Tensor:
        """None are needed: (n, 0)."""
        return points[:, :0]

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

    def width(self, dimension: int) -> int:
        """One normal per dimension."""
        return dimension


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
