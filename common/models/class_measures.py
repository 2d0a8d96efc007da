"""Measures of a classifier on labelled records, as scikit-learn defines them, with bootstrap
intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.models.intervals import (
    DRAWS,
    Array,
    Measure,
    averaged,
    bootstrap_weights,
    means_of,
    ratios,
    units_of,
    with_interval,
)

FEWEST = 10  # A class with fewer records is marked.
BINS = 10
CURVES = ("roc", "precision_recall", "reliability")
# From this share of the records in one class on, accuracy says little.
UNEQUAL = 0.6
# Numbers that a bootstrap keeps in memory at a time.
ROOM = 4_000_000


@dataclass(frozen=True)
class ClassReport:
    """Measures of one class against all others.

    Attributes:
        name: of the class.
        support: number of its records.
        few: whether it has fewer than ten records.
        measures: by name.
    """

    name: str
    support: int
    few: bool
    measures: Mapping[str, Measure]


@dataclass(frozen=True)
class Report:
    """Measures of all classes, and averages over all classes that have a record.

    Attributes:
        classes: names of C classes.
        records: number of records.
        units: number of patients that the intervals resample; 0 if single records.
        per_class: measures of each class.
        averages: by name.
        confusion: (C, C), records by true class (rows) and decision (columns).
        left_out: classes without a record, of which nothing can be measured.
    """

    classes: tuple[str, ...]
    records: int
    units: int
    per_class: tuple[ClassReport, ...]
    averages: Mapping[str, Measure]
    confusion: NDArray[np.int64]
    left_out: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Judged:
    """Labelled records with what a model decides.

    Attributes:
        labels: indices of classes, (n,).
        probabilities: of the classes, (n, C).
        decisions: indices of classes, (n,).
        patients: of each record, if known.
    """

    labels: NDArray[np.int64]
    probabilities: Array
    decisions: NDArray[np.int64]
    patients: Sequence[str] | None = None

    def take(self, rows: NDArray[Any]) -> Judged:
        """Some of the records."""
        indices = np.arange(len(self.labels))[rows]
        patients = None if self.patients is None else [self.patients[i] for i in indices]
        return Judged(
            self.labels[indices], self.probabilities[indices], self.decisions[indices], patients
        )


def report(judged: Judged, classes: tuple[str, ...], draws: int = DRAWS, seed: int = 0) -> Report:
    """Every measure with its interval.

    Intervals are percentiles over samples of whole patients, or of records.

    Args:
        judged: the records.
        classes: names of C classes.
        draws: number of samples.
        seed: of the samples.
    """
    from sklearn.metrics import confusion_matrix

    labels, count = judged.labels, len(classes)
    weights = bootstrap_weights(len(labels), judged.patients, draws, seed)
    rows: list[ClassReport] = []
    drawn: list[dict[str, Array]] = []
    least: dict[str, int] = {}
    for index, name in enumerate(classes):
        truth, chance = labels == index, judged.probabilities[:, index]
        decided = judged.decisions == index
        samples = samples_of(truth, decided, chance, weights)
        groups = {
            "sensitivity": truth,
            "specificity": ~truth,
            "ppv": decided,
            "npv": ~decided,
            "f1": truth | decided,
        }
        measures = {}
        positive, negative = (units_of(each, judged.patients) for each in (truth, ~truth))
        smaller = {"auroc": min(positive, negative), "auprc": positive}
        for key, value in points_of(truth, decided, chance).items():
            group = groups.get(key, np.ones_like(truth))
            units = smaller.get(key, units_of(group, judged.patients))
            support = int(group.sum())
            measures[key] = (
                with_interval(value, samples[key], support, units, share=True)
                if key in samples
                else Measure(value, None, None, support)
            )
            if truth.any():
                least[key] = min(least.get(key, units), units)
        size = int(truth.sum())
        rows.append(ClassReport(name, size, size < FEWEST, measures))
        if size:
            drawn.append(samples)
    kept = [row for row in rows if row.support]
    averages = {}
    for key in least:
        own = [row.measures[key] for row in kept]
        nothing = np.full(draws, np.nan)
        samples_by_class = [each.get(key, nothing) for each in drawn]
        averages[f"macro_{key}"] = averaged(own, samples_by_class, len(labels), least[key])
    averages |= _overall(judged, weights)
    if kept:
        averages["balanced_accuracy"] = averages["macro_sensitivity"]
    units = 0 if judged.patients is None else len(set(judged.patients))
    matrix = confusion_matrix(labels, judged.decisions, labels=range(count))
    left_out = tuple(row.name for row in rows if not row.support)
    return Report(
        classes, len(labels), units, tuple(rows), averages, matrix.astype(np.int64), left_out
    )


def leads_with_auroc(majority: float) -> bool:
    """Whether accuracy misleads, so that a page, a table or a plot shows AUROC before it.

    Args:
        majority: accuracy of always giving the largest class.
    """
    return majority > UNEQUAL


def drawn_classes(sizes: Sequence[int], positive: int | None = None) -> list[int]:
    """The classes whose curves are drawn: all, or of two the positive one.

    Args:
        sizes: records of each class.
        positive: the one that somebody has named; None for the rarer of two.

    Returns:
        Their indices. Of two classes of the same size, the second is the rarer.

    Example:
        >>> drawn_classes([90, 10]), drawn_classes([10, 90]), drawn_classes([5, 5, 5])
        ([1], [0], [0, 1, 2])
    """
    if positive is not None:
        return [positive]
    return [int(sizes[1] <= sizes[0])] if len(sizes) == 2 else list(range(len(sizes)))


def points_of(
    truth: NDArray[np.bool_], decided: NDArray[np.bool_], chance: Array
) -> dict[str, float | None]:
    """Measures of one class by scikit-learn.

    Args:
        truth: whether a record is of the class, (n,).
        decided: whether the model decides for the class, (n,).
        chance: probability of the class, (n,).

    Returns:
        Values by name; None where undefined.
    """
    from sklearn import metrics

    names = ("sensitivity", "specificity", "ppv", "npv", "f1", "auroc", "auprc", "brier")
    found: dict[str, float | None] = dict.fromkeys((*names, "calibration_error"))
    if not len(truth):
        return found
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        truth, decided, labels=[False, True], zero_division=np.nan
    )
    values = {
        "sensitivity": recall[1],
        "specificity": recall[0],
        "ppv": precision[1],
        "npv": precision[0],
        "f1": f1[1],
        "brier": metrics.brier_score_loss(truth, np.clip(chance, 0, 1), pos_label=True),
        "calibration_error": calibration_error(truth, chance),
    }
    if truth.any():
        values["auprc"] = metrics.average_precision_score(truth, chance)
        if not truth.all():
            values["auroc"] = metrics.roc_auc_score(truth, chance)
    return found | {name: float(value) for name, value in values.items() if np.isfinite(value)}


def calibration_error(truth: NDArray[np.bool_], chance: Array) -> float | None:
    """Expected calibration error over ten equal bins of the probability, from calibration_curve.

    Args:
        truth: whether a record is of the class, (n,).
        chance: probability of the class, (n,).

    Returns:
        The error; None without records.

    Source: Naeini et al. 2015.

    Example:
        >>> round(calibration_error(np.array([True, False]), np.array([0.85, 0.25])), 3)
        0.2
    """
    if not len(truth):
        return None
    mean, share, sizes = reliability(truth, chance)
    return float(np.abs(share - mean) @ sizes / len(truth))


def curves_of(judged: Judged, index: int) -> dict[str, Any]:
    """Points of the ROC, precision-recall and reliability curves of a class.

    Args:
        judged: the records.
        index: of the class.

    Returns:
        Coordinates by name of the curve, and of the reliability also the records of each point; None
        where undefined.
    """
    from sklearn.metrics import precision_recall_curve, roc_curve

    truth, chance = judged.labels == index, judged.probabilities[:, index]
    if not truth.any() or truth.all():
        return dict.fromkeys(CURVES)
    fpr, tpr, _ = roc_curve(truth, chance)
    precision, recall, _ = precision_recall_curve(truth, chance)
    mean, share, sizes = reliability(truth, chance)
    points = ((fpr, tpr), (recall, precision), (mean, share, sizes))
    return {
        name: [axis.tolist() for axis in axes] for name, axes in zip(CURVES, points, strict=True)
    }


def samples_of(
    truth: NDArray[np.bool_], decided: NDArray[np.bool_], chance: Array, weights: Array
) -> dict[str, Array]:
    """The measures of `points_of` for the intervals: in each bootstrap sample, a hundred times as fast
    as by scikit-learn. A calibration error has none: samples of few records have larger ones.

    Args:
        truth: whether a record is of the class, (n,).
        decided: whether the model decides for the class, (n,).
        chance: probability of the class, (n,).
        weights: how often each record is drawn, (draws, n).

    Returns:
        Values (draws,) by name, NaN where undefined.
    """
    masks = (truth & decided, truth & ~decided, ~truth & decided, ~truth & ~decided)
    tp, fn, fp, tn = (weights @ mask for mask in masks)
    samples = {
        "sensitivity": ratios(tp, tp + fn),
        "specificity": ratios(tn, tn + fp),
        "ppv": ratios(tp, tp + fp),
        "npv": ratios(tn, tn + fn),
        "f1": ratios(2 * tp, 2 * tp + fp + fn),
    }
    samples["auroc"], samples["auprc"] = ranking_samples(truth, chance, weights)
    samples["brier"] = means_of(np.square(chance - truth), weights)
    return samples


def ranking_samples(truth: NDArray[np.bool_], chance: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted area under the ROC curve and average precision of bootstrap samples.

    Args:
        truth: whether a record is of the class, (n,).
        chance: probability of the class, (n,).
        weights: how often each record is drawn, (draws, n).

    Returns:
        Both for each row of weights, (draws,).
    """
    if not truth.any():
        return np.full(len(weights), np.nan), np.full(len(weights), np.nan)
    order = np.argsort(-chance, kind="stable")
    ordered, right = chance[order], truth[order]
    # Records of one probability are a group, of which those with a record of the class count.
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    group = np.searchsorted(ends, np.flatnonzero(right))
    last = np.flatnonzero(np.append(np.diff(group), 1))
    end = ends[group[last]] + 1
    begin = np.append(0, ends + 1)[group[last]]
    step = max(1, ROOM // max(1, len(truth)))
    areas, precisions = [], []
    for start in range(0, len(weights), step):
        part = weights[start : start + step, order]
        above = np.cumsum(part, 1)
        above = np.concatenate([np.zeros((len(part), 1)), above], 1)
        tp = np.cumsum(part[:, right], 1)[:, last]
        gained = np.diff(tp, axis=1, prepend=0)
        positive, negative = tp[:, -1], above[:, -1] - tp[:, -1]
        # Of the other records, those below the group, and half of those in it.
        tied = above[:, end] - above[:, begin] - gained
        below = negative[:, None] - (above[:, end] - tp) + tied / 2
        areas.append(ratios((gained * below).sum(1), positive * negative))
        precision = np.divide(tp, above[:, end], out=np.zeros_like(tp), where=tp > 0)
        precisions.append(ratios((gained * precision).sum(1), positive))
    return np.concatenate(areas), np.concatenate(precisions)


def _overall(judged: Judged, weights: Array) -> dict[str, Measure]:
    """Accuracy."""
    from sklearn.metrics import accuracy_score

    if not len(judged.labels):
        return {}
    right = judged.labels == judged.decisions
    accuracy = float(accuracy_score(judged.labels, judged.decisions))
    units = units_of(np.ones_like(right), judged.patients)
    return {
        "accuracy": with_interval(accuracy, means_of(right, weights), len(right), units, share=True)
    }


def reliability(truth: NDArray[np.bool_], chance: Array) -> tuple[Array, Array, NDArray[np.int64]]:
    """Mean probability, share of the class, and number of records of each bin that has any.

    Args:
        truth: whether a record is of the class, (n,), with n of one or more.
        chance: probability of the class, (n,).

    Returns:
        (b,) of the b bins, by rising probability.
    """
    from sklearn.calibration import calibration_curve

    share, mean = calibration_curve(truth, chance, n_bins=BINS, pos_label=True)
    sizes = np.bincount(bins_of(chance), minlength=BINS)
    return mean, share, sizes[sizes > 0]


def bins_of(chance: Array) -> NDArray[np.int64]:
    """The bin of each probability, with the same edges as scikit-learn's calibration_curve.

    Args:
        chance: (n,).
    """
    edges = np.linspace(0, 1, BINS + 1)
    return np.searchsorted(edges[1:-1], chance).astype(np.int64)
