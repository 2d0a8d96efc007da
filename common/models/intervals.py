"""Metrics with 95 % intervals, by samples of whole patients, or of records: the one bootstrap of the
project.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
DRAWS = 1000
LEVEL = 0.95
# A value that lies outside its interval by less was only rounded.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Measure:
    """A value with its interval.

    Attributes:
        value: None if it is undefined.
        low: lower limit of the 95 % interval.
        high: upper limit of the 95 % interval.
        support: number of records that it is about.
    """

    value: float | None
    low: float | None
    high: float | None
    support: int


def bootstrap_weights(count: int, patients: Sequence[str] | None, draws: int, seed: int) -> Array:
    """How often each record is drawn: whole patients with replacement, or records without patients.

    Args:
        count: n, number of records.
        patients: of each record, (n,); None if unknown.
        draws: number of samples.
        seed: of the samples.

    Returns:
        Numbers (draws, n).
    """
    if not count:
        return np.zeros((draws, 0))
    generator = np.random.default_rng(seed)
    owner = np.arange(count)
    if patients is not None:
        _, owner = np.unique(np.asarray(patients), return_inverse=True)
    units = int(owner.max()) + 1
    drawn = generator.multinomial(units, np.full(units, 1 / units), draws)
    return drawn[:, owner].astype(np.float64)


def means_of(values: NDArray[Any], weights: Array) -> Array:
    """Means of values (n,) in each sample, (draws,), from weights (draws, n)."""
    return ratios(weights @ values, weights.sum(1))


def ratios(above: Array, below: Array) -> Array:
    """Quotients; NaN where the denominator is zero."""
    found: Array = np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0)
    return found


def units_of(mask: NDArray[Any], patients: Sequence[str] | None) -> int:
    """Number of records of a group, or of its patients.

    Args:
        mask: whether a record is in the group, (n,), bool.
        patients: of each record, (n,); None if unknown.
    """
    if patients is None:
        return int(mask.sum())
    return len({patients[row] for row in np.flatnonzero(mask).tolist()})


def interval(samples: Array, units: int) -> tuple[float, float] | None:
    """The 95 % interval from bootstrap samples.

    The expanded percentile interval: plain percentiles are too narrow for few records.

    Args:
        samples: (draws,).
        units: number of independent records or patients in the smaller of the groups that the
            measure compares.

    Returns:
        Both limits; None if most of the samples are undefined.

    Source: Hesterberg 2015, section 4.1.
    """
    from scipy.stats import norm, t

    known = samples[np.isfinite(samples)]
    if not len(known) or len(known) < len(samples) / 2 or units < 2:
        return None
    tail = float(norm.cdf(-math.sqrt(units / (units - 1)) * t.ppf((1 + LEVEL) / 2, units - 1)))
    low, high = np.quantile(known, [tail, 1 - tail])
    return float(low), float(high)


def with_interval(
    value: float | None, samples: Array, support: int, units: int, share: bool = False
) -> Measure:
    """A measure with the interval of its samples.

    Where all samples of a share are 0 or 1, the interval is Wilson's for so many units: one of width
    zero is too good. An interval that does not hold its value, as of a biased measure in
    samples of few records, is left out.

    Args:
        value: None where undefined.
        samples: of the measure, (draws,), NaN where undefined.
        support: number of records that it is about.
        units: number of independent records or patients.
        share: whether it is one, from 0 to 1.
    """
    if value is None or not math.isfinite(value):
        return Measure(None, None, None, support)
    bounds = interval(samples, units)
    if bounds is not None and share and bounds[0] == bounds[1] and value in (0.0, 1.0):
        from scipy.stats import binomtest

        limits = binomtest(round(value * units), units).proportion_ci(method="wilson")
        bounds = float(limits.low), float(limits.high)
    if bounds is None or not bounds[0] - ROUNDING <= value <= bounds[1] + ROUNDING:
        return Measure(value, None, None, support)
    return Measure(value, min(bounds[0], value), max(bounds[1], value), support)


def averaged(
    measures: Sequence[Measure], samples: Sequence[Array], support: int, units: int
) -> Measure:
    """The mean of a measure over classes or labels; undefined where one of them is.

    Where no sample differs from another, the interval follows from those of the classes.

    Args:
        measures: one or more.
        samples: of each, (draws,). As scikit-learn would, a sample averages those that it defines.
        support: number of records that the mean is about.
        units: number of independent records or patients of the smallest class. With one, the
            interval is that of two, the widest.

    Source: Zou & Donner 2008, for the second kind of interval.
    """
    values = [each.value for each in measures if each.value is not None]
    mean = float(np.mean(values)) if len(values) == len(measures) else None
    drawn = np.stack(samples)
    known = np.isfinite(drawn)
    means = ratios(np.where(known, drawn, 0.0).sum(0), known.sum(0).astype(np.float64))
    found = with_interval(mean, means, support, max(2, units))
    if mean is None or found.low is None or found.low < (found.high or 0.0):
        return found
    ends = [(each.low, each.high) for each in measures if None not in (each.low, each.high)]
    if len(ends) < len(measures):
        return Measure(mean, None, None, support)
    low, high = (
        float(np.linalg.norm(np.subtract(values, each))) / len(values)
        for each in zip(*ends, strict=True)
    )
    return Measure(mean, mean - low, mean + high, support)


def measured(
    points: Callable[[Rows], Mapping[str, float | None]],
    count: int,
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    shares: Collection[str] = (),
) -> dict[str, Measure]:
    """Measures of all records, with 95 % intervals from samples with replacement.

    Args:
        points: the measures of the records at these rows, by name; None where undefined.
        count: number of records.
        patients: of each record, (count,), if known: then whole patients are drawn.
        draws: number of samples.
        seed: of the samples.
        shares: measures that are one, from 0 to 1.

    Returns:
        By name; the support is the number of records.

    Example:
        >>> values = np.array([1.0, 2.0, 3.0])
        >>> found = measured(lambda rows: {"mean": float(values[rows].mean())}, 3, draws=50)
        >>> found["mean"].value, found["mean"].support
        (2.0, 3)
    """
    all_rows = np.arange(count)
    values = points(all_rows)
    drawn: dict[str, list[float]] = {name: [] for name in values}
    for weights in bootstrap_weights(count, patients, draws, seed) if count else ():
        for name, value in points(np.repeat(all_rows, weights.astype(np.int64))).items():
            drawn[name].append(np.nan if value is None else value)
    units = units_of(np.ones(count, dtype=bool), patients)
    return {
        name: with_interval(value, np.array(drawn[name]), count, units, name in shares)
        for name, value in values.items()
    }
