"""The tables of a report as CSV, in the page and as files; the order of its pictures, its warnings,
and several runs next to each other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsurrogate.common.data_report import DataReport, reports_from
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import csv_text, percent
from fedsurrogate.common.identity import likely_one_warnings
from fedsurrogate.common.privacy.accounting import budget_warnings
from fedsurrogate.common.settings.base import flatten

from ..lifecycle.before_start import OF_RECORDS
from ..runs.reader import RunFolder
from ..runs.scores import UNMEASURED, answers_at_chance, at_chance, largest_share, may_be_chance
from ..runs.state import Json, as_list, as_number, as_table, at
from .plots.rows import ROUND, AccuracyStep, steps
from .quality_view import recorded_quality

Table = list[Sequence[object]]
ROUND_KEYS = ("round", "accuracy", "bytes_up", "used", "seconds", "epsilon", "radius", "moved")
HOP_KEYS = ("site", "accuracy", "bytes", "seconds")
PRIVACY_KEYS = ("name", "unit", "epsilon", "tight", "delta", "mechanism", "multiplier")
PRIVACY_COLUMNS = (
    *("site", "protects one", "epsilon", "epsilon of this noise", "delta", "mechanism"),
    "noise multiplier",
)
# With a byte-order mark, spreadsheets read UTF-8.
ENCODING, ENDING = "utf-8-sig", "\r\n"


def tables_of(
    run: RunFolder, privacy: Json, settings: Sequence[tuple[str, str, str]]
) -> dict[str, Table]:
    """Every table of a report. Accuracies are shares in [0, 1], sizes are in bytes, times in
    seconds.

    Args:
        run: the content of the run folder.
        privacy: as from `privacy_view`.
        settings: key, value and default of each setting.

    Returns:
        The tables by name, the first row of each its columns; tables without rows are left out.
        Missing numbers are empty.
    """
    sources = run.sources
    sites = ["site", "status", "reason", "records", "bytes", "seconds", "accuracy"]
    tables: dict[str, Table] = {
        "sites": [[*sites, *(f"accuracy {source}" for source in sources)]],
        "classes": [("site", *run.classes)],
        "metric_values": _metric_values(run),
        "quality": _quality(run),
        "rounds": _steps(run),
        "privacy": [
            PRIVACY_COLUMNS,
            *([row[key] for key in PRIVACY_KEYS] for row in privacy["rows"]),
        ],
        "settings": [("setting", "value", "default"), *settings],
    }
    for site in run.sites:
        reasons, own = "; ".join(why for _, why in site.troubles), run.downstream(site.name)
        measured = (site.records, site.bytes, site.seconds, site.accuracy)
        accuracies = (own.get(source) for source in sources)
        tables["sites"].append((site.name, site.status, reasons, *measured, *accuracies))
        if site.counts:
            counts = (site.counts.get(name, 0.0) for name in run.classes)
            tables["classes"].append((site.name, *counts))
    return {name: rows for name, rows in tables.items() if len(rows) > 1}


def _metric_values(run: RunFolder) -> Table:
    """How well a model of another target than classes answers, at all sites and at each."""
    rows: Table = [("site", "answer", "metric", "value")]
    return rows + [
        (place, output, name, as_number(value))
        for place, output, own in run.metric_values
        for name, value in own.items()
    ]


def _quality(run: RunFolder) -> Table:
    """Every metric of a model of classes, with its interval."""
    rows: Table = [("class", "metric", "value", "low", "high", "records")]
    if (found := recorded_quality(run)) is None:
        return rows
    named = [("", found.averages), *((each.name, each.metric_values) for each in found.per_class)]
    return rows + [
        (name, key, each.value, each.low, each.high, each.support)
        for name, metric_values in named
        for key, each in metric_values.items()
    ]


def _steps(run: RunFolder) -> Table:
    """A row for each round, or each site of a chain."""
    hops = as_list(run.metrics.get("hops"))
    entries = [as_table(entry) for entry in hops or as_list(run.metrics.get("rounds"))]
    keys = [
        key
        for key in (HOP_KEYS if hops else ROUND_KEYS)
        if any(entry.get(key) is not None for entry in entries)
    ]
    return [
        keys,
        *(
            [entry.get(key) if key == "site" else as_number(entry.get(key)) for key in keys]
            for entry in entries
        ),
    ]


def csv_link(rows: Table) -> str:
    """A table as an address that contains it."""
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(csv_text(rows, ENDING).encode(ENCODING)).decode()}"


def write_tables(tables: dict[str, Table], folder: Path) -> list[Path]:
    """Write every table to NAME.csv in `folder`.

    Args:
        tables: by name.
        folder: for the files; it is created.

    Returns:
        The files.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.csv" for name in tables]
    for file, rows in zip(files, tables.values(), strict=True):
        file.write_text(csv_text(rows, ENDING), encoding=ENCODING, newline="")
    return files


