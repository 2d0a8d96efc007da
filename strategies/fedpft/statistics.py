"""Pooled statistics of all sites' records: records, mean and covariance of the classes. They are sums over sites.

The covariance is that of the records around the class means of ALL sites: each site's covariance within its classes, plus
the scatter of its class means around the pooled ones. Both follow from what sites sent, and are exact for any partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.classifiers import class_indices
from common.surrogates.covariances import Diagonal, Full, Spherical
from common.surrogates.shared_covariances import AnyCovariance, Gram, LowRank
from common.surrogates.surrogates import Surrogate, without_classes


@dataclass(frozen=True)
class Statistics:
    """counts (C,), means (C, d) and covariance (d, d) within classes, all float64.

    sampled: whether the covariance is an empirical one, not restricted to a diagonal or one variance.
    """

    counts: Tensor
    means: Tensor
    covariance: Tensor
    sampled: bool = True

    @property
    def priors(self) -> Tensor:
        """Shares of the classes (C,)."""
        return self.counts / self.counts.sum()


def pooled(surrogates: Iterable[Surrogate], classes: Sequence[str]) -> Statistics:
    """The statistics of all sites together. Memory is O(d^2) for any number of sites, which come one at a time.

    Components of a class count as its parts, so mixtures of several components are pooled exactly as well.
    """
    totals: list[Tensor] = []
    sampled = True
    for surrogate in surrogates:
        table = surrogate.mixtures
        d = table.means.shape[1]
        if not totals:
            totals = [torch.zeros(shape, dtype=torch.float64) for shape in ((len(classes),), (len(classes), d), (d, d))]
        rows = class_indices(classes, surrogate.header.classes)[table.labels]
        sizes = table.weights.double() * table.counts.double()[table.labels]
        counts = torch.zeros_like(totals[0]).index_add_(0, rows, sizes)
        means = torch.zeros_like(totals[1]).index_add_(0, rows, sizes[:, None] * table.means.double())
        means.div_(counts.clamp_min(1e-300)[:, None])
        _add(totals[2], table.covariance, sizes)
        if len(rows) > len(surrogate.header.classes):
            _add_scatter(totals[2], table.means.double() - means[rows], sizes)
        _join(totals[0], totals[1], totals[2], counts, means)
        sampled &= not isinstance(table.covariance, Diagonal | Spherical)
    counts, means, scatter = totals
    scatter.div_(counts.sum())
    # Of covariances of low rank, only the upper triangle is computed.
    upper = scatter.triu_()
    return Statistics(counts, means, upper + upper.triu(1).T, sampled)


def _join(counts: Tensor, means: Tensor, scatter: Tensor, more: Tensor, centres: Tensor) -> None:
    """Add a site's records `more` (C,) with class means `centres` (C, d) to the totals (Chan, Golub & LeVeque 1983).

    Nothing is subtracted from sums of squares: one site's huge mean would leave only rounding of the others' covariance.
    """
    both, apart = (counts > 0) & (more > 0), centres - means
    counts.add_(more)
    share = more / counts.clamp_min(1e-300)
    _add_scatter(scatter, apart[both], (more * (1 - share))[both])
    means.add_(apart * share[:, None])


def _add_scatter(scatter: Tensor, apart: Tensor, sizes: Tensor) -> None:
    spread = apart * sizes.sqrt()[:, None]
    _add_square(scatter, spread.T, 1.0)


def _add_square(moments: Tensor, factor: Tensor, weight: float) -> None:
    """Add weight F F^T for a factor (d, r) to the upper triangle of the moments (d, d), in half the time of a product."""
    from scipy.linalg.blas import dsyrk

    if factor.shape[1]:
        # The transpose has the order of columns that BLAS has, so its lower triangle is the upper one here.
        dsyrk(weight, factor.numpy(), beta=1.0, c=moments.numpy().T, lower=1, overwrite_c=1)


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


def _add(moments: Tensor, covariance: AnyCovariance, sizes: Tensor) -> None:
    """Add the covariances of components with `sizes` (M,) records each."""
    total = float(sizes.sum())
    match covariance:
        case Gram():
            moments.add_(covariance.matrix.double(), alpha=total)
        case LowRank():
            _add_square(moments, covariance.factor.double(), total)
            moments.diagonal().add_(covariance.variances.double(), alpha=total)
        case Spherical() | Diagonal():
            moments.diagonal().add_((sizes[:, None] * covariance.variances_per_dimension().double()).sum(0))
        case Full():
            for size, factor in zip(sizes.tolist(), covariance.cholesky, strict=True):
                moments.addmm_(factor.double(), factor.double().T, alpha=size)
