"""Measures of predicted numbers and of predicted ranks. Point values are scikit-learn's where it has
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.models.intervals import (
    DRAWS,
    Array,
    Measure,
    bootstrap_weights,
    means_of,
    ratios,
    units_of,
    with_interval,
)

# Of the standard deviation of differences: limits of agreement hold 95 % of normal ones.
WIDTH = 1.96


@dataclass(frozen=True, eq=False)
class Predictions:
    """Records with a true number, and what a model answers.

    Attributes:
        true: (n,), in the unit of the number.
        predicted: (n,).
        low: lower limits of the model's prediction intervals, (n,); None without.
        high: upper limits.
        patients: of each record, if known.
    """

    true: Array
    predicted: Array
    low: Array | None = None
    high: Array | None = None
    patients: Sequence[str] | None = None


def number_measures(records: Predictions, draws: int = DRAWS, seed: int = 0) -> dict[str, Measure]:
    """Measures of predicted numbers, with intervals.

    Args:
        records: the records.
        draws: number of samples for the intervals.
        seed: of the samples.

    Returns:
        "mae", "rmse", "r2"; "bias", the mean of predicted minus true; "agreement_low" and
        "agreement_high", the limits of agreement (Bland & Altman 1986); "icc", the agreement of
        both as two raters; and "coverage" of the prediction intervals, where there are any.
    """
    count = len(records.true)
    weights = bootstrap_weights(count, records.patients, draws, seed)
    units = units_of(np.ones(count, dtype=bool), records.patients)
    samples = _samples(records, weights)
    return {
        name: with_interval(value, samples[name], count, units, share=name == "coverage")
        for name, value in _points(records).items()
    }


def _points(records: Predictions) -> dict[str, float | None]:
    from sklearn import metrics

    true, predicted = records.true, records.predicted
    if not len(true):
        names = ("mae", "rmse", "r2", "bias", "agreement_low", "agreement_high", "icc")
        return dict.fromkeys((*names, *(("coverage",) if records.low is not None else ())))
    low, bias, high = agreement(true, predicted)
    differ = len(true) > 1 and bool((true != true[0]).any())
    values: dict[str, float | None] = {
        "mae": float(metrics.mean_absolute_error(true, predicted)),
        "rmse": float(metrics.root_mean_squared_error(true, predicted)),
        "r2": float(metrics.r2_score(true, predicted)) if differ else None,
        "bias": bias,
        "agreement_low": low,
        "agreement_high": high,
        "icc": agreement_of_raters(np.stack([true, predicted], 1)),
    }
    if records.low is not None and records.high is not None:
        values["coverage"] = float(_held(records).mean())
    return values


def _held(records: Predictions) -> NDArray[np.bool_]:
    """Whether the model's interval holds the true number, (n,)."""
    assert records.low is not None
    assert records.high is not None
    held: NDArray[np.bool_] = (records.low <= records.true) & (records.true <= records.high)
    return held


def _samples(records: Predictions, weights: Array) -> dict[str, Array]:
    """The same in each bootstrap sample, for the intervals: from moments of all samples at once, which
    takes a hundredth of the time.
    """
    apart, middle = records.predicted - records.true, (records.predicted + records.true) / 2
    # Around the means of all records, so that no digits are lost.
    middle = middle - middle.mean() if len(middle) else middle
    true = records.true - records.true.mean() if len(middle) else middle
    bias, square = means_of(apart, weights), means_of(np.square(apart), weights)
    spread = square - np.square(bias)
    variance = means_of(np.square(true), weights) - np.square(means_of(true, weights))
    between = means_of(np.square(middle), weights) - np.square(means_of(middle, weights))
    records_drawn = weights.sum(1)
    per_freedom = ratios(records_drawn, records_drawn - 1)
    width = WIDTH * np.sqrt(np.maximum(spread * per_freedom, 0))
    # Of two raters: mean squares of subjects, raters and error, from sums, differences and bias.
    subjects, error = 2 * between * per_freedom, spread / 2 * per_freedom
    raters = records_drawn * np.square(bias) / 2
    below = subjects + error + ratios(2 * (raters - error), records_drawn)
    found = {
        "mae": means_of(np.abs(apart), weights),
        "rmse": np.sqrt(square),
        "r2": 1 - ratios(square, np.where(variance > 1e-12 * (1 + square), variance, 0)),
        "bias": bias,
        "agreement_low": bias - width,
        "agreement_high": bias + width,
        "icc": ratios(subjects - error, below),
    }
    if records.low is not None:
        found["coverage"] = means_of(_held(records), weights)
    return found


def agreement(true: Array, predicted: Array) -> tuple[float | None, float, float | None]:
    """Lower limit of agreement, bias, and upper limit: the mean of predicted minus true, and 1.96
    standard deviations beside it.

    Args:
        true: (n,), with n of one or more.
        predicted: (n,).

    Returns:
        The limits are None for one record.

    Example:
        >>> low, bias, high = agreement(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 5.0]))
        >>> round(low, 2), bias, round(high, 2)
        (-0.96, 1.0, 2.96)
    """
    apart = predicted - true
    bias = float(apart.mean())
    if len(apart) < 2:
        return None, bias, None
    width = WIDTH * float(apart.std(ddof=1))
    return bias - width, bias, bias + width


def agreement_of_raters(ratings: Array) -> float | None:
    """The intraclass correlation ICC(2,1): two-way random effects, absolute agreement, one rater.

    Args:
        ratings: of n subjects by k raters, (n, k).

    Returns:
        The correlation; None for fewer than two subjects, or where nothing varies.

    Source: Shrout & Fleiss 1979.

    Example:
        >>> table = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9],
        ...          [6, 2, 4, 7]]
        >>> round(agreement_of_raters(np.array(table, dtype=float)), 2)
        0.29
    """
    subjects, raters = ratings.shape
    if subjects < 2:
        return None
    rows, columns, mean = ratings.mean(1), ratings.mean(0), ratings.mean()
    between = raters * np.square(rows - mean).sum() / (subjects - 1)
    of_raters = subjects * np.square(columns - mean).sum() / (raters - 1)
    left = ratings - rows[:, None] - columns + mean
    error = np.square(left).sum() / ((subjects - 1) * (raters - 1))
    below = between + (raters - 1) * error + raters * (of_raters - error) / subjects
    return float((between - error) / below) if below > 0 else None
