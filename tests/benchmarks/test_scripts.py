"""The benchmarks: their harness learns what a run over messages learns, for every method; each
script has a help.
"""

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.harness import federation
from fedsurrogate.common.run import parse_run
from tests.grid import ROOT, InProcessGrid, metrics_of, run_federation, sites
from tests.registry import SPECS, settings_of

SCRIPTS = sorted(
    file for file in (ROOT / "benchmarks").rglob("*.py") if "__main__" in file.read_text()
)
SPLIT = {"partition": "iid"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_method_learns_in_the_harness(name: str) -> None:
    run = parse_run(settings_of(SPECS[name]) | SPLIT)
    data = federation.load(run, 3)
    measured = federation.federate(run, data)
    assert measured.accuracy > 20, "a guess is right one time in ten"
    assert measured.own > 20
    assert measured.bytes > 0 or run.plan.kind == "alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedpft", "fedavg", "scaffold", "fedrep", "fedlap", "dpcvae"])
def test_the_harness_learns_what_messages_do(tmp_path: Path, name: str) -> None:
    settings = settings_of(SPECS[name]) | SPLIT
    run = parse_run(settings)
    measured = federation.federate(run, federation.load(run, 3))
    metrics = metrics_of(run_federation(tmp_path, InProcessGrid(sites(3)), **settings))
    assert measured.accuracy == pytest.approx(100 * metrics["accuracy"]["model"], abs=0.3), (
        "one of 359 records at most"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_describes_itself_instead_of_starting(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    # A help needs no sample data. Without this line, a folder of them next to the checkout would
    # hide that a script does.
    monkeypatch.setenv("FEDSURROGATE_SAMPLES", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