TITLES = {
    "curves": "Compared with other runs",
    "outcomes": "Accuracy against communication cost",
    "progress": "Step by step",
    "accuracy": "Accuracy at each site",
    "counts": "Which classes each site has",
    "evaluation": "How good the model is at the sites",
    "survey": "What records the sites have",
    "effects": "What each site changes",
    "radii": "How far the landscapes were trusted",
    "sheets": "What the sites sent",
    "features": "Real against synthetic features",
}
# These have a row of their own, before or after the others.
FIRST, LAST = ("curves",), ("sheets", "features")


def layout(pictures: Collection[str]) -> list[tuple[str, str, str]]:
    """Key, title and place of every picture, in order.

    Args:
        pictures: keys of `TITLES`.

    Returns:
        For each picture its key, its title and its place: "" for half a row, "wide" for a row of
        several plots, or "wide alone" for a plot next to its caption.

    Example:
        >>> layout(["survey", "effects", "outcomes"])[1:]
        [('survey', 'What records the sites have', ''), ('effects', 'What each site changes', '')]
    """
    keys = [key for key in TITLES if key in pictures]
    halves = [key for key in keys if key not in FIRST + LAST]
    # The first of an odd number has its row alone.
    alone = halves[: len(halves) % 2]
    places = {
        key: "wide alone" if key in alone else "" if key in halves else "wide" for key in keys
    }
    return [(key, TITLES[key], place) for key, place in places.items()]


NAMED = 12


def warnings_of(run: RunFolder, evaluated: bool = False) -> list[str]:
    """One sentence for each warning, from what the run has recorded.

    Args:
        run: its folder.
        evaluated: whether sites have evaluated its model since.
    """
    warnings = (
        _missing_classes(run),
        _no_better_than_chance(run, evaluated),
        _unread(run),
        _odd(run),
        *_budget(run),
    )
    return [warning for warning in warnings if warning] if run.failure is None else []


def _missing_classes(run: RunFolder) -> str:
    """Warn about classes of which no site has a record, or whose noisy counts are no more than noise.
    It names no site.
    """
    card = as_table(run.metrics.get("card"))
    names = [str(name) for name in as_list(card.get("without_records"))]
    if not names:
        return ""
    if card.get("records_by_class") == "noisy":
        return (
            f"Perhaps no site has a record of {', '.join(map(repr, names[:NAMED]))}: the noisy counts "
            "of all sites together are no more than noise; check how the sites write the names of the "
            "classes."
        )
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    shown = ", ".join(names[:NAMED]) + more
    if len(names) == 1:
        return f"No site has a record of class {shown}: the model cannot recognise it."
    return f"No site has a record of classes {shown}: the model cannot recognise them."


def data_of(run: RunFolder) -> list[DataReport]:
    """The data reports of a simulation."""
    return reports_from(json.dumps(as_list(run.metrics.get("data"))))


def _unread(run: RunFolder) -> str:
    """Warn about images that only the run itself could find broken."""
    unread = [
        loss.why
        for report in data_of(run)
        for loss in report.left_out
        if "cannot be read" in loss.why
    ]
    return f"Left out: {'; '.join(unread)}." if unread else ""


def _odd(run: RunFolder) -> str:
    """Warn about the data, such as patients in both training and test."""
    # Another warning has classes without a record.
    found = [warning for report in data_of(run) for warning in report.warnings]
    found += likely_one_warnings(run.classes)
    found = [warning for warning in dict.fromkeys(found) if not warning.startswith("no record of")]
    return f"Warnings about the data: {'; '.join(found)}." if found else ""


def _budget(run: RunFolder) -> list[str]:
    """Warn about a budget that promises little: the records of sites are as their noisy counts say."""
    epsilon, delta = (as_number(run.config.get(key)) or 0.0 for key in ("epsilon", "delta"))
    known = [round(sum(site.counts.values())) for site in run.sites if site.counts]
    fewest = min((count for count in known if count > 0), default=0)
    return [f"{each[:1].upper()}{each[1:]}." for each in budget_warnings(epsilon, delta, fewest)]


