"""A sweep in several processes gives what one gives; what is done is kept when it is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_iris

import fedsurrogate as fs
import fedsurrogate.server_app.deployment.local_engine
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.server_app import sweep
from fedsurrogate.server_app.trial_process import Processes
from tests.commands import coordinator

X, Y = load_iris(return_X_y=True)
SITES = [(X[number::3], Y[number::3]) for number in range(3)]
GRID: dict[str, Any] = {"shrinkage": [0.1, 0.9]}
COMMON: dict[str, Any] = {"covariance": "gram", "progress": False}


def results(table: fs.Sweep) -> list[Any]:
    return [(row["shrinkage"], row["seed"], row["accuracy"], row["bytes"]) for row in table.rows]


@pytest.mark.slow
def test_processes_side_by_side_give_what_one_process_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in any order; the table has that of the grid."""
    started: list[int] = []
    real = Processes.run

    def counted(
        self: Processes, nodes: Sequence[Mapping[str, Scalar]], flat: Mapping[str, Scalar]
    ) -> Path:
        started.append(self.room())
        return real(self, nodes, flat)

    monkeypatch.setattr(Processes, "run", counted)
    alone = fs.sweep(SITES, grid=GRID, seeds=1, output_dir=tmp_path / "a", **COMMON)
    assert not started
    both = fs.sweep(SITES, grid=GRID, seeds=1, output_dir=tmp_path / "b", workers=2, **COMMON)
    assert results(alone) == results(both)
    assert started == [1, 2], "the first one shows what memory a run takes"
    assert json.loads(both.file.read_text()) == both.rows


def test_a_process_that_is_killed_is_a_failed_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system kills the largest process where memory is short."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nos.environ.pop('DIES', None) and os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("DIES", "1")
    table = fs.sweep(SITES, seeds=1, output_dir=tmp_path / "runs", workers=2, covariance="gram")
    assert "ended with -9" in table.rows[0]["error"]
    assert "take fewer workers" in table.rows[0]["error"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_sweep_keeps_what_is_done_and_goes_on(
    workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, finished = sweep._finished, []

    def interrupted(*arguments: Any) -> Any:
        trial = real(*arguments)
        if finished:
            os.kill(os.getpid(), signal.SIGINT)
        finished.append(trial)
        return trial

    monkeypatch.setattr(sweep, "_finished", interrupted)
    call: dict[str, Any] = {
        **COMMON,
        "output_dir": tmp_path,
        "grid": {"shrinkage": [0.1, 0.5, 0.9]},
    }
    with pytest.raises(KeyboardInterrupt):
        fs.sweep(SITES, seeds=1, workers=workers, **call)
    (file,) = tmp_path.glob("sweep-*.json")
    kept = json.loads(file.read_text())
    assert 1 <= len(kept) < 3
    printed = capsys.readouterr().out
    assert f"resume='{file}'" in printed
    assert re.search(r"shrinkage=0.1: accuracy 0\.\d{4}, .*, 1 run\b", printed)
    monkeypatch.setattr(sweep, "_finished", real)
    table = fs.sweep(SITES, seeds=1, resume=file, **call)
    assert [row["shrinkage"] for row in table.rows] == [0.1, 0.5, 0.9]
    assert [row["folder"] for row in table.rows][: len(kept)] == [row["folder"] for row in kept]
    assert table.file == file
    assert json.loads(file.read_text()) == table.rows
    again = fs.sweep(SITES, seeds=1, resume=file, **call)
    assert again.rows == table.rows, "nothing runs twice"
    file.write_text(json.dumps([*table.rows[:2], table.rows[2] | {"error": "no memory"}]))
    renewed = fs.sweep(SITES, seeds=1, resume=file, **call)
    assert renewed.rows[:2] == table.rows[:2]
    assert renewed.rows[2]["folder"] != table.rows[2]["folder"], "what failed runs again"


def test_what_does_not_belong_to_a_sweep_is_not_kept(tmp_path: Path) -> None:
    call: dict[str, Any] = {**COMMON, "output_dir": tmp_path, "seeds": 1}
    file = fs.sweep(SITES, shrinkage=0.1, **call).file
    with pytest.raises(fs.ConfigError, match=r"had head.shrinkage = 0.1, and this sweep has 0.9"):
        fs.sweep(SITES, shrinkage=0.9, resume=file, **call)
    (tmp_path / "other.json").write_text("[1]")
    for wrong in (tmp_path / "other.json", tmp_path / "none.json"):
        with pytest.raises(fs.ConfigError, match="cannot be read"):
            fs.sweep(SITES, grid=GRID, resume=wrong, **call)
    for workers in (0, 1.5, True, "all"):
        with pytest.raises(fs.ConfigError, match="workers = "):
            fs.sweep(SITES, workers=workers, **call)


@pytest.mark.slow
def test_the_command_goes_on_and_takes_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--sites", 2, "--seeds", 2, "-g", 'fedpft.covariance=["gram"]']
    words += ["-c", f'output-dir="{tmp_path}"']
    real = fedsurrogate.server_app.deployment.local_engine.federate
    calls: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(fedsurrogate.server_app.deployment.local_engine, "federate", interrupted)
    assert coordinator(monkeypatch, *words) == 130
    printed = capsys.readouterr()
    (file,) = tmp_path.glob("sweep-*.json")
    assert "gram" in printed.out
    assert f"--resume '{file}'" in printed.err
    assert coordinator(monkeypatch, *words, "--resume", file, "--workers", 2, "--json") == 0
    printed = capsys.readouterr()
    assert [row["seed"] for row in json.loads(printed.out)] == [0, 1]
    assert len(calls) == 2, "the rest ran in a process of its own"
