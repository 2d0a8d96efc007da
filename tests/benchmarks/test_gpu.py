"""The GPU benchmark as a dry run on a processor: the same command, tiny sizes, and no package but
torch and torchvision.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._gpu_limits import MEASURED, RESULT, Limits, Work, counted, network, of_image, table
from benchmarks._gpu_rows import failed
from tests.children import ran
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
"""
MAIN = 'runpy.run_module("benchmarks.gpu", run_name="__main__")'
PARITY = (
    "features of",
    "mixture, diag",
    "mixture, gram",
    "k-means",
    "second moment",
    "head in closed form, lda",
    "a trained head",
    "FedLAP, radius",
    "DP-CVAE, clipped",
)
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


FAULTY = """
import runpy
from benchmarks import _gpu_rows
whole = _gpu_rows.parity
def apart(name, found, tolerance, unit=""):
    return whole(name, found + 2 * tolerance * name.startswith("features of"), tolerance, unit)
_gpu_rows.parity = apart
from benchmarks import _gpu_parity
def broken(device, family):
    yield _gpu_rows.parity("the row before", 0.0, 1.0)
    raise RuntimeError("no memory\\nand so on")
_gpu_parity.mixtures = broken
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.slow
def test_a_row_that_breaks_or_is_beyond_its_tolerance_fails_the_command_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    done, found = dry_run(tmp_path, "-c", FAULTY, "--only", "parity")
    rows = {row["name"]: row for row in found["rows"]}
    assert done.returncode == 1
    assert rows["mixtures, full"]["reason"] == "RuntimeError: no memory"
    assert rows["mixtures, full"]["ours"] is None
    assert rows["the row before"]["passes"]
    assert rows["DP-CVAE, losses"]["passes"], "a later case"
    assert "FAILED: mixtures, full" in done.stdout
    assert "FAILED: features of" in done.stdout
    assert {row["part"] for row in found["rows"]} == {"parity"}, "one part alone"


def limits(**changes: float) -> Limits:
    usual = dict.fromkeys(("half", "tf32", "single", "double", "memory", "link", "launch"), 1.0)
    return Limits(**usual | changes)


def test_what_takes_longest_is_the_floor() -> None:
    work = Work(half=8, double=2, memory=30, link=4, launches=5)
    assert limits().floor(work) == (30, "memory")
    assert limits(memory=100).floor(work) == (10, "operations"), "of all precisions together"
    assert limits(memory=100, launch=3).floor(work) == (15, "kernel starts")
    assert limits(memory=100, half=100, double=100).floor(work) == (5, "kernel starts")
    assert limits(memory=100, link=0.1).floor(work) == (40, "host link")


def test_operations_bytes_and_kernels_are_counted() -> None:
    a, b = torch.zeros(3, 4, device="meta"), torch.zeros(4, 5, device="meta", dtype=torch.float32)
    work = counted(lambda: (a @ b).T.relu())
    assert work == Work(single=2 * 3 * 4 * 5, memory=4 * (12 + 20 + 15 + 15 + 15), launches=2)
    wide = torch.zeros(6, 6, dtype=torch.float64)
    assert counted(lambda: torch.linalg.eigh(wide)).double == pytest.approx(14 / 3 * 6**3)
    with torch.inference_mode():
        layer = torch.nn.Linear(4, 5).bfloat16()
        assert counted(lambda: layer(torch.zeros(3, 4).bfloat16())).half == 2 * 3 * 4 * 5


def test_the_backbones_have_the_operations_that_their_papers_state() -> None:
    # Multiplications and additions, twice the number of both together in the papers: He et al. 2016
    # (without the blocks' later stride), Dosovitskiy et al. 2021.
    assert of_image("torchvision:resnet50").operations == pytest.approx(2 * 4.1e9, rel=0.02)
    assert of_image("torchvision:vit_b_16").operations == pytest.approx(2 * 17.6e9, rel=0.02)


def test_the_table_on_paper_is_that_of_its_file() -> None:
    stored = json.loads(RESULT.read_text())
    found = {row["what"]: row["most"] for row in stored["rows"] if "what" in row}
    for what, _, most, _ in table(MEASURED):
        assert most == pytest.approx(found[what], rel=0.01), what


def test_json_has_finite_numbers_only() -> None:
    row = replace(failed("a row", "why"), facts={"rate": float("inf"), "kernels": 3})
    written = json.loads(json.dumps(row.as_dict(), allow_nan=False))
    assert written["ours"] is None
    assert written["facts"] == {"rate": None, "kernels": 3}


def test_random_backbones_tell_images_apart() -> None:
    model = network("torchvision:vit_b_16", "cpu")
    with torch.inference_mode():
        one, other = model(torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    assert (one - other).norm() > 0.01 * one.norm() > 0
