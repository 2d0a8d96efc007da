"""The statistics of records that a head in closed form needs. Those of several sites add up to
those of all records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.factored import CovarianceSum, Factored, dense

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
