"""Measures of predicted numbers and of predicted ranks. Point values are scikit-learn's where it has
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsurrogate.common.models.intervals import DRAWS, Array, Measure, Rows, measured

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

    def points(rows: Rows) -> dict[str, float | None]:
        return _points(records, rows)

    return measured(points, len(records.true), records.patients, draws, seed)


def _points(records: Predictions, rows: Rows) -> dict[str, float | None]:
    from sklearn import metrics

    true, predicted = records.true[rows], records.predicted[rows]
    if not len(rows):
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
        held = (records.low[rows] <= true) & (true <= records.high[rows])
        values["coverage"] = float(held.mean())
    return values


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