def _no_better_than_chance(run: RunFolder, evaluated: bool) -> str:
    """Warn about a model that may tell nothing apart: neither the interval of its AUROC nor that of
    its balanced accuracy is above chance, nor is an answer of another target; or nobody has measured it.
    """
    answers = as_table(at(run.metrics, "metric_values", "all"))
    card = as_table(run.metrics.get("card"))
    if (quality := recorded_quality(run)) is not None:
        limits = at_chance(quality)
    elif answers:
        limits = answers_at_chance(str(run.config.get("task")), answers)
    elif run.accuracy is None and card.get("at_chance", False) is not False:
        if evaluated or not card["at_chance"]:
            return "" if evaluated else f"{UNMEASURED[:1].upper()}{UNMEASURED[1:]}."
        limits = (
            "nothing measured it, and the noisy class means of all sites differ by chance at most"
        )
    else:
        return _no_better_than_the_majority_baseline(run)
    if not limits:
        return ""
    epsilon = run.number("privacy", "epsilon")
    advice = "check data, labels, backbone and the method's settings"
    if epsilon:
        advice = (
            f"epsilon = {epsilon:g} needs more records, of each class, or a larger epsilon; what shows in the "
            "level or the scale of few columns needs features.ranges; "
            "without privacy see if it learns"
        )
    return f"The model may be no better than chance: {limits}. If it should be better, {advice}."


def _no_better_than_the_majority_baseline(run: RunFolder) -> str:
    """For a run that measured accuracy alone, which does not show whether a model tells apart."""
    own = as_table(run.metrics.get("accuracy"))
    counts = [site.counts for site in run.sites]
    majority = largest_share(own, counts)
    if run.accuracy is None or majority is None or not may_be_chance(None, own, counts):
        return ""
    return (
        f"The accuracy, {percent(run.accuracy)}, is not above that of the majority baseline, "
        f"{percent(majority)}. Accuracy alone does not show whether the model tells classes apart, and "
        "this run measured nothing else: evaluate the model, which metrics its AUROC."
    )


# Settings that decide which records a run trains and tests on.
RECORDS = (
    *OF_RECORDS,
    *("partition", "alpha", "classes-per-site", "site-column", "test-fraction"),
    *("data-dir", "seed", "classes"),
)


def compared(runs: Sequence[tuple[str, RunFolder]]) -> dict[str, Sequence[AccuracyStep]]:
    """Accuracy by round of each run. A chain has one model, at its end.

    Args:
        runs: each with its folder's name.

    Returns:
        The steps of each run. Keys are methods; a method that occurs twice gets part of its
        folder's name.

    Raises:
        RunError: for a run without an accuracy on the test data of all sites.
    """
    accuracies: dict[str, Sequence[AccuracyStep]] = {}
    for folder, run in runs:
        what, taken = steps(run)
        if not taken:
            raise RunError(
                f"{folder} has no accuracy on the test data of all sites, so it cannot be compared "
                "with others"
            )
        if what != ROUND:
            taken = [replace(taken[-1], name="1")]
        name = run.method
        accuracies[f"{name} {folder[-6:]}" if name in accuracies else name] = taken
    return accuracies


def comparison_table(curves: Mapping[str, Sequence[AccuracyStep]]) -> Table:
    """A row for each round of each run."""
    rows = [
        (name, step.name, step.bytes, step.accuracy)
        for name, taken in curves.items()
        for step in taken
    ]
    return [("run", "round", "bytes up", "accuracy"), *rows]


def of_other_records(runs: Sequence[tuple[str, RunFolder]]) -> list[str]:
    """A sentence about each run whose records differ from the first one's: their accuracies cannot
    be compared.
    """
    own, notes = _records(runs[0][1]), []
    for folder, run in runs[1:]:
        other = _records(run)
        apart = [
            f"{key} = {other[key]}, here {own[key]}"
            for key in RECORDS
            if key in own.keys() & other and own[key] != other[key]
        ]
        if apart:
            notes.append(
                f"{folder} has other records ({'; '.join(apart)}), so the accuracies are not of "
                "the same test data"
            )
    return notes


def _records(run: RunFolder) -> dict[str, Any]:
    config = flatten(run.config)
    return {key: config[key] for key in RECORDS if key in config}
