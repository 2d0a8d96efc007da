"""Several runs next to each other: their accuracy by round and byte, as curves and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.settings.flat import flatten
from fedsurrogate.server_app.lifecycle.resume import OF_RECORDS
from fedsurrogate.server_app.report.plots.progress import ROUND, AccuracyStep, steps
from fedsurrogate.server_app.report.tables import Table
from fedsurrogate.server_app.runs.json_values import as_table
from fedsurrogate.server_app.runs.reader import RunFolder

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
    config = flatten(as_table(run.manifest.get("config")))
    return {key: config[key] for key in RECORDS if key in config}
