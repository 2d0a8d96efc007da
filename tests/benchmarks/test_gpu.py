"""The GPU benchmark as a dry run on a processor: the same command, tiny sizes, and no package but
torch and torchvision.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.children import ran
from tests.grid import ROOT

# What a bare machine with torch and torchvision does not have.
MISSING = (
    *(
        "flwr", "ray", "pydantic", "typer", "rich", "google", "grpc", "cryptography", "safetensors",
        "sklearn", "scipy",
    ),
    *(
        "dp_accounting", "opacus", "open_clip", "timm", "pyarrow", "pydicom", "filelock", "psutil",
        "jinja2", "matplotlib",
    ),
)  # fmt: skip
BARE = f"""
import runpy, sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {MISSING!r} else PathFinder.find_spec(name, path, target)
sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
MAIN = 'runpy.run_module("benchmarks.gpu", run_name="__main__")'
PARITY = (
    "features of", "mixture, diag", "mixture, gram", "k-means", "second moment",
    "head in closed form, lda", "a trained head", "FedLAP, radius", "DP-CVAE, clipped",
)  # fmt: skip
SPEED = (
    "limit: products in bfloat16",
    "limit: copy from pinned memory",
    "JPEG decoded and prepared",
    "forward pass, r",
    "extraction, one process, r",
    "extraction, decoded on the device, ",
    "extraction, 2 processes, ",
    "second moment, n=",
    "mixtures of ten classes, full",
    "streamed fit",
    "softmax regression",
    "network of a hidden layer",
    "eigenvectors, float64",
    "head in closed form, ridge, d=24, 5 classes",
    "FedLAP, a site's round",
    "DP-SGD step without noise, DP-CVAE",
)


def dry_run(
    tmp_path: Path, *command: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    python, options = command[:2], command[2:]
    where = ("--device", "cpu", "--out", str(tmp_path), "--seconds", "600")
    arguments = [sys.executable, *python, *where, *options]
    done = ran(arguments, cwd=ROOT, timeout=900)
    out = tmp_path / "gpu.json"
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_all_of_the_gpu_benchmark_is_imported_on_a_bare_machine() -> None:
    done = ran(
        [sys.executable, "-c", f"{BARE}import benchmarks.gpu; print(*sys.modules)"], cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded
    assert not loaded & set(MISSING)


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_bare_machine_and_reports_every_part(tmp_path: Path) -> None:
    done, found = dry_run(tmp_path, "-c", BARE + MAIN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = [row["name"] for row in found["rows"]]
    for part in (*PARITY, *SPEED):
        assert any(name.startswith(part) for name in names), f"no row for {part!r}"
    assert not [row for row in found["rows"] if row["reason"]]
    # Both sides are the same processor; with another memory layout, some processors round in
    # another order. A loop in double precision differs by the rounding of single precision.
    apart = {row["name"]: row["ours"] for row in found["rows"] if row["against"] == "tolerance"}
    double = apart.pop("DP-SGD, against a loop in float64")
    assert all(difference < 1e-6 for difference in apart.values()), apart
    assert 0 < double < 1e-5
    assert any("scikit-learn is not installed" in each for each in found["left_out"])
    assert all(name in done.stdout for name in names), "every row is in the table"
    assert done.stdout.startswith("device "), "the machine comes first"
    assert all(row["limit"] > 0 for row in found["rows"] if row["part"] == "speed")
