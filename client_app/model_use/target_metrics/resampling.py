"""Intervals of measures by samples of whole patients, or of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.models.class_measures import Array, Measure, bootstrap_weights, interval

Rows = NDArray[np.int64]
DRAWS = 1000


def measured(
    points: Callable[[Rows], Mapping[str, float | None]],
    count: int,
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    fast: Callable[[Rows], Mapping[str, float | None]] | None = None,
) -> dict[str, Measure]:
    """Measures of all records, with 95 % intervals from samples with replacement.

    Args:
        points: the measures of the records at these rows, by name; None where undefined.
        count: number of records.
        patients: of each record, (count,), if known: then whole patients are drawn.
        draws: number of samples.
        seed: of the samples.
        fast: the same measures, computed faster, for the samples.

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
        rows = np.repeat(all_rows, weights.astype(np.int64))
        for name, value in (fast or points)(rows).items():
            drawn[name].append(np.nan if value is None else value)
    units = count if patients is None else len(set(patients))
    return {
        name: with_interval(value, np.array(drawn[name]), count, units)
        for name, value in values.items()
    }


def with_interval(value: float | None, samples: Array, support: int, units: int) -> Measure:
    """A measure with the interval of its samples.

    Args:
        value: None where undefined.
        samples: of the measure, NaN where undefined.
        support: number of records that it is about.
        units: number of independent records or patients.
    """
    defined = value is not None and np.isfinite(value)
    bounds = interval(samples, units) if defined and len(samples) else None
    low, high = bounds or (None, None)
    return Measure(value if defined else None, low, high, support)


def several(truth: Array) -> bool:
    """Whether there are two different values among them."""
    return len(truth) > 1 and bool((truth != truth[0]).any())
