"""Results of evaluations and surveys from the counts of all sites together.

Rates and AUROC from noisy counts have 95 % intervals that include the noise, the sampling of records and
the bins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.counting import scored_classes
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import CountingSettings, Settings
from fedsurrogate.common.targets.counted import (
    PARTS,
    STEPS,
    THIRDS,
    CountedLabels,
    CountedNumbers,
    CountedTarget,
    CountedTimes,
    counted,
)
from fedsurrogate.common.targets.metrics import QUARTILES
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.surrogate_proto import Counts, check_tables

from ..base.collection import Recorder
from ..pooling.site_weights import Total
from ..targets.time import Cells, kaplan_meier, log_rank

Json = dict[str, Any]


@dataclass(frozen=True)
class PooledCounts:
    """Counts of all sites together.

    Attributes:
        tables: of counts by name, float64.
        variances: of the noise in each cell of a table, by name.
    """

    tables: Mapping[str, Tensor]
    variances: Mapping[str, float]


def pooled(counts: Sequence[Counts]) -> PooledCounts:
    """The sum over sites. The noise of different sites is independent, so its variances add up.

    Args:
        counts: of the sites, with the same tables.
    """
    names = counts[0].tables
    return PooledCounts(
        {
            name: torch.stack([each.tables[name] for each in counts]).double().sum(0)
            for name in names
        },
        {name: sum(each.variance(name) for each in counts) for name in names},
    )


def summed_result(summed: Total, config: Run) -> Json:
    """The result from secure aggregation.

    Args:
        summed: tables of counts over all sites.
        config: of the run.

    Raises:
        RunError: when no records and honest noise can give this sum.
    """
    tables = PooledCounts(
        summed.tensors, {name: summed.sigmas.get(name, 0.0) ** 2 for name in summed.tensors}
    )
    try:
        check_tables(tables.tables, tables.variances)
    except SurrogateError as error:
        raise RunError(
            f"{error}, so some site has added false numbers; nothing shows which one: run again "
            "with other sites, or without secure-aggregation"
        ) from None
    own = config.settings
    result = result_of(tables, own.counting, own.classes, config.target)
    return result | {"secure_aggregation": True}


def keep_result(recorder: Recorder, settings: Settings, sites: int, result: Json) -> None:
    """Write a result into the run folder.

    Args:
        recorder: of the run folder.
        settings: of the run.
        sites: number of sites that were counted.
        result: as from `result_of`.
    """
    whole: Json = {"schema": 1, "kind": settings.counting.kind, "sites": sites} | result
    if settings.epsilon:
        whole["privacy"] = {"epsilon": settings.epsilon, "delta": settings.delta}
    recorder.keep(f"{settings.counting.kind}.json", (json.dumps(whole, indent=2) + "\n").encode())


def result_of(
    counts: PooledCounts,
    counting: CountingSettings,
    classes: Sequence[str],
    target: Target | None = None,
) -> Json:
    """The result of a run that counts, as far as it follows from the counts of all sites together.

    Args:
        counts: of all sites together.
        counting: settings, whose kind says what was counted.
        classes: of the run.
        target: of the run; None for classes.
    """
    if target is not None:
        return _result_of_target(counts, counting, target)
    if counting.kind == "survey":
        return _survey_result(counts, classes)
    return evaluation_result(counts, classes) | {"model": counting.digest}


def _result_of_target(counts: PooledCounts, counting: CountingSettings, target: Target) -> Json:
    how, (name, table) = counted(target, counting), _of_records(counts.tables)
    facts: Json = {"task": target.name, "noise": _deviations(counts)}
    if counting.kind == "survey":
        return survey_of_target(how, table, counts.variances[name]) | facts
    found = evaluation_of_target(how, table, counts.variances[name])
    return found | facts | {"model": counting.digest}


def _of_records(tables: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """The one table of a target, besides that of images in a survey."""
    ((name, table),) = ((name, each) for name, each in tables.items() if name != "images")
    return name, table


def records_counted(
    tables: Mapping[str, Tensor], counting: CountingSettings, target: Target
) -> int:
    """The number of records of one site that a run with a target counts, noisy under privacy: the
    most of any of its labels or numbers.

    Args:
        tables: of the site.
        counting: settings of what was counted.
        target: of the run.
    """
    how, (name, table) = counted(target, counting), _of_records(tables)
    if name == "records":
        parts = torch.split(table, [len(each) for each in how.questions.values()])
        return max(0, *(int(part.sum()) for part in parts))
    if name == "errors":
        return max(0, round(float(table[:, 0].max()) / STEPS))
    return max(0, int(table.flatten(1).sum(1).max()))


def survey_of_sites(counts: Sequence[Counts]) -> Json:
    """Each site's counts of a survey, and the standard deviation of the noise in them.

    Args:
        counts: of the sites.
    """
    return {
        "per_site": {each.header.site: each.tables["records"].tolist() for each in counts},
        "noise": {each.header.site: each.variance("records") ** 0.5 for each in counts},
    }


def evaluation_result(counts: PooledCounts, classes: Sequence[str]) -> Json:
    """The result of an evaluation.

    Args:
        counts: with the tables "decisions" (C, C), true class by predicted class, and "scores".
        classes: of the run, C.

    Returns:
        Records, accuracy, balanced accuracy over the classes that have a record (undefined where noise
        hides one), those without, and by class records, sensitivity, specificity and AUROC, each with its
        interval. All are of records of the run's classes: sites leave out others.
    """
    decisions, noise = counts.tables["decisions"], counts.variances["decisions"]
    right = torch.eye(len(classes), dtype=torch.bool)
    rates = {
        name: rate(decisions[at][right[at]], decisions[at][~right[at]], noise)
        for at, name in enumerate(classes)
    }
    # Without noise, a class that nobody has counted is known to have no record.
    absent = [name for name, each in rates.items() if each.value is None and not noise]
    balanced = mean_of([each for name, each in rates.items() if name not in absent])
    return {
        "records": asdict(total(decisions, noise)),
        "records_of": "the model's classes",
        "accuracy": asdict(rate(decisions[right], decisions[~right], noise)),
        "balanced_accuracy": asdict(balanced),
        "without_records": absent,
        "classes": {
            name: _of_class(counts, index, len(classes)) for index, name in enumerate(classes)
        },
        "decisions": _whole(decisions),
        "noise": _deviations(counts),
    }


def _of_class(counts: PooledCounts, index: int, classes: int) -> Json:
    decisions, noise = counts.tables["decisions"], counts.variances["decisions"]
    own = torch.arange(classes) == index
    others = decisions[~own]
    area = _area(counts, index, classes)
    return {
        "records": asdict(total(decisions[index], noise)),
        "sensitivity": asdict(rate(decisions[index][own], decisions[index][~own], noise)),
        "specificity": asdict(rate(others[:, ~own].flatten(), others[:, own].flatten(), noise)),
        "auroc": asdict(area),
    }


def _area(counts: PooledCounts, index: int, classes: int) -> Interval:
    scores, noise = counts.tables["scores"], counts.variances["scores"]
    scored = scored_classes(classes)
    # Of two classes only the last is scored. The other has the same AUROC, because the two
    # probabilities sum to one.
    return auroc(scores[max(0, index - (classes - scored))], noise)


def _survey_result(counts: PooledCounts, classes: Sequence[str]) -> Json:
    records, noise = counts.tables["records"], counts.variances["records"]
    return {
        "records": asdict(total(records, noise)),
        "classes": {
            name: asdict(total(records[index], noise)) for index, name in enumerate(classes)
        },
        "noise": _deviations(counts),
    }


def _deviations(counts: PooledCounts) -> dict[str, float]:
    return {name: variance**0.5 for name, variance in counts.variances.items()}


def _whole(table: Tensor) -> Any:
    return table.round().long().tolist()


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
    """The sum of noisy cells, never below zero; its interval is for the noise alone.

    Args:
        cells: counts, of any shape.
        variance: of the noise in each cell.

    Example:
        >>> total(torch.tensor([20.0, 30.0]), variance=0.0)
        Interval(value=50.0, low=50.0, high=50.0)
    """
    return _around(float(cells.sum()), math.sqrt(variance * cells.numel()), 0.0)


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
    return _fieller(inside, records, (variance, 0.0, variance))


def _fieller(inside: float, records: float, noise: tuple[float, float, float]) -> Interval:
    """Every share s for which inside - s * records is within 95 % of zero.

    Args:
        inside: number of records whose share is asked for.
        records: number of all.
        noise: its variance in the difference, as the coefficients of 1, s and s^2; the last is that
            of the noise in `records`.
    """
    if records < max(1.0, VISIBLE * math.sqrt(noise[2])):
        return UNDEFINED
    # Noise can put the share outside 0 to 1; the nearest possible share then gives an interval that
    # has a width.
    inside = min(max(inside, 0.0), records)
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


# Of a number.
METRIC_VALUES = ("mae", "rmse", "bias", "r2", "coverage")
MetricValues = dict[str, Interval]


def survey_of_target(how: CountedTarget, counts: Tensor, variance: float) -> Json:
    """The result of a survey.

    Args:
        how: the target is counted.
        counts: of the cells of all questions.
        variance: of the noise in each cell.

    Returns:
        Records, cells by name, and by question what follows from its cells, each with its interval.
    """
    sizes = [len(each) for each in how.questions.values()]
    parts = torch.split(counts.double(), sizes)
    # Each question counts all records, unless exact counts of it were left out.
    there = [part for part in parts if bool(part.any())] or [parts[0]]
    records = total(torch.cat(list(there)), variance)
    summary = SURVEYED[type(how)]
    return {
        "records": asdict(_scaled(records, 1 / len(there))),
        "classes": {
            name: asdict(total(cell, variance)) for name, cell in zip(how.rows, counts, strict=True)
        },
        "questions": {
            name: _as_json(summary(how, at, part, variance))
            for at, (name, part) in enumerate(zip(how.questions, parts, strict=True))
        },
    }


def evaluation_of_target(how: CountedTarget, table: Tensor, variance: float) -> Json:
    """The result of an evaluation.

    Args:
        how: the target is counted.
        table: of all sites together, in the shape of `CountedTarget.table`.
        variance: of the noise in each cell.

    Returns:
        By output its metrics, each with its interval; of times also curves.
    """
    return EVALUATED[type(how)](how, table.double(), variance)


def _labels_surveyed(how: CountedTarget, at: int, part: Tensor, variance: float) -> MetricValues:
    present, absent, _ = part
    return {
        "annotated": total(part[:2], variance),
        "present": total(present, variance),
        "prevalence": rate(present[None], absent[None], variance),
    }


def _number_surveyed(how: CountedTarget, at: int, part: Tensor, variance: float) -> MetricValues:
    """Quartiles by linear interpolation within a bin. Their intervals are those of the share below,
    which include the noise.
    """
    assert isinstance(how, CountedNumbers)
    low, high = how.target.ranges[at]
    found = {}
    for name, share in QUARTILES.items():
        if float(part.sum()) < max(1.0, VISIBLE * math.sqrt(variance * len(part))):
            found[name] = UNDEFINED
            continue
        clean = part.clamp_min(0)
        room = Z * math.sqrt(share * (1 - share) * float(part.sum()) + variance * len(part))
        places = [share, *(share + way * room / float(part.sum()) for way in (-1, 1))]
        value, least, most = (low + (high - low) * _quantile(clean, each) for each in places)
        found[name] = Interval(value, least, most)
    return found


def _quantile(counts: Tensor, share: float) -> float:
    """Where a share of the records lies, as a share of the range."""
    below = torch.cat([torch.zeros(1, dtype=torch.float64), counts.cumsum(0)])
    wanted = min(max(share, 0.0), 1.0) * float(below[-1])
    at = min(int(torch.searchsorted(below, wanted, right=True)) - 1, len(counts) - 1)
    return (at + (wanted - float(below[at])) / max(float(counts[at]), 1e-9)) / len(counts)


def _times_surveyed(how: CountedTarget, at: int, part: Tensor, variance: float) -> MetricValues:
    cells = Cells.of(part, variance**0.5)
    return {
        "events": total(cells.events, variance),
        "last seen": total(cells.censored, variance),
        "outlived": total(part[-1], variance),
        "survival": _survival(cells),
    }


def _survival(cells: Cells) -> Interval:
    """At the horizon; undefined if the curve ends before."""
    curve = kaplan_meier(cells)
    if len(curve.survival) < len(cells.events):
        return UNDEFINED
    ends = [float(each[-1]) for each in (curve.survival, curve.low, curve.high)]
    return Interval(*(None if math.isnan(each) else each for each in ends))


def _labels_evaluated(how: CountedTarget, table: Tensor, variance: float) -> Json:
    """Decisions are at a probability of one half, where two bins meet."""
    assert isinstance(how, CountedLabels)
    found, middle = {}, table.shape[2] // 2
    for name, (absent, present) in zip(how.target.columns, table, strict=True):
        metric_values = {
            "records": total(table[how.target.columns.index(name)], variance),
            "present": total(present, variance),
            "sensitivity": rate(present[middle:], present[:middle], variance),
            "specificity": rate(absent[:middle], absent[middle:], variance),
            "auroc": auroc(torch.stack([absent, present]), variance),
        }
        found[name] = _as_json(metric_values)
    return {"outputs": found}


def _numbers_evaluated(how: CountedTarget, table: Tensor, variance: float) -> Json:
    """Means of errors within the public range. Intervals are by the delta method: they include the
    noise, and the sampling of records; that of squared errors is taken as for normal errors.
    """
    assert isinstance(how, CountedNumbers)
    found = {}
    for at, (name, (low, high)) in enumerate(
        zip(how.target.columns, how.target.ranges, strict=True)
    ):
        sums = dict(zip(PARTS, (table[at] / STEPS).tolist(), strict=True))
        metric_values = _of_number(sums, variance / STEPS**2, high - low, how.largest)
        found[name] = _as_json(metric_values)
    return {"outputs": found}


def _of_number(
    sums: Mapping[str, float], variance: float, width: float, largest: float
) -> MetricValues:
    """Metrics of one number.

    Args:
        sums: by name of `PARTS`.
        variance: of the noise in each.
        width: of the range.
        largest: error, as a share of the range.
    """
    records = sums["records"]
    counted = total(torch.tensor(records, dtype=torch.float64), variance)
    if records < max(1.0, VISIBLE * math.sqrt(variance)):
        return {"records": counted} | dict.fromkeys(METRIC_VALUES, UNDEFINED)
    mean = {name: value / records for name, value in sums.items()}

    def deviation(share: float, sampling: float) -> float:
        """Of a mean, whose derivative in the number of records is minus the mean over records."""
        noise = variance * (1 + share**2) / records**2
        return math.sqrt(noise + max(sampling, 0.0) / records)

    size, square = (min(max(mean[name], 0.0), 1.0) for name in ("absolute", "squared"))
    of_square, signed = deviation(square, 2 * square**2), 2 * mean["error"] - 1
    of_signed = 2 * deviation(mean["error"], (square - signed**2) / 4)
    # The records of a range are spread by this share of it, squared.
    away = mean["value"] - 0.5
    spread = mean["energy"] / 4 - away**2
    of_spread = math.sqrt(
        deviation(mean["energy"], 0.0) ** 2 / 16 + (2 * away * deviation(mean["value"], 0.0)) ** 2
    )
    unit = width * largest
    return {
        "records": counted,
        "mae": _around(unit * size, unit * deviation(size, square - size**2), 0.0),
        "rmse": Interval(
            *(unit * math.sqrt(max(0.0, square + way * Z * of_square)) for way in (0, -1, 1))
        ),
        "bias": _around(unit * signed, unit * of_signed),
        "r2": _explained(
            (largest**2 * square, largest**2 * of_square), (spread, of_spread), records
        ),
        "coverage": share_of(sums["within"], records, variance)
        if sums["within"] > VISIBLE * math.sqrt(variance)
        else UNDEFINED,
    }


def _explained(
    square: tuple[float, float], spread: tuple[float, float], records: float
) -> Interval:
    """R^2, from the mean squared error and the variance of the values, each with its deviation."""
    if spread[0] <= max(VISIBLE * spread[1], 1e-12):
        return UNDEFINED
    unexplained = square[0] / spread[0]
    variance = (square[1] / spread[0]) ** 2 + (unexplained * spread[1] / spread[0]) ** 2
    variance += 2 * unexplained**2 / records
    value, room = 1 - unexplained, Z * math.sqrt(variance)
    return Interval(value, value - room, min(1.0, value + room))


def _times_evaluated(how: CountedTarget, table: Tensor, variance: float) -> Json:
    assert isinstance(how, CountedTimes)
    outputs: Json = {}
    curves: Json = {}
    groups = [Cells.of(part, variance**0.5) for part in table[0]]
    for name, cells in zip(THIRDS, groups, strict=True):
        metric_values = {
            "records": total(cells.counts, variance),
            "events": total(cells.events, variance),
            "survival": _survival(cells),
        }
        outputs[name] = _as_json(metric_values)
        curve = kaplan_meier(cells)
        parts = zip(
            ("survival", "low", "high", "at_risk"),
            (curve.survival, curve.low, curve.high, curve.at_risk),
            strict=True,
        )
        curves[name] = {
            key: [None if math.isnan(each) else each for each in column.tolist()]
            for key, column in parts
        }
    found: Json = {"outputs": outputs, "curves": curves, "edges": list(how.target.edges)}
    found["unit"] = how.target.unit
    if not variance and all(float(each.counts.sum()) >= 1 for each in groups):
        test = log_rank(groups)
        if math.isfinite(test["chance"]):
            found["log_rank"] = test
    return found


def _around(value: float, deviation: float, least: float = -math.inf) -> Interval:
    room = Z * deviation
    return Interval(*(max(least, value + way * room) for way in (0, -1, 1)))


def _scaled(interval: Interval, factor: float) -> Interval:
    """An interval times a positive factor."""
    ends = (interval.value, interval.low, interval.high)
    return Interval(*(None if each is None else each * factor for each in ends))


def _as_json(metric_values: MetricValues) -> Json:
    return {name: asdict(each) for name, each in metric_values.items()}


SURVEYED: dict[type[CountedTarget], Callable[[CountedTarget, int, Tensor, float], MetricValues]] = {
    CountedLabels: _labels_surveyed,
    CountedNumbers: _number_surveyed,
    CountedTimes: _times_surveyed,
}
EVALUATED: dict[type[CountedTarget], Callable[[CountedTarget, Tensor, float], Json]] = {
    CountedLabels: _labels_evaluated,
    CountedNumbers: _numbers_evaluated,
    CountedTimes: _times_evaluated,
}
