"""Metrics of a classifier on labelled records, as scikit-learn defines them, with 95 % intervals by
samples of whole patients or of records: the one bootstrap of the project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ..errors import SurrogateError
from ..identity import distinct_names
from ..logs import counted

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
DRAWS = 1000
LEVEL = 0.95
# A value that lies outside its interval by less was only rounded.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Metric:
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
            metric compares.

    Returns:
        Both limits; None if most of the samples are undefined.

    Source: Hesterberg 2015, section 4.1.
    """
    from scipy.special import ndtr, stdtrit

    known = samples[np.isfinite(samples)]
    if not len(known) or len(known) < len(samples) / 2 or units < 2:
        return None
    tail = float(ndtr(-math.sqrt(units / (units - 1)) * stdtrit(units - 1, (1 + LEVEL) / 2)))
    low, high = np.quantile(known, [tail, 1 - tail])
    return float(low), float(high)


def wilson(count: int, units: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    Args:
        count: units of which it is true.
        units: all, one or more.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    below = 2 * (units + z**2)
    middle = (2 * count + z**2) / below
    half = z / below * math.sqrt(4 * count * (1 - count / units) + z**2)
    return middle - half if count else 0.0, middle + half if count < units else 1.0


def with_interval(
    value: float | None, samples: Array, support: int, units: int, share: bool = False
) -> Metric:
    """A metric with the interval of its samples.

    Where all samples of a share are 0 or 1, the interval is Wilson's for so many units: one of width
    zero is too good. An interval that does not hold its value, as of a biased metric in
    samples of few records, is left out.

    Args:
        value: None where undefined.
        samples: of the metric, (draws,), NaN where undefined.
        support: number of records that it is about.
        units: number of independent records or patients.
        share: whether it is one, from 0 to 1.
    """
    if value is None or not math.isfinite(value):
        return Metric(None, None, None, support)
    bounds = interval(samples, units)
    if bounds is not None and share and bounds[0] == bounds[1] and value in (0.0, 1.0):
        bounds = wilson(round(value * units), units)
    if bounds is None or not bounds[0] - ROUNDING <= value <= bounds[1] + ROUNDING:
        return Metric(value, None, None, support)
    return Metric(value, min(bounds[0], value), max(bounds[1], value), support)


def averaged(
    metric_values: Sequence[Metric], samples: Sequence[Array], support: int, units: int
) -> Metric:
    """The mean of a metric over classes or labels; undefined where one of them is.

    Where no sample differs from another, the interval follows from those of the classes.

    Args:
        metric_values: one or more.
        samples: of each, (draws,). As scikit-learn would, a sample averages those that it defines.
        support: number of records that the mean is about.
        units: number of independent records or patients of the smallest class. With one, the
            interval is that of two, the widest.

    Source: Zou & Donner 2008, for the second kind of interval.
    """
    values = [each.value for each in metric_values if each.value is not None]
    mean = float(np.mean(values)) if len(values) == len(metric_values) else None
    drawn = np.stack(samples)
    known = np.isfinite(drawn)
    means = ratios(np.where(known, drawn, 0.0).sum(0), known.sum(0).astype(np.float64))
    found = with_interval(mean, means, support, max(2, units))
    if mean is None or found.low is None or found.low < (found.high or 0.0):
        return found
    ends = [(each.low, each.high) for each in metric_values if None not in (each.low, each.high)]
    if len(ends) < len(metric_values):
        return Metric(mean, None, None, support)
    low, high = (
        float(np.linalg.norm(np.subtract(values, each))) / len(values)
        for each in zip(*ends, strict=True)
    )
    return Metric(mean, mean - low, mean + high, support)


def measured(
    points: Callable[[Rows], Mapping[str, float | None]],
    count: int,
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    shares: Collection[str] = (),
) -> dict[str, Metric]:
    """Metrics of all records, with 95 % intervals from samples with replacement.

    Args:
        points: the metrics of the records at these rows, by name; None where undefined.
        count: number of records.
        patients: of each record, (count,), if known: then whole patients are drawn.
        draws: number of samples.
        seed: of the samples.
        shares: metrics that are one, from 0 to 1.

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
    with counted("intervals", draws * bool(count), what="samples") as advance:
        for weights in bootstrap_weights(count, patients, draws, seed) if count else ():
            for name, value in points(np.repeat(all_rows, weights.astype(np.int64))).items():
                drawn[name].append(np.nan if value is None else value)
            advance(1)
    units = units_of(np.ones(count, dtype=bool), patients)
    return {
        name: with_interval(value, np.array(drawn[name]), count, units, name in shares)
        for name, value in values.items()
    }


Bools = NDArray[np.bool_]
FEWEST = 10  # A class with fewer records is marked.
BINS = 10
CURVES = ("roc", "precision_recall", "reliability")
# From this share of the records in one class on, accuracy says little.
UNEQUAL = 0.6
# Numbers that a bootstrap keeps in memory at a time.
PAIRS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class ClassReport:
    """Metrics of one class against all others.

    Attributes:
        name: of the class.
        support: number of its records.
        few: whether it has fewer than ten records.
        metric_values: by name.
    """

    name: str
    support: int
    few: bool
    metric_values: Mapping[str, Metric]


# The coordinates of its points; of a reliability curve also the records of each.
Curve = tuple[list[float], list[float]] | tuple[list[float], list[float], list[int]]


@dataclass(frozen=True)
class ModelQuality:
    """Metrics of a model on test records, as scikit-learn defines them, each with a 95 % interval.

    Attributes:
        classes: names of C classes.
        records: number of records that are judged.
        unknown: number of records of classes that the model does not know; they are not judged.
        units: number of patients that the intervals resample; 0 if single records.
        majority: accuracy of the majority baseline.
        averages: by name, over all classes that have a record.
        per_class: metrics of each class; empty where there are more than a hundred.
        confusion: (C, C), records by true class (rows) and decision (columns); empty likewise.
        left_out: classes without a record, of which nothing can be measured.
        curves: of the first classes, or of the rarer of two: ROC, precision and recall, reliability.
    """

    classes: tuple[str, ...]
    records: int
    unknown: int
    units: int
    majority: float
    averages: Mapping[str, Metric]
    per_class: tuple[ClassReport, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    left_out: tuple[str, ...] = ()
    curves: Mapping[str, Mapping[str, Curve | None]] | None = None

    def facts(self) -> dict[str, Any]:
        """As JSON values, with six digits."""
        found: dict[str, Any] = _rounded(self)
        return found


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


class Drawn(NamedTuple):
    """A metric, and what an average over classes needs of it.

    Attributes:
        metric: with its interval.
        samples: of its bootstrap, (draws,), NaN where undefined.
        units: number of records or patients in the smaller of the groups that it compares.
    """

    metric: Metric
    samples: Array
    units: int


def report(
    judged: Judged, classes: tuple[str, ...], draws: int = DRAWS, seed: int = 0
) -> ModelQuality:
    """Every metric with its interval, without curves.

    Intervals are percentiles over samples of whole patients, or of records.

    Args:
        judged: the records.
        classes: names of C classes.
        draws: number of samples.
        seed: of the samples.
    """
    labels, decisions, patients = judged.labels, judged.decisions, judged.patients
    weights = bootstrap_weights(len(labels), patients, draws, seed)
    found = [
        binary_metrics(
            labels == index, judged.probabilities[:, index], decisions == index, patients, weights
        )
        for index in range(len(classes))
    ]
    sizes = np.bincount(labels, minlength=len(classes)).tolist()
    averages = averages_of(
        [own for own, size in zip(found, sizes, strict=True) if size], len(labels)
    )
    if len(labels):
        right = labels == decisions
        units, samples = units_of(labels >= 0, patients), means_of(right, weights)
        averages["accuracy"] = with_interval(right.mean().item(), samples, len(right), units, True)
        averages["balanced_accuracy"] = averages["macro_sensitivity"]
    rows = tuple(
        ClassReport(name, size, size < FEWEST, {key: each.metric for key, each in own.items()})
        for name, size, own in zip(classes, sizes, found, strict=True)
    )
    matrix = np.zeros((len(classes), len(classes)), dtype=np.int64)
    np.add.at(matrix, (labels, decisions), 1)
    return ModelQuality(
        classes,
        len(labels),
        unknown=0,
        units=0 if patients is None else len(set(patients)),
        majority=max(sizes) / max(1, len(labels)),
        averages=averages,
        per_class=rows,
        confusion=tuple(map(tuple, matrix.tolist())),
        left_out=tuple(row.name for row in rows if not row.support),
    )


def averages_of(
    rows: Sequence[Mapping[str, Drawn]], support: int | None = None
) -> dict[str, Metric]:
    """The mean of each metric over classes or labels, as "macro_" and its name.

    Args:
        rows: the metrics of each.
        support: number of records that a mean is about; None: the sum of those of the rows.
    """
    return {
        f"macro_{key}": averaged(
            [row[key].metric for row in rows],
            [row[key].samples for row in rows],
            sum(row[key].metric.support for row in rows) if support is None else support,
            min(row[key].units for row in rows),
        )
        for key in (rows[0] if rows else ())
    }


def leads_with_auroc(majority: float) -> bool:
    """Whether accuracy misleads, so that a page, a table or a plot shows AUROC before it.

    Args:
        majority: accuracy of the majority baseline.
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


def binary_metrics(
    truth: Bools,
    chance: Array,
    decided: Bools | None,
    patients: Sequence[str] | None,
    weights: Array,
    specificity: float | None = None,
) -> dict[str, Drawn]:
    """Metrics of a class or label against all others, as scikit-learn defines them.

    Args:
        truth: whether a record is of the class, (n,).
        chance: probability of the class, (n,).
        decided: whether the model decides for the class, (n,); None without decisions.
        patients: of each record, if known.
        weights: how often each record is drawn, (draws, n).
        specificity: at which also a sensitivity is stated; None for none.

    Returns:
        By name "auroc", "auprc", "brier", "calibration_error"; with decisions "sensitivity",
        "specificity", "ppv", "npv", "f1"; and "sensitivity_at_specificity". The support is the number
        of the records that a metric is about. A calibration error has no interval: samples of few
        records have larger ones.
    """
    samples, values = (
        _samples(truth, chance, decided, each, specificity)
        for each in (weights, np.ones((1, len(truth))))
    )
    error = calibration_error(truth, chance)
    values["calibration_error"] = np.array([np.nan if error is None else error])
    groups: dict[str, Bools] = {"sensitivity_at_specificity": truth}
    if decided is not None:
        groups |= {"sensitivity": truth, "specificity": ~truth, "ppv": decided, "npv": ~decided}
        groups["f1"] = truth | decided
    positive, negative = (units_of(each, patients) for each in (truth, ~truth))
    smaller, found = {"auroc": min(positive, negative), "auprc": positive}, {}
    for key, sample in samples.items():
        group = groups.get(key, np.ones_like(truth))
        units = smaller.get(key, units_of(group, patients))
        metric = with_interval(values[key].item(), sample, int(group.sum()), units, share=True)
        found[key] = Drawn(metric, sample, units)
    return found


def _samples(
    truth: Bools, chance: Array, decided: Bools | None, weights: Array, specificity: float | None
) -> dict[str, Array]:
    """The metrics of `binary_metrics` in each sample, (draws,), NaN where undefined."""
    samples = {
        "brier": means_of(np.square(chance - truth), weights),
        "calibration_error": np.full(len(weights), np.nan),
    }
    samples["auroc"], samples["auprc"], at_specificity = ranking_samples(
        truth, chance, weights, specificity or 0.0
    )
    if decided is not None:
        masks = (truth & decided, truth & ~decided, ~truth & decided, ~truth & ~decided)
        tp, fn, fp, tn = (weights @ mask for mask in masks)
        samples |= {
            "sensitivity": ratios(tp, tp + fn),
            "specificity": ratios(tn, tn + fp),
            "ppv": ratios(tp, tp + fp),
            "npv": ratios(tn, tn + fn),
            "f1": ratios(2 * tp, 2 * tp + fp + fn),
        }
    if specificity is not None:
        samples["sensitivity_at_specificity"] = at_specificity
    return samples


def calibration_error(truth: Bools, chance: Array) -> float | None:
    """Expected calibration error over ten equal bins of the probability.

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


def curves_of(truth: Bools, chance: Array) -> dict[str, Any]:
    """Points of the ROC, precision-recall and reliability curves of a class.

    Args:
        truth: whether a record is of the class, (n,).
        chance: probability of the class, (n,).

    Returns:
        Coordinates by name of the curve, and of the reliability also the records of each point; None
        where undefined.
    """
    if not truth.any() or truth.all():
        return dict.fromkeys(CURVES)
    order = np.argsort(-chance, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(chance[order])), len(order) - 1)
    tp = np.cumsum(truth[order])[ends]
    fp = ends + 1 - tp
    recall, precision = np.append(tp[::-1] / tp[-1], 0.0), np.append((tp / (ends + 1))[::-1], 1.0)
    # Of points on one line, the ends.
    corner = np.ones(len(ends), dtype=bool)
    corner[1:-1] = (np.diff(fp, 2) != 0) | (np.diff(tp, 2) != 0)
    fpr, tpr = (np.append(0.0, each[corner] / each[-1]) for each in (fp, tp))
    points = ((fpr, tpr), (recall, precision), reliability(truth, chance))
    return {
        name: [axis.tolist() for axis in axes] for name, axes in zip(CURVES, points, strict=True)
    }


def ranking_samples(
    truth: Bools, chance: Array, weights: Array, specificity: float = 0.0
) -> tuple[Array, Array, Array]:
    """Weighted area under the ROC curve, average precision, and the largest sensitivity at a
    specificity, of bootstrap samples.

    Args:
        truth: whether a record is of the class, (n,).
        chance: probability of the class, (n,).
        weights: how often each record is drawn, (draws, n).
        specificity: of the sensitivity.

    Returns:
        Each for each row of weights, (draws,).
    """
    if not truth.any():
        return (np.full(len(weights), np.nan),) * 3
    order = np.argsort(-chance, kind="stable")
    ordered, right = chance[order], truth[order]
    # Records of one probability are a group, of which those with a record of the class count.
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    group = np.searchsorted(ends, np.flatnonzero(right))
    last = np.flatnonzero(np.append(np.diff(group), 1))
    end = ends[group[last]] + 1
    begin = np.append(0, ends + 1)[group[last]]
    step = max(1, PAIRS_AT_ONCE // max(1, len(truth)))
    found = []
    for start in range(0, len(weights), step):
        part = weights[start : start + step, order]
        above = np.cumsum(part, 1)
        above = np.concatenate([np.zeros((len(part), 1)), above], 1)
        tp = np.cumsum(part[:, right], 1)[:, last]
        gained = np.diff(tp, axis=1, prepend=0)
        positive, negative = tp[:, -1], above[:, -1] - tp[:, -1]
        # Of the other records, those below the group, and half of those in it.
        tied = above[:, end] - above[:, begin] - gained
        false = above[:, end] - tp
        below = negative[:, None] - false + tied / 2
        precision = np.divide(tp, above[:, end], out=np.zeros_like(tp), where=tp > 0)
        allowed = false <= (1 - specificity + ROUNDING) * negative[:, None]
        reached = np.where(allowed, tp, 0).max(1)
        both = positive * negative
        found.append(
            (
                ratios((gained * below).sum(1), both),
                ratios((gained * precision).sum(1), positive),
                ratios(reached * negative, both),
            )
        )
    areas, precisions, sensitivities = map(np.concatenate, zip(*found, strict=True))
    return areas, precisions, sensitivities


def reliability(truth: Bools, chance: Array) -> tuple[Array, Array, NDArray[np.int64]]:
    """Mean probability, share of the class, and number of records of each bin that has any.

    Args:
        truth: whether a record is of the class, (n,), with n of one or more.
        chance: probability of the class, (n,).

    Returns:
        (b,) of the b bins, by rising probability.
    """
    bins = bins_of(chance)
    sizes = np.bincount(bins, minlength=BINS)
    kept = sizes > 0
    mean, share = (
        np.bincount(bins, weights=each, minlength=BINS)[kept] / sizes[kept]
        for each in (chance, truth)
    )
    return mean, share, sizes[kept]


def bins_of(chance: Array) -> NDArray[np.int64]:
    """The bin of each probability, with the same edges as scikit-learn's calibration_curve.

    Args:
        chance: (n,).
    """
    edges = np.linspace(0, 1, BINS + 1)
    return np.searchsorted(edges[1:-1], chance).astype(np.int64)


# Name of the report among the values of a message, and most characters of its text.
QUALITY, LONGEST = "quality", 2**22
# More classes have averages only: a matrix of them cannot be read.
MOST_CLASSES, MOST_CURVES, POINTS = 100, 10, 100
# Numbers that a bootstrap of all classes computes at most, and samples at least.
ROOM, FEWEST_DRAWS = 20_000_000, 200
DIGITS = 6


def quality_of(
    scores: torch.Tensor,
    labels: torch.Tensor,
    classes: tuple[str, ...],
    patients: Sequence[str] | None = None,
) -> ModelQuality | None:
    """Judge scores of test records.

    Args:
        scores: logits (n, C).
        labels: indices of the model's classes, (n,); negative for a class that it does not know.
        classes: names of C classes.
        patients: of each record, (n,); None if unknown.

    Returns:
        The metrics; None without a record of a known class, or with a score that is not finite.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> found = quality_of(scores, torch.tensor([0, 1, 1]), ("well", "ill"))
        >>> found.confusion, round(found.averages["accuracy"].value, 2), round(found.majority, 2)
        (((1, 0), (1, 1)), 0.67, 0.67)
    """
    known = labels >= 0
    if not known.any() or not scores[known].isfinite().all():
        return None
    chances: NDArray[np.float64] = scores[known].double().softmax(1).cpu().numpy()
    rows = known.nonzero().flatten().tolist()
    judged = Judged(
        labels[known].cpu().numpy(),
        chances,
        chances.argmax(1),
        None if patients is None else [patients[row] for row in rows],
    )
    count, few = len(rows), len(classes) <= MOST_CLASSES
    draws = min(DRAWS, max(FEWEST_DRAWS, ROOM // (count * len(classes))))
    found = report(judged, classes, draws)
    drawn = drawn_classes([row.support for row in found.per_class])[:MOST_CURVES]
    curves = {classes[at]: _thinned(curves_of(judged.labels == at, chances[:, at])) for at in drawn}
    found = replace(found, unknown=int((~known).sum()), curves=curves)
    return found if few else replace(found, per_class=(), confusion=())


def packed_quality(found: ModelQuality) -> str:
    """A report as text for a message."""
    return json.dumps(found.facts(), separators=(",", ":"))


def unpacked_quality(text: str) -> ModelQuality:
    """The report in a message or in metrics.json.

    Args:
        text: of `packed_quality`, or JSON of `facts`.

    Raises:
        SurrogateError: for another text.
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"{len(text)} characters, {LONGEST} at most")
        found = TypeAdapter(ModelQuality).validate_python(json.loads(text, parse_constant=_refused))
        count = len(distinct_names(found.classes, "class"))
        if found.confusion and {len(found.confusion), *map(len, found.confusion)} != {count}:
            raise ValueError("a confusion matrix of other classes")
        if any(curves.keys() - set(CURVES) for curves in (found.curves or {}).values()):
            raise ValueError("an unknown curve")
    except (ValueError, RecursionError) as error:
        raise SurrogateError(f"measures that cannot be read ({str(error)[:100]})") from None
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _thinned(curves: Mapping[str, Any]) -> dict[str, Curve | None]:
    """Curves with at most a hundred points each, the ends among them."""
    thin: dict[str, Curve | None] = dict.fromkeys(curves)
    for name, curve in curves.items():
        if curve is not None:
            places = np.unique(np.linspace(0, len(curve[0]) - 1, POINTS).round().astype(int))
            x, y, *sizes = ([axis[place] for place in places] for axis in curve)
            thin[name] = (x, y, sizes[0]) if sizes else (x, y)
    return thin


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if is_dataclass(value):
        # `asdict` would copy each number first, which takes longer than the metrics.
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
