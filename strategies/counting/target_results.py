"""Results of surveys and evaluations of another target than classes, from the counts of all sites
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.targets.counted import (
    PARTS,
    STEPS,
    THIRDS,
    CountedLabels,
    CountedNumbers,
    CountedTarget,
    CountedTimes,
)
from fedsurrogate.strategies.counting.intervals import (
    UNDEFINED,
    VISIBLE,
    Interval,
    Z,
    auroc,
    rate,
    share_of,
    total,
)
from fedsurrogate.strategies.targets.survival import Cells, kaplan_meier, log_rank

# Of a number.
MEASURES = ("mae", "rmse", "bias", "r2", "coverage")
Json = dict[str, Any]
Measures = dict[str, Interval]


def survey_of_target(how: CountedTarget, counts: Tensor, variance: float) -> Json:
    """The result of a survey.

    Args:
        how: the target is counted.
        counts: of the cells of all questions.
        variance: of the noise in each cell.

    Returns:
        Records, cells by name, and by question what follows from its cells, each with its interval.
    """
    sizes = [len(each.cells) for each in how.questions]
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
            each.name: _as_json(summary(how, at, part, variance))
            for at, (each, part) in enumerate(zip(how.questions, parts, strict=True))
        },
    }


def evaluation_of_target(how: CountedTarget, table: Tensor, variance: float) -> Json:
    """The result of an evaluation.

    Args:
        how: the target is counted.
        table: of all sites together, in the shape of `CountedTarget.table`.
        variance: of the noise in each cell.

    Returns:
        By output its measures, each with its interval; of times also curves.
    """
    return EVALUATED[type(how)](how, table.double(), variance)


def _labels_surveyed(how: CountedTarget, at: int, part: Tensor, variance: float) -> Measures:
    present, absent, _ = part
    return {
        "annotated": total(part[:2], variance),
        "present": total(present, variance),
        "prevalence": rate(present[None], absent[None], variance),
    }


def _number_surveyed(how: CountedTarget, at: int, part: Tensor, variance: float) -> Measures:
    """Quartiles by linear interpolation within a bin. Their intervals are those of the share below,
    which include the noise.
    """
    assert isinstance(how, CountedNumbers)
    low, high = how.target.ranges[at]
    found = {}
    for name, share in (("lower quartile", 0.25), ("median", 0.5), ("upper quartile", 0.75)):
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


def _times_surveyed(how: CountedTarget, at: int, part: Tensor, variance: float) -> Measures:
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
        measures = {
            "records": total(table[how.target.columns.index(name)], variance),
            "present": total(present, variance),
            "sensitivity": rate(present[middle:], present[:middle], variance),
            "specificity": rate(absent[:middle], absent[middle:], variance),
            "auroc": auroc(torch.stack([absent, present]), variance),
        }
        found[name] = _as_json(measures)
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
        measures = _of_number(sums, variance / STEPS**2, high - low, how.largest)
        found[name] = _as_json(measures)
    return {"outputs": found}


def _of_number(
    sums: Mapping[str, float], variance: float, width: float, largest: float
) -> Measures:
    """Measures of one number.

    Args:
        sums: by name of `PARTS`.
        variance: of the noise in each.
        width: of the range.
        largest: error, as a share of the range.
    """
    records = sums["records"]
    counted = total(torch.tensor(records, dtype=torch.float64), variance)
    if records < max(1.0, VISIBLE * math.sqrt(variance)):
        return {"records": counted} | dict.fromkeys(MEASURES, UNDEFINED)
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
        measures = {
            "records": total(cells.counts, variance),
            "events": total(cells.events, variance),
            "survival": _survival(cells),
        }
        outputs[name] = _as_json(measures)
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
        if math.isfinite(test.chance):
            found["log_rank"] = asdict(test)
    return found


def _around(value: float, deviation: float, least: float = -math.inf) -> Interval:
    room = Z * deviation
    return Interval(value, max(least, value - room), value + room)


def _scaled(interval: Interval, factor: float) -> Interval:
    """An interval times a positive factor."""
    ends = (interval.value, interval.low, interval.high)
    return Interval(*(None if each is None else each * factor for each in ends))


def _as_json(measures: Measures) -> Json:
    return {name: asdict(each) for name, each in measures.items()}


SURVEYED: dict[type[CountedTarget], Callable[[CountedTarget, int, Tensor, float], Measures]] = {
    CountedLabels: _labels_surveyed,
    CountedNumbers: _number_surveyed,
    CountedTimes: _times_surveyed,
}
EVALUATED: dict[type[CountedTarget], Callable[[CountedTarget, Tensor, float], Json]] = {
    CountedLabels: _labels_evaluated,
    CountedNumbers: _numbers_evaluated,
    CountedTimes: _times_evaluated,
}
