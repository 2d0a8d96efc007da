"""The tables of a report as CSV: as links in the page, which work without a network, and as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from fedsurrogate.common.escapes import csv_text
from fedsurrogate.server_app.report.quality_view import recorded_quality
from fedsurrogate.server_app.runs.json_values import Json, as_list, as_number, as_table
from fedsurrogate.server_app.runs.reader import DOWNSTREAM, RunFolder

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
    sources = [
        source
        for source in DOWNSTREAM
        if any(source in run.downstream(site.name) for site in run.sites)
    ]
    sites = ["site", "status", "reason", "records", "bytes", "seconds", "accuracy"]
    tables: dict[str, Table] = {
        "sites": [[*sites, *(f"accuracy {source}" for source in sources)]],
        "classes": [("site", *run.classes)],
        "measures": _measures(run),
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


def _measures(run: RunFolder) -> Table:
    """How well a model of another target than classes answers, at all sites and at each."""
    found = as_table(run.metrics.get("measures"))
    places = {"all": as_table(found.get("all"))}
    places |= {name: as_table(own) for name, own in as_table(found.get("per_site")).items()}
    rows: Table = [("site", "answer", "measure", "value")]
    return rows + [
        (place, output, name, as_number(value))
        for place, outputs in places.items()
        for output, own in outputs.items()
        for name, value in as_table(own).items()
    ]


def _quality(run: RunFolder) -> Table:
    """Every measure of a model of classes, with its interval."""
    rows: Table = [("class", "measure", "value", "low", "high", "records")]
    if (found := recorded_quality(run)) is None:
        return rows
    named = [("", found.averages), *((each.name, each.measures) for each in found.per_class)]
    return rows + [
        (name, key, each.value, each.low, each.high, each.support)
        for name, measures in named
        for key, each in measures.items()
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
