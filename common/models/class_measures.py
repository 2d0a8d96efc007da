"""Measures of a classifier on labelled records, as scikit-learn defines them, with bootstrap
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FEWEST = 10  # A class with fewer records is marked, and left out of averages.
BINS = 10
CURVES = ("roc", "precision_recall", "reliability")
DRAWS = 1000
LEVEL = 0.95
# Numbers that a bootstrap keeps in memory at a time.
ROOM = 4_000_000


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
    """Measures of all classes, and averages over the classes that have ten records or more.

    Attributes:
        classes: names of C classes.
        records: number of records.
        units: number of patients that the intervals resample; 0 if single records.
        per_class: measures of each class.
        averages: by name.
        confusion: (C, C), records by true class (rows) and decision (columns).
        left_out: classes that averages leave out.
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
    sizes = np.bincount(labels, minlength=count)
    rows, smallest = [], len(labels)
    drawn: dict[str, list[Array]] = {}
    for index, name in enumerate(classes):
        truth, chance = labels == index, judged.probabilities[:, index]
        decided = judged.decisions == index
        points, samples = (
            points_of(truth, decided, chance),
            samples_of(truth, decided, chance, weights),
        )
        smaller = min(_units(truth, judged.patients), _units(~truth, judged.patients))
        smallest = min(smallest, smaller) if sizes[index] >= FEWEST else smallest
        support = {
            "specificity": int((~truth).sum()),
            "npv": int((~decided).sum()),
            "ppv": int(decided.sum()),
        }
        whole = ("auroc", "auprc", "brier", "calibration_error")
        measures = {
            key: _measure(
                value,
                samples[key],
                len(labels) if key in whole else support.get(key, int(sizes[index])),
                smaller,
            )
            for key, value in points.items()
        }
        rows.append(ClassReport(name, int(sizes[index]), bool(sizes[index] < FEWEST), measures))
        if sizes[index] >= FEWEST:
            for key, sample in samples.items():
                drawn.setdefault(key, []).append(sample)
    kept = [row for row in rows if not row.few]
    averages = {
        f"macro_{key}": _average(kept, key, samples_, smallest) for key, samples_ in drawn.items()
    }
    averages |= _overall(judged, kept, drawn, weights, smallest)
    units = 0 if judged.patients is None else len(set(judged.patients))
    matrix = confusion_matrix(labels, judged.decisions, labels=range(count))
    left_out = tuple(row.name for row in rows if row.few)
    return Report(
        classes, len(labels), units, tuple(rows), averages, matrix.astype(np.int64), left_out
    )


def points_of(
    truth: NDArray[np.bool_], decided: NDArray[np.bool_], chance: Array
) -> dict[str, float | None]:
    """Measures of one class, the same as scikit-learn's.

    Args:
        truth: whether a record is of the class, (n,).
        decided: whether the model decides for the class, (n,).
        chance: probability of the class, (n,).

    Returns:
        Values by name; None where undefined.
    """
    # A sample that has each record once. scikit-learn checks its arguments anew for each measure,
    # which takes a hundred times as long.
    once = samples_of(truth, decided, chance, np.ones((1, len(truth))))
    return {name: None if np.isnan(value) else float(value) for name, (value,) in once.items()}


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
    mean, share, sizes = _reliability(truth, chance)
    return float(np.abs(share - mean) @ sizes / len(truth))


def curves_of(judged: Judged, index: int) -> dict[str, Any]:
    """Points of the ROC, precision-recall and reliability curves of a class. Of the last, bins with
    fewer than ten records have none: they would show chance.

    Args:
        judged: the records.
        index: of the class.

    Returns:
        Pairs of coordinates by name of the curve; None where undefined.
    """
    from sklearn.metrics import precision_recall_curve, roc_curve

    truth, chance = judged.labels == index, judged.probabilities[:, index]
    if not truth.any() or truth.all():
        return dict.fromkeys(CURVES)
    fpr, tpr, _ = roc_curve(truth, chance)
    precision, recall, _ = precision_recall_curve(truth, chance)
    mean, share, sizes = _reliability(truth, chance)
    enough = sizes >= FEWEST
    pairs = ((fpr, tpr), (recall, precision), (mean[enough], share[enough]))
    points = zip(CURVES, pairs, strict=True)
    return {name: [x.tolist(), y.tolist()] if len(x) else None for name, (x, y) in points}


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


