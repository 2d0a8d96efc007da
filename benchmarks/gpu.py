"""All checks on a GPU in one command, in under eight minutes: parity with the processor, the tests
that need a GPU, and speed against limits on paper.

It needs torch and torchvision, not Flower: `python -m benchmarks.gpu` in the checkout, or `make
gpu`. What needs another package that is missing is reported and left out. A row that fails does not
stop the others, and the JSON is written after every row. Without a GPU, or with --tiny, the same
command runs on tiny sizes: a dry run, whose speeds mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import _gpu_extraction, _gpu_parity, _gpu_speed
from benchmarks._gpu_rows import FULL, TINY, Case, LeftOutError, Row, Sizes, failed

RESULT = Path(__file__).resolve().parent / "results" / "gpu.json"
LIMITS = "limits of the device"
PARTS = ("parity", "tests", "speed")
# Packages without which some rows are left out.
FURTHER = ("torchvision", "timm", "sklearn", "scipy", "cryptography", "pytest", "pydantic", "flwr")


@dataclass
class Run:
    """What has been measured so far.

    Attributes:
        facts: of the machine and the command.
        out: the JSON; None for none.
        rows: each with its part and its seconds.
        left_out: what was not measured, and why.
        started: when the command began.
    """

    facts: dict[str, Any]
    out: Path | None
    rows: list[tuple[str, float, Row]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since the command began."""
        return time.perf_counter() - self.started

    def add(self, part: str, took: float, row: Row) -> None:
        """Print a row, and write all rows so far."""
        self.rows.append((part, took, row))
        print(f"{self.seconds:5.0f} s  {line(row)}", flush=True)
        self.write()

    def leave_out(self, what: str) -> None:
        """Say what is not measured."""
        self.left_out.append(what)
        print(f"{self.seconds:5.0f} s  left out: {what}", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the JSON."""
        if self.out is None:
            return
        rows = [
            {"part": part, "seconds": round(took, 2), **row.as_dict()}
            for part, took, row in self.rows
        ]
        content = {
            **self.facts,
            "seconds": round(self.seconds, 1),
            "left_out": self.left_out,
            "rows": rows,
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.out.with_suffix(".part")
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
        unfinished.replace(self.out)


def main() -> int:
    """Run the parts, print one table, write one JSON; the exit code is 1 if a row fails or a part
    has none.
    """
    options = parsed()
    device: str = options.device
    tiny = options.tiny or not device.startswith("cuda")
    facts = machine(device) | {"tiny": tiny}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    run = Run(facts, target(options.out, tiny))
    sizes = TINY if tiny else FULL
    if options.processes:
        sizes = replace(sizes, processes=tuple(options.processes))
    chosen = options.only or [part for part in PARTS if part != "tests" or not tiny]
    cases = {
        part: [
            case
            for case in cases_of(part, device, sizes, options.compile)
            if is_wanted(case, options.cases)
        ]
        for part in chosen
    }
    missing = [name for name in FURTHER if importlib.util.find_spec(name) is None]
    print(f"not installed: {', '.join(missing) or 'nothing'}; rows that need it are left out")
    for part, its in cases.items():
        expected = sum(case.seconds for case in its)
        print(f"{part}: {len(its)} cases, about {expected:.0f} s, at most {options.seconds:.0f} s")
        print("   " + "; ".join(case.name for case in its), flush=True)
    for part, its in cases.items():
        work_through(run, part, its, options.seconds, device)
    return finish(run, chosen, tiny)


def parsed() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts alone")
    parser.add_argument(
        "--seconds",
        type=float,
        default=170.0,
        help="after which no case of a part begins; its last one may end later",
    )
    parser.add_argument(
        "--cases", nargs="+", help="only those whose name contains one of these words"
    )
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        help="numbers of processes that extract with the first backbone; the last one with all",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a processor")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the backbones of the extraction"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder for gpu.json, or a file that ends in .json; by default "
        "benchmarks/results/gpu.json, in a dry run none",
    )
    return parser.parse_args()


def is_wanted(case: Case, words: list[str] | None) -> bool:
    """Whether a case is to run. All of speed is held against the limits of the device."""
    return words is None or any(word in case.name for word in (*words, LIMITS))


def target(out: Path | None, tiny: bool) -> Path | None:
    """The file of the results; None for none."""
    if out is None:
        return None if tiny else RESULT
    return out if out.suffix == ".json" else out / "gpu.json"


def machine(device: str) -> dict[str, Any]:
    """Device, driver, torch, memory and cores; it is printed before anything else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    software = {"torch": torch.__version__, "python": platform.python_version(), "cores": cores}
    if not device.startswith("cuda"):
        return {"device": platform.processor() or platform.machine()} | software
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver(),
        "CUDA": torch.version.cuda,
        "GiB": round(total / 2**30, 1),
        "GiB free": round(free / 2**30, 1),
    } | software


