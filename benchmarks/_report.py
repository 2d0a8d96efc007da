"""Shared functions of all benchmarks: sample data, machine description, result table and JSON file, timing."""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# As in `make test-samples`.
SHARED = Path(os.environ.get("FEDSURROGATE_SAMPLES") or ROOT.parent / "shared")
RESULTS = ROOT / "benchmarks" / "results"


def shared(path: str) -> Path:
    """A file of the optional sample data; without it, the script prints a note and exits with 0."""
    found = SHARED / path
    if not found.exists():
        print(f"skipped: needs {path} in the folder that FEDSURROGATE_SAMPLES names, or 'shared' next to the checkout")
        sys.exit(0)
    return found


def described(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's description; without options of its own, it keeps `--help` from a start."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak() -> float:
    """Largest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def report(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], **facts: Any) -> None:
    """Print rows as a table and write them to results/<name>.json."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    Console(width=140).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {"title": title, "machine": machine(), "columns": list(columns), "rows": [list(row) for row in rows], **facts}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to benchmarks/results/{name}.json")


def draw(axes: Any, name: str) -> None:
    """Give the axes a grid and their figure a legend, and write it to results/<name>.png."""
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside right upper", fontsize=8)
    axes.figure.savefig(RESULTS / f"{name}.png", dpi=130)
    print(f"drawn to benchmarks/results/{name}.png")


def paired(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float]:
    """Median seconds of both, run in turn, and the median of the ratios theirs / ours; drift of the machine cancels out.

    clock: wall time, or `time.process_time` where other processes share the machine.
    """
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        times.append((_seconds(ours, clock), _seconds(theirs, clock)))
    return (
        statistics.median(mine for mine, _ in times),
        statistics.median(peer for _, peer in times),
        statistics.median(peer / mine for mine, peer in times),
    )


def _seconds(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started