def samples_of(
    truth: NDArray[np.bool_], decided: NDArray[np.bool_], chance: Array, weights: Array
) -> dict[str, Array]:
    """The measures of `points_of` for each bootstrap sample.

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
        "sensitivity": _ratio(tp, tp + fn),
        "specificity": _ratio(tn, tn + fp),
        "ppv": _ratio(tp, tp + fp),
        "npv": _ratio(tn, tn + fn),
        "f1": _ratio(2 * tp, 2 * tp + fp + fn),
    }
    samples["auroc"], samples["auprc"] = ranking_samples(truth, chance, weights)
    samples["brier"] = _ratio(weights @ np.square(chance - truth), weights.sum(1))
    apart = np.zeros((BINS, len(truth)))
    apart[_bins(chance), np.arange(len(truth))] = truth - chance
    samples["calibration_error"] = _ratio(np.abs(weights @ apart.T).sum(1), weights.sum(1))
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
        areas.append(_ratio((gained * below).sum(1), positive * negative))
        precision = np.divide(tp, above[:, end], out=np.zeros_like(tp), where=tp > 0)
        precisions.append(_ratio((gained * precision).sum(1), positive))
    return np.concatenate(areas), np.concatenate(precisions)


def _overall(
    judged: Judged,
    kept: Sequence[ClassReport],
    drawn: Mapping[str, list[Array]],
    weights: Array,
    smallest: int,
) -> dict[str, Measure]:
    """Accuracy, and balanced accuracy over the classes that averages include."""
    from sklearn.metrics import accuracy_score

    if not len(judged.labels):
        return {}
    right, units = judged.labels == judged.decisions, _units(judged.labels >= 0, judged.patients)
    accuracy = float(accuracy_score(judged.labels, judged.decisions))
    averages = {
        "accuracy": _measure(accuracy, _ratio(weights @ right, weights.sum(1)), len(right), units)
    }
    if kept:
        averages["balanced_accuracy"] = _average(
            kept, "sensitivity", drawn["sensitivity"], smallest
        )
    return averages


def _average(
    rows: Sequence[ClassReport], key: str, samples: Sequence[Array], units: int
) -> Measure:
    values = [row.measures[key].value for row in rows]
    known = [value for value in values if value is not None]
    mean = float(np.mean(known)) if known and len(known) == len(values) else None
    return _measure(mean, np.mean(np.stack(samples), 0), sum(row.support for row in rows), units)


def _measure(value: float | None, samples: Array, support: int, units: int) -> Measure:
    bounds = None if value is None or not math.isfinite(value) else interval(samples, units)
    if bounds is not None and bounds[0] == bounds[1] and value in (0.0, 1.0):
        # Without an error among the records, samples of them have none either, and an interval of
        # width zero is too good.
        from scipy.stats import binomtest

        limits = binomtest(round(value * units), units).proportion_ci(method="wilson")
        bounds = float(limits.low), float(limits.high)
    low, high = bounds or (None, None)
    return Measure(value, low, high, support)


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
    if len(known) < len(samples) / 2 or units < 2:
        return None
    tail = float(norm.cdf(-math.sqrt(units / (units - 1)) * t.ppf((1 + LEVEL) / 2, units - 1)))
    low, high = np.quantile(known, [tail, 1 - tail])
    return float(low), float(high)


def _units(mask: NDArray[np.bool_], patients: Sequence[str] | None) -> int:
    """Records of a group, or its patients."""
    return (
        int(mask.sum())
        if patients is None
        else len({patients[i] for i in np.flatnonzero(mask).tolist()})
    )


def _reliability(truth: NDArray[np.bool_], chance: Array) -> tuple[Array, Array, NDArray[np.int64]]:
    """Mean probability, share of the class, and number of records of each bin that has any."""
    from sklearn.calibration import calibration_curve

    share, mean = calibration_curve(truth, chance, n_bins=BINS, pos_label=True)
    sizes = np.bincount(_bins(chance), minlength=BINS)
    return mean, share, sizes[sizes > 0]


def _bins(chance: Array) -> NDArray[np.int64]:
    """The bin of each probability, with the same edges as scikit-learn's calibration_curve."""
    edges = np.linspace(0, 1, BINS + 1)
    return np.searchsorted(edges[1:-1], chance).astype(np.int64)


def _ratio(above: Array, below: Array) -> Array:
    ratios: Array = np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0)
    return ratios
