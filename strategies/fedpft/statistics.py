"""Pooled statistics of all sites' records: records, mean and covariance of the classes. They are sums over sites.

The covariance is that of the records around the class means of ALL sites: each site's covariance within its classes, plus
the scatter of its class means around the pooled ones. Both follow from what sites sent, and are exact for any partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.models.classifiers import class_indices
from common.surrogates.covariances import Diagonal, Full, Spherical
from common.surrogates.shared_covariances import AnyCovariance, Gram, LowRank
from common.surrogates.surrogates import Surrogate, without_classes
from strategies.pooling.factored import CovarianceSum, Factored, dense


@dataclass(frozen=True)
class Statistics:
    """counts (C,), means (C, d) and covariance (d, d) within classes, whole or in factors, all float64.

    sampled: whether the covariance is an empirical one, not restricted to a diagonal or one variance.
    """

    counts: Tensor
    means: Tensor
    covariance: Tensor | Factored
    sampled: bool = True

    @property
    def priors(self) -> Tensor:
        """Shares of the classes (C,)."""
        return self.counts / self.counts.sum()

    @property
    def matrix(self) -> Tensor:
        """The covariance as a matrix (d, d)."""
        return dense(self.covariance)

    def whole(self) -> Statistics:
        """The same with the covariance as a matrix."""
        return replace(self, covariance=self.matrix)


def pooled(surrogates: Iterable[Surrogate], classes: Sequence[str]) -> Statistics:
    """The statistics of all sites together, with a whole covariance. Memory is O(d^2) for any number of sites, which come
    one at a time.
    """
    return summed(surrogates, classes).whole()


def summed(surrogates: Iterable[Surrogate], classes: Sequence[str]) -> Statistics:
    """As `pooled`, with the covariance in factors where few sites sent some.

    Components of a class count as its parts, so mixtures of several components are pooled exactly as well.
    """
    totals: list[Tensor] = []
    spread = CovarianceSum(0)
    sampled = True
    for surrogate in surrogates:
        table = surrogate.mixtures
        d = table.means.shape[1]
        if not totals:
            totals = [torch.zeros(shape, dtype=torch.float64) for shape in ((len(classes),), (len(classes), d))]
            spread = CovarianceSum(d)
        rows = class_indices(classes, surrogate.header.classes)[table.labels]
        sizes = table.weights.double() * table.counts.double()[table.labels]
        counts = torch.zeros_like(totals[0]).index_add_(0, rows, sizes)
        means = torch.zeros_like(totals[1]).index_add_(0, rows, sizes[:, None] * table.means.double())
        means.div_(counts.clamp_min(1e-300)[:, None])
        _add(spread, table.covariance, sizes)
        if len(rows) > len(surrogate.header.classes):
            _add_scatter(spread, table.means.double() - means[rows], sizes)
        _join(totals[0], totals[1], spread, counts, means)
        sampled &= not isinstance(table.covariance, Diagonal | Spherical)
    counts, means = totals
    return Statistics(counts, means, spread.divided(float(counts.sum())), sampled)


def _join(counts: Tensor, means: Tensor, spread: CovarianceSum, more: Tensor, centres: Tensor) -> None:
    """Add a site's records `more` (C,) with class means `centres` (C, d) to the totals (Chan, Golub & LeVeque 1983).

    Nothing is subtracted from sums of squares: one site's huge mean would leave only rounding of the others' covariance.
    """
    both, apart = (counts > 0) & (more > 0), centres - means
    counts.add_(more)
    share = more / counts.clamp_min(1e-300)
    _add_scatter(spread, apart[both], (more * (1 - share))[both])
    means.add_(apart * share[:, None])


def _add_scatter(spread: CovarianceSum, apart: Tensor, sizes: Tensor) -> None:
    spread.add_factor((apart * sizes.sqrt()[:, None]).T)


def pooled_by_class(surrogates: Sequence[Surrogate], classes: Sequence[str]) -> Iterator[Statistics]:
    """The statistics of each class alone, one at a time: memory is O(d^2) for any number of classes that sites name.

    Covariances stay diagonal if they are so at all sites. A class without records has zeros.
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


def _diagonal_by_class(surrogates: Sequence[Surrogate], classes: Sequence[str]) -> Iterator[Statistics]:
    counts = torch.zeros(len(classes), dtype=torch.float64)
    sums, squares = (torch.zeros(len(classes), surrogates[0].dimension, dtype=torch.float64) for _ in range(2))
    for surrogate in surrogates:
        table = surrogate.mixtures
        rows = class_indices(classes, surrogate.header.classes)[table.labels]
        sizes = torch.where(rows < 0, 0.0, table.weights.double() * table.counts.double()[table.labels])
        rows, means = rows.clamp_min(0), table.means.double()
        counts.index_add_(0, rows, sizes)
        sums.index_add_(0, rows, sizes[:, None] * means)
        spread = table.covariance.variances_per_dimension().double().expand_as(means) + means.square()
        squares.index_add_(0, rows, sizes[:, None] * spread)
    for count, total, square in zip(counts, sums, squares, strict=True):
        mean = total / count.clamp_min(1e-300)
        variances = (square / count.clamp_min(1e-300) - mean.square()).clamp_min(0)
        yield Statistics(count[None], mean[None], variances.diag(), sampled=False)


def _add(spread: CovarianceSum, covariance: AnyCovariance, sizes: Tensor) -> None:
    """Add the covariances of components with `sizes` (M,) records each."""
    total = float(sizes.sum())
    match covariance:
        case Gram():
            spread.add_matrix(covariance.matrix.double(), total)
        case LowRank():
            spread.add_factor(covariance.factor, total)
            spread.add_variances(covariance.variances.double() * total)
        case Spherical() | Diagonal():
            spread.add_variances((sizes[:, None] * covariance.variances_per_dimension().double()).sum(0))
        case Full():
            for size, factor in zip(sizes.tolist(), covariance.cholesky, strict=True):
                spread.add_factor(factor, size)
