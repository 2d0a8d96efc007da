"""Results of a benchmark: a printed table, and the file in benchmarks/results."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.samples import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, GPU, versions and the time, for a result."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    **facts: Any,
) -> None:
    """Print rows as a table and write them to results/<name>.json.

    Args:
        name: of the file, without its ending.
        title: of the table.
        columns: headings.
        rows: a cell for each column; decimal numbers are printed with four digits. One that is no number
            is refused: what was to be measured was not.
        facts: further keys of the file.
    """
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=140).print(table)
    RESULTS.mkdir(exist_ok=True)
    head = {"title": title, "machine": machine(), "columns": list(columns)}
    content = head | {"rows": [list(row) for row in rows]} | facts
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    print(f"written to benchmarks/results/{name}.json")


def stored(name: str) -> dict[str, Any]:
    """What `report` wrote last under this name; empty without a file. A script continues from it.

    Example:
        >>> stored("no-such-result")
        {}
    """
    file = RESULTS / f"{name}.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content


def kept_rows(name: str, anew: Callable[[Sequence[Any]], bool]) -> list[tuple[Any, ...]]:
    """Rows of the last result that are not measured again.

    Args:
        name: of the file, without its ending.
        anew: whether a row is measured again.
    """
    return [tuple(row) for row in stored(name).get("rows", []) if not anew(row)]
