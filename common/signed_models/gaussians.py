"""Out-of-distribution scores of features: Mahalanobis distances to Gaussians with one shared
covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..costs import GAUSSIAN_RANK
from ..models.classifiers import Classifier, alone, one_thread
from ..surrogates.covariances import eigen

# Largest dimension whose covariance is decomposed exactly.
EXACT_DIMENSION = 2048
# Smallest variance, as a share of the largest, so that no distance divides by a rounding error.
SMALLEST = 1e-6


@dataclass(frozen=True)
class LowRankCovariance:
    """A covariance with few directions of its own.

    Attributes:
        directions: orthonormal, (r, d).
        variances: along these directions, (r,).
        rest: the variance along all others, (1,).
    """

    directions: Tensor
    variances: Tensor
    rest: Tensor

    def distances_to(self, means: Tensor) -> Callable[[Tensor], Tensor]:
        """The function from features (n, d) to their squared Mahalanobis distances (n, k) to means.

        Args:
            means: (k, d).
        """
        # From one mean, so that the expanded square loses no digits.
        centre = means[0].double()
        centres, directions, rest = (
            means.double() - centre,
            self.directions.double(),
            self.rest.double(),
        )
        weight, lengths = 1 / self.variances.double() - 1 / rest, centres.square().sum(1)
        along = (centres @ directions.T)[None]

        def distances(features: Tensor) -> Tensor:
            x = features.double() - centre
            squares = x.square().sum(1, keepdim=True) - 2 * x @ centres.T + lengths
            apart = (x @ directions.T)[:, None] - along
            return (squares.clamp_min(0) / rest + (apart.square() * weight).sum(2)).clamp_min(0)

        return distances


@dataclass(frozen=True)
class Gaussians:
    """Class means with a shared covariance, and one Gaussian of all classes together.

    Attributes:
        means: of the classes that have samples, (k, d), so k may be below the number of classes.
        mean: of all samples, (d,).
        within: the covariance around the class means.
        total: the covariance of all samples.

    Example:
        >>> features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 9.0], [2.0, 9.0]])
        >>> gaussians = fit_gaussians(features, torch.tensor([0, 0, 1, 1]))
        >>> nearest, relative = gaussians.scores(torch.tensor([[1.0, 0.0], [5.0, 0.0]]))
        >>> nearest[0] < nearest[1]
        tensor(True)
    """

    means: Tensor
    mean: Tensor
    within: LowRankCovariance
    total: LowRankCovariance

    @one_thread()
    def scores(self, features: Tensor, model: Classifier | None = None) -> tuple[Tensor, Tensor]:
        """Squared Mahalanobis distance to the nearest class, and the relative one.

        The relative one subtracts the distance to the Gaussian of all classes. Larger means farther
        from the training data. A record's scores depend on no other record: one of them may be the
        limit beyond which a model abstains.

        Args:
            features: (n, d).
            model: that prepares them first; None for features that are prepared.

        Returns:
            Both distances, (n,) each.

        Source:
            Ren et al. 2021, "A simple fix to Mahalanobis distance for improving near-OOD
            detection", equations 2 and 3.
        """
        to_class, to_all = (
            self.within.distances_to(self.means),
            self.total.distances_to(self.mean[None]),
        )
        found = []
        for row in alone(features):
            x = row if model is None else model.prepare(row)
            nearest = to_class(x).min(1).values
            found.append(torch.stack([nearest, nearest - to_all(x)[:, 0]]).float())
        nearest, relative = torch.cat(found, 1)
        return nearest, relative

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        tensors = {"means": self.means, "mean": self.mean}
        for name, part in (("within", self.within), ("total", self.total)):
            tensors |= {f"{name}.{key}": value for key, value in vars(part).items()}
        return tensors

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Gaussians:
        """Gaussians from the tensors of `tensors`.

        Args:
            tensors: by name.

        Raises:
            KeyError: for a missing tensor.
            ValueError: for tensors that do not fit together, or numbers that are not valid.
        """
        parts = [
            LowRankCovariance(
                *(tensors[f"{name}.{key}"].float() for key in ("directions", "variances", "rest"))
            )
            for name in ("within", "total")
        ]
        gaussians = cls(tensors["means"].float(), tensors["mean"].float(), parts[0], parts[1])
        dimension = gaussians.mean.shape[0] if gaussians.mean.ndim == 1 else -1
        for part in parts:
            if (
                part.variances.ndim != 1
                or part.directions.shape != (len(part.variances), dimension)
                or part.rest.shape != (1,)
            ):
                raise ValueError("a covariance whose tensors do not fit together")
            if not (part.rest > 0).all() or not (part.variances > 0).all():
                raise ValueError("a covariance with a variance that is not above zero")
        if (
            gaussians.means.ndim != 2
            or not len(gaussians.means)
            or gaussians.means.shape[1] != dimension
        ):
            shape = tuple(gaussians.means.shape)
            raise ValueError(f"class means of shape {shape} for dimension {dimension}")
        if not all(tensor.isfinite().all() for tensor in gaussians.tensors().values()):
            raise ValueError("Gaussians with a number that is not finite")
        return gaussians


def fit_gaussians(features: Tensor, labels: Tensor, rank: int = GAUSSIAN_RANK) -> Gaussians:
    """Gaussians of features. A class needs two records.

    Args:
        features: (n, d).
        labels: (n,).
        rank: most directions of a covariance.

    Raises:
        ValueError: if no class has two records.
    """
    x, sizes = features.double(), torch.bincount(labels)
    kept = (sizes >= 2).nonzero().flatten()
    if not len(kept):
        raise ValueError("no class has two records")
    rows = torch.isin(labels, kept)
    x, labels = x[rows], torch.searchsorted(kept, labels[rows])
    sums = x.new_zeros(len(kept), x.shape[1]).index_add_(0, labels, x)
    means, mean = sums / sizes[kept, None], x.mean(0)
    return Gaussians(
        means.float(),
        mean.float(),
        _covariance(x - means[labels], rank),
        _covariance(x - mean, rank),
    )


def _covariance(centred: Tensor, rank: int) -> LowRankCovariance:
    """The best covariance of this form: the largest eigenvalues, and the mean of the others
    (Tipping and Bishop 1999).
    """
    count, dimension = centred.shape
    rank = min(rank, dimension - 1, count - 1)
    trace = centred.square().sum() / count
    if dimension <= EXACT_DIMENSION:
        values, vectors = eigen(centred.T @ centred / count)
        variances, directions = values.flip(0)[:rank], vectors.flip(1)[:, :rank].T
    else:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            _, singular, vectors = torch.svd_lowrank(centred, q=rank, niter=4)
        variances, directions = singular.square() / count, vectors.T
    floor = (SMALLEST * (variances.max() if rank else trace)).clamp_min(1e-12)
    rest = ((trace - variances.sum()) / max(1, dimension - rank)).clamp_min(floor)
    return LowRankCovariance(
        directions.float().contiguous(), variances.clamp_min(floor).float(), rest.float().reshape(1)
    )
