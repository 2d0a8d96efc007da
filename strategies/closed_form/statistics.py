"""The statistics of records that a head in closed form needs. Those of several sites add up to
those of all records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strategies.closed_form.factored import CovarianceSum, Factored, dense


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
        means: mean of each class, (C, d). Zero for a class without records.
        covariance: mean of (x - m_y)(x - m_y)^T over all records x of class y, (d, d): one matrix
            for all classes, divided by the number of records. A matrix, or `Factored` where few
            sites have sent factors of a low rank; solvers take both, and `matrix` is a matrix in
            each case.
        variances: variance of each dimension within each class, (C, d), divided by the records of
            the class; None where sites do not send it.
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
    variances: Tensor | None = None
    sampled: bool = True

    def __post_init__(self) -> None:
        if self.means.ndim != 2:
            raise ValueError(f"statistics: means of shape {tuple(self.means.shape)}, which must be (C, d)")
        classes, dimension = self.means.shape
        tables = {"counts": (self.counts, (classes,)), "means": (self.means, (classes, dimension))}
        if isinstance(self.covariance, Factored):
            factor = self.covariance.factor
            tables["factor of the covariance"] = (factor, (dimension, *factor.shape[1:2]))
            tables["variances of the covariance"] = (self.covariance.variances, (dimension,))
        else:
            tables["covariance"] = (self.covariance, (dimension, dimension))
        if self.variances is not None:
            tables["variances"] = (self.variances, (classes, dimension))
        for name, (tensor, shape) in tables.items():
            if tensor.dtype != torch.float64:
                raise ValueError(f"statistics: {name} in {tensor.dtype}, which must be in torch.float64")
            if tensor.shape != shape:
                raise ValueError(f"statistics: {name} of shape {tuple(tensor.shape)}, but of {shape} by the means")

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of the records of both, for the same classes in the same order."""
        return sum_of([self, other])

    def scaled(self, share: float) -> Statistics:
        """The same records with a share of their weight. Averages stay as they are."""
        return replace(self, counts=self.counts * share)

    def within(self, kept: Tensor) -> Statistics:
        """Of the classes `kept`: indices (K,), or a mask (C,).

        The covariance, which all classes share, stays: how much each class adds to it is not known.
        It is exact where the other classes have no records.
        """
        variances = None if self.variances is None else self.variances[kept]
        return replace(self, counts=self.counts[kept], means=self.means[kept], variances=variances)

    def total(self) -> Tensor:
        """The covariance of all records around their common mean (d, d): within classes, and
        between them.
        """
        between = self.between()
        return torch.addmm(self.matrix, between.T, between)

    def between(self) -> Tensor:
        """Class means minus the mean of all records, times the root of the class's share (C, d): B
        with B^T B between.
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
        parts: statistics of the same classes in the same order. The result has variances if all
            parts have them.

    Returns:
        Their sum. Its covariance is `Factored` while the parts have few factors together.

    Raises:
        ValueError: without parts, or for parts with other classes or dimensions.
    """
    running: _Running | None = None
    for part in parts:
        if running is None:
            running = _Running(part)
        else:
            running.add(part)
    if running is None:
        raise ValueError("no statistics to add")
    return running.result()


class _Running:
    """A sum of statistics that grows by one part at a time. Counts, means and variances are those
    of the parts so far.
    """

    def __init__(self, first: Statistics) -> None:
        self._counts, self._means, self._variances = first.counts, first.means, first.variances
        self._sampled = first.sampled
        self._scatter = CovarianceSum(first.means.shape[1])
        self._scatter.add(first.covariance, first.records)

    def add(self, part: Statistics) -> None:
        """Add the records of a part."""
        if part.means.shape != self._means.shape:
            shapes = f"{tuple(part.means.shape)} and {tuple(self._means.shape)}"
            raise ValueError(f"statistics of other classes or dimensions cannot be added: means of shapes {shapes}")
        counts = self._counts + part.counts
        share = part.counts / counts.clamp_min(1e-300)
        apart = part.means - self._means
        # n m / (n + m), for n records so far and m more; zero if there are none on one side.
        weights = part.counts * (1 - share)
        if self._variances is None or part.variances is None:
            self._variances = None
        else:
            change = part.variances - self._variances + apart.square() * (1 - share)[:, None]
            self._variances = self._variances + change * share[:, None]
        both = (self._counts > 0) & (part.counts > 0)
        self._scatter.add(part.covariance, part.records)
        self._scatter.add_factor((apart[both] * weights[both].sqrt()[:, None]).T)
        self._counts, self._means = counts, self._means + apart * share[:, None]
        self._sampled = self._sampled and part.sampled

    def result(self) -> Statistics:
        """The sum so far, once."""
        covariance = self._scatter.divided(float(self._counts.sum()))
        return Statistics(self._counts, self._means, covariance, self._variances, self._sampled)