def driver() -> str:
    """The version of NVIDIA's driver."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.split("\n")[0].strip() or "unknown"


def cases_of(part: str, device: str, sizes: Sizes, compiled: bool) -> Iterator[Case]:
    """The cases of a part. The limits of the device are measured by the first one of speed."""
    if part == "parity":
        yield from _gpu_parity.cases(device, sizes)
        return
    if part == "tests":
        yield from _gpu_parity.cuda_tests()
        return
    limits = _gpu_speed.Measured(device, sizes)
    yield Case(LIMITS, 10, limits.rows)
    yield from _gpu_extraction.forward_passes(limits.clock, sizes, compiled)
    yield from _gpu_speed.fits(limits.clock, sizes)
    yield from _gpu_extraction.cases(limits.clock, sizes)
    yield from _gpu_speed.cases(limits.clock, sizes)


def work_through(run: Run, part: str, cases: list[Case], limit_s: float, device: str) -> None:
    """All rows of a part. A case that fails is a row, and the next one begins."""
    began = time.perf_counter()
    for case in cases:
        if time.perf_counter() - began > limit_s:
            run.leave_out(f"{case.name}: the {limit_s:.0f} s of {part} are over")
            continue
        at = time.perf_counter()
        try:
            for row in case.rows():
                run.add(part, time.perf_counter() - at, row)
                at = time.perf_counter()
        except LeftOutError as reason:
            run.leave_out(str(reason))
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            row = failed(case.name, f"{type(error).__name__}: {first}"[:300])
            run.add(part, time.perf_counter() - at, row)
        release(device)


def release(device: str) -> None:
    """Free what a case has left; after an error of the device this may fail as well."""
    gc.collect()
    if device.startswith("cuda"):
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            print(f"the memory of the device cannot be freed: {error}", flush=True)


def line(row: Row) -> str:
    """A row in one line."""
    if row.reason:
        return f"{row.name}: FAILED, {row.reason}"
    numbers = f"{row.ours:.4g} {row.unit}, {row.against} {row.limit:.4g}, {row.fraction:.2f}"
    return f"{row.name}: {numbers}{'' if row.passes else ', BELOW'}"


def finish(run: Run, parts: list[str], tiny: bool) -> int:
    """Print the table, and what failed. Speeds of a dry run mean nothing, so only parity and
    errors decide it.
    """
    rows = [row for _, _, row in run.rows]
    table(rows)
    print(
        f"{len(rows)} rows on {run.facts['device']} in {run.seconds:.0f} s"
        + (", dry run: the speeds mean nothing" if tiny else "")
    )
    run.write()
    if run.out is not None:
        print(f"written to {run.out}")
    bad = [
        row.name
        for row in rows
        if not row.passes and (not tiny or row.reason or row.against == "tolerance")
    ]
    if not rows:
        bad.append(f"no row of {', '.join(parts)}")
    for each in bad:
        print(f"FAILED: {each}")
    return int(bool(bad))


def table(rows: list[Row]) -> None:
    """Print the rows."""
    width = max((len(row.name) for row in rows), default=4)
    print(
        f"\n{'what':{width}}  {'ours':>10}  {'unit':14}  {'against':28}  {'limit':>10}  "
        f"{'share':>7}"
    )
    for row in rows:
        numbers = (
            f"{row.ours:10.4g}  {row.unit:14}  {row.against:28}  {row.limit:10.4g}  "
            f"{row.fraction:7.2f}"
        )
        print(f"{row.name:{width}}  {numbers}  {'' if row.passes else row.reason or 'below'}")


if __name__ == "__main__":
    sys.exit(main())
