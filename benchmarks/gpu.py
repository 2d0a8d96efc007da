"""All checks on a GPU in one command, in under eight minutes: parity with the processor, and speed
against stated limits.

It needs torch and torchvision, not Flower: `python -m benchmarks.gpu` in the checkout, or `make
gpu`. What needs another package that is missing is reported and left out. Without a GPU, or with
--tiny, the same command runs on tiny sizes: a dry run, whose speeds mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import _gpu_parity, _gpu_speed
from benchmarks._gpu_rows import FULL, TINY, Row

RESULT = Path(__file__).resolve().parent / "results" / "gpu.json"
# Seconds after which no further part begins.
LATEST = 420.0
Part = Callable[[], Iterator[Row]]


def main() -> int:
    """Run all parts, print one table, write one JSON; the exit code is 1 if a row fails or a part
    breaks.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a processor")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the backbones of the extraction"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the JSON; by default benchmarks/results/gpu.json, on a processor none",
    )
    options = parser.parse_args()
    tiny = options.tiny or not options.device.startswith("cuda")
    sizes, device = TINY if tiny else FULL, options.device
    parts: list[tuple[str, Part]] = [("parity", lambda: _gpu_parity.rows(device, sizes))]
    if device.startswith("cuda"):
        parts.append(("CUDA tests", _gpu_parity.cuda_tests))
    parts.append(("speed", lambda: _gpu_speed.rows(device, sizes)))
    if options.compile:
        parts.append(("compiled", lambda: _gpu_speed.extraction(device, sizes, compiled=True)))
    started = time.perf_counter()
    rows, broken = run(parts, started)
    table(rows)
    took = time.perf_counter() - started
    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else platform.processor() or platform.machine()
    )
    facts = {
        "device": name,
        "torch": torch.__version__,
        "tiny": tiny,
        "seconds": round(took, 1),
        "broken": broken,
    }
    print(
        f"{len(rows)} rows on {name} in {took:.0f} s"
        + (", dry run: the speeds mean nothing" if tiny else "")
    )
    if (out := options.out or (None if tiny else RESULT)) is not None:
        out.write_text(
            json.dumps(facts | {"rows": [row.as_dict() for row in rows]}, indent=2) + "\n"
        )
        print(f"written to {out}")
    # Speeds of a dry run mean nothing, so only parity decides it.
    failed = [
        row.name for row in rows if not row.passes and not (tiny and row.against != "tolerance")
    ]
    for each in (*failed, *broken):
        print(f"FAILED: {each}")
    return int(bool(failed or broken))


def run(parts: list[tuple[str, Part]], started: float) -> tuple[list[Row], list[str]]:
    """All rows, and the parts that broke or were left out for lack of time. A part that breaks does
    not stop the others.
    """
    rows: list[Row] = []
    broken: list[str] = []
    for name, part in parts:
        try:
            for row in part():
                rows.append(row)
                print(f"{time.perf_counter() - started:6.0f} s  {row.name}", flush=True)
                if time.perf_counter() - started > LATEST:
                    raise TimeoutError(f"after {row.name}: {LATEST:.0f} s are over")
        except Exception as error:
            traceback.print_exc()
            broken.append(f"{name}: {type(error).__name__}: {error}")
    return rows, broken


def table(rows: list[Row]) -> None:
    """Print the rows."""
    width = max((len(row.name) for row in rows), default=4)
    print(
        f"\n{'what':{width}}  {'ours':>10}  {'unit':14}  {'against':26}  {'limit':>10}  "
        f"{'share':>7}"
    )
    for row in rows:
        numbers = (
            f"{row.ours:10.4g}  {row.unit:14}  {row.against:26}  {row.limit:10.4g}  "
            f"{row.fraction:7.2f}"
        )
        print(f"{row.name:{width}}  {numbers}  {'' if row.passes else 'below'}")


if __name__ == "__main__":
    sys.exit(main())
