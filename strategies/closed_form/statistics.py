"""The statistics of records that a head in closed form needs. Those of several sites add up to
those of all records.

Statistics of the sites' records, from what the coordinator receives: mixtures, sums of each
site, or a secure sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Gram, LowRank, Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate, without_classes

from ..pooling.site_weights import Total, check_moments
from .factored import CovarianceSum, Factored, dense

# Half precision moves eigenvalues by about this share of the sum of all of them.
EIGENVALUE_ROUNDING = 1e-3


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
        for name, tensor, expected in tables:
            if tensor.dtype != torch.float64:
                raise ValueError(f"statistics: {name} in {tensor.dtype}; torch.float64 is needed")
            if tensor.shape != expected:
                own = tuple(tensor.shape)
                raise ValueError(
                    f"statistics: {name} of shape {own}, but of {expected} by the means"
                )

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
    return summed(surrogates, classes).whole()


def summed(surrogates: Iterable[Surrogate], classes: Sequence[str]) -> Statistics:
    """As `pooled`, with the covariance in factors where few sites sent some.

    Args:
        surrogates: as in `pooled`.
        classes: as in `pooled`.
    """
    return sum_of(of_mixtures(each, classes) for each in surrogates)


def of_mixtures(surrogate: Surrogate, classes: Sequence[str]) -> Statistics:
    """The statistics of one site's records from its mixtures.

    Components of a class count as its parts, so mixtures of several components are as exact as
    those of one.

    Args:
        surrogate: of the site.
        classes: of the statistics, C, which hold all of the site's.
    """
    table = surrogate.mixtures
    rows = class_indices(classes, surrogate.header.classes)[table.labels]
    sizes, own = _records_of_components(table), table.means.double()
    counts = _placed(sizes, rows, len(classes))
    means = _placed(sizes[:, None] * own, rows, len(classes)) / counts.clamp_min(1e-300)[:, None]
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
    """The statistics of all records from a secure sum.

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
        raise RunError("the secure sum has no record of any class of the run")
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
