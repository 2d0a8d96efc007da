"""Rates and AUROC from noisy counts, with 95 % intervals that include the noise, the sampling of
records and the bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Two-sided 95 % of a normal distribution.
Z = 1.959963984540054
# A total below this many standard deviations of its noise says nothing about a rate.
VISIBLE = 3.0


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; all None where the noise is too large for the number of
    records.

    Attributes:
        value: estimated.
        low: lower limit.
        high: upper limit.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None


UNDEFINED = Interval()


def total(cells: Tensor, variance: float) -> Interval:
    """The sum of noisy cells; its interval is for the noise alone.

    Args:
        cells: counts, of any shape.
        variance: of the noise in each cell.

    Example:
        >>> total(torch.tensor([20.0, 30.0]), variance=0.0)
        Interval(value=50.0, low=50.0, high=50.0)
    """
    value, room = float(cells.sum()), Z * math.sqrt(variance * cells.numel())
    return Interval(value, value - room, value + room)


def rate(inside: Tensor, outside: Tensor, variance: float) -> Interval:
    """Share of the records in some cells; the interval is for the probability behind it.

    Given probability s, inside - s * (inside + outside) has mean zero and variance
    n s (1 - s) + variance * (k (1 - s)^2 + m s^2), for k and m cells. The interval holds every s
    for which this difference is within 95 %: a quadratic inequality.

    Args:
        inside: counts in the k cells whose share is asked for, of any shape.
        outside: counts in the other m cells, of any shape.
        variance: of the noise in each cell.

    Source: Fieller 1954; without noise, Wilson 1927.

    Example:
        >>> share = rate(torch.tensor([90.0]), torch.tensor([10.0]), variance=0.0)
        >>> share.value, round(share.low, 4), round(share.high, 4)
        (0.9, 0.8256, 0.9448)
    """
    counted, everything = float(inside.sum()), float(inside.sum() + outside.sum())
    k, m = inside.numel(), outside.numel()
    if everything < max(1.0, VISIBLE * math.sqrt(variance * (k + m))):
        return UNDEFINED
    # Noise can put the share outside 0 to 1; the nearest possible share then gives an interval that
    # has a width.
    counted = min(max(counted, 0.0), everything)
    return _fieller(counted, everything, (variance * k, -2 * variance * k, variance * (k + m)))


def mean_of(rates: Sequence[Interval]) -> Interval:
    """The mean of independent rates; undefined where one of them is.

    Args:
        rates: such as the sensitivities of all classes, whose mean is the balanced accuracy.

    Source: Zou & Donner 2008, for the interval.

    Example:
        >>> mean_of([Interval(1.0, 0.8, 1.0), Interval(0.5, 0.4, 0.6)]).value
        0.75
    """
    known = [(each.value, each.low, each.high) for each in rates]
    if not known or any(None in each for each in known):
        return UNDEFINED
    value, low, high = torch.tensor(known, dtype=torch.float64).T
    mean = float(value.mean())
    below, above = (float((value - each).norm()) / len(value) for each in (low, high))
    return Interval(mean, _share(mean - below), _share(mean + above))


def share_of(inside: float, records: float, variance: float) -> Interval:
    """Share of the records, where these were counted for themselves: the noise in both numbers is
    independent, so it is v (1 + s^2) in inside - s * records. Otherwise as `rate`.

    Args:
        inside: number of records whose share is asked for.
        records: number of all.
        variance: v, of the noise in each number.

    Example:
        >>> share_of(90.0, 100.0, 0.0) == rate(torch.tensor([90.0]), torch.tensor([10.0]), 0.0)
        True
    """
    if records < max(1.0, VISIBLE * math.sqrt(variance)):
        return UNDEFINED
    return _fieller(min(max(inside, 0.0), records), records, (variance, 0.0, variance))


def _fieller(inside: float, records: float, noise: tuple[float, float, float]) -> Interval:
    """Every share s for which inside - s * records is within 95 % of zero.

    Args:
        inside: number of records whose share is asked for, from none to all.
        records: number of all.
        noise: its variance in the difference, as the coefficients of 1, s and s^2.
    """
    a = records**2 + Z**2 * (records - noise[2])
    b = -2 * inside * records - Z**2 * (records + noise[1])
    c = inside**2 - Z**2 * noise[0]
    inner = b * b - 4 * a * c
    if a <= 0 or inner < 0:
        return UNDEFINED
    low, high = ((-b + sign * math.sqrt(inner)) / (2 * a) for sign in (-1, 1))
    return Interval(_share(inside / records), _share(low), _share(high))


def auroc(histograms: Tensor, variance: float) -> Interval:
    """AUROC of a class from histograms.

    The value counts half of the pairs in one bin. The interval adds three parts. Noise: the delta
    method for the ratio of ordered pairs to all pairs, with the second-order term of two noisy
    histograms. Sampling of the records: Hanley & McNeil 1982. Bins: records in one bin may be in
    any order, so the AUROC of the scores themselves is within half of the share of these pairs.

    Args:
        histograms: records of other classes, and of the class, by rising probability, (2, B).
        variance: of the noise in each cell.

    Example:
        >>> auroc(torch.tensor([[30.0, 10.0], [10.0, 30.0]]), variance=0.0).value
        0.75
    """
    others, own = histograms.double()
    negatives, positives, bins = float(others.sum()), float(own.sum()), len(own)
    if min(negatives, positives) < max(1.0, VISIBLE * math.sqrt(variance * bins)):
        return UNDEFINED
    below = (others.cumsum(0) - others / 2) / negatives
    value = float((own * below).sum()) / positives
    above = 1 - (own.cumsum(0) - own / 2) / positives
    noise = variance * float(((below - value) ** 2).sum()) / positives**2
    noise += variance * float(((above - value) ** 2).sum()) / negatives**2
    order = (
        torch.ones(bins, bins, dtype=torch.float64).tril(-1)
        + torch.eye(bins, dtype=torch.float64) / 2
    )
    noise += (variance / (positives * negatives)) ** 2 * float(((order - value) ** 2).sum())
    # No pair of noisy cells is below zero in truth.
    tied = float((own.clamp_min(0) * others.clamp_min(0)).sum()) / (positives * negatives) / 2
    room = Z * math.sqrt(noise + _sampling(value, positives, negatives)) + min(tied, 0.5)
    return Interval(_share(value), _share(value - room), _share(value + room))


def _sampling(value: float, positives: float, negatives: float) -> float:
    """Variance of an AUROC of this many records (Hanley & McNeil 1982), not below that of one pair
    in the wrong order.
    """
    fewest = min(positives, negatives)
    area = (
        min(max(value, 0.5), 1 - 1 / (2 * fewest + 2))
        if value >= 0.5
        else max(min(value, 0.5), 1 / (2 * fewest + 2))
    )
    area = max(area, 1 - area)
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = (positives - 1) * (first - area**2) + (negatives - 1) * (second - area**2)
    return (area * (1 - area) + max(0.0, spread)) / (positives * negatives)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
