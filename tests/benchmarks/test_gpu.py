"""The GPU benchmark as a dry run on a processor: the same command, tiny sizes, and no package but
torch and torchvision.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid import ROOT

# What a bare machine with torch and torchvision does not have.
MISSING = (
    *(
        "flwr",
        "ray",
        "pydantic",
        "typer",
        "rich",
        "google",
        "grpc",
        "cryptography",
        "safetensors",
        "sklearn",
        "scipy",
    ),
    *(
        "dp_accounting",
        "opacus",
        "open_clip",
        "timm",
        "pyarrow",
        "pydicom",
        "filelock",
        "psutil",
        "jinja2",
        "matplotlib",
    ),
)
BARE = f"""
import runpy, sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {MISSING!r} else PathFinder.find_spec(name, path, target)
sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""
PARITY = (
    "features of",
    "mixture, diag",
    "second moment",
    "head in closed form, lda",
    "FedLAP, radius",
    "DP-CVAE, clipped",
)
SPEED = (
    "extraction, r",
    "extraction, decoded on the device, ",
    "extraction, 2 processes, ",
    "head in closed form, d=",
    "FedLAP, a site's round",
    "DP-SGD step without noise, DP-CVAE",
)


def dry_run(
    tmp_path: Path, *command: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    out = tmp_path / "gpu.json"
    arguments = [sys.executable, *command, "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_bare_machine_and_reports_every_part(tmp_path: Path) -> None:
    done, found = dry_run(tmp_path, "-c", BARE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert found["broken"] == []
    rows = found["rows"]
    assert isinstance(rows, list)
    names = [row["name"] for row in rows]
    for part in (*PARITY, *SPEED):
        assert any(name.startswith(part) for name in names), f"no row for {part!r}"
    # Both sides are the same processor; with another memory layout, some processors round in
    # another order.
    assert all(row["ours"] < 1e-6 for row in rows if row["against"] == "tolerance")
    assert "scikit-learn is not installed" in done.stdout
    assert all(name in done.stdout for name in names), "every row is in the table"


@pytest.mark.slow
def test_a_row_outside_its_tolerance_fails_the_command(tmp_path: Path) -> None:
    changed = """
import runpy
from benchmarks import _gpu_rows
whole = _gpu_rows.parity
_gpu_rows.parity = lambda name, apart, tolerance, unit="": whole(name, apart + 2 * tolerance, tolerance, unit)
from benchmarks import _gpu_speed
_gpu_speed.rows = lambda device, sizes: iter(())
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""
    done, found = dry_run(tmp_path, "-c", changed)
    assert done.returncode == 1
    assert "FAILED: features of" in done.stdout
    assert found["broken"] == []
