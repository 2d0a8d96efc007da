"""Scalars for TensorBoard, read back with TensorBoard's own reader; needs the extra `tensorboard`."""

import json
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.server_app.cli import main as cli
from fedsurrogate.server_app.monitoring.tensorboard import scalars_at_end, scalars_of, write_scalars
from fedsurrogate.server_app.runs.state import state_of
from tests.grid import FAST, events_of, metrics_of, run_federation, sites
from tests.uses_of_extras import hidden


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rounds = {"method": "fedavg", "fedavg.rounds": 3, "fedavg.local-epochs": 1}
    return run_federation(tmp_path_factory.mktemp("run"), sites(2), **rounds)


def read_back(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, value and time of every scalar by its tag."""
    reader: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="pip install -e '.[tensorboard]'",
    )
    found = reader.EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(e.step, e.value, e.wall_time) for e in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_events_become_scalars_of_their_round(run: Path) -> None:
    found = [scalar for event in events_of(run) for scalar in scalars_of(event)]
    rounds = metrics_of(run)["rounds"]
    assert [(s.step, s.value) for s in found if s.tag == "accuracy"] == [
        (e["round"], e["accuracy"]) for e in rounds
    ]
    assert [(s.step, s.value) for s in found if s.tag == "bytes/up"] == [
        (e["round"], e["bytes_up"]) for e in rounds
    ]
    assert [s.step for s in found if s.tag == "seconds/1"] == [1, 2, 3]
    assert all(scalar.seconds for scalar in found)


def test_a_run_of_one_round_tells_its_result_at_the_end(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(2), **FAST)
    state, metrics = state_of(events_of(folder)), metrics_of(folder)
    state.conclude(metrics)
    assert {(scalar.tag, scalar.value, scalar.step) for scalar in scalars_at_end(state)} == {
        ("accuracy", metrics["accuracy"]["model"], 1),
        ("bytes/up", metrics["bytes"]["up"], 1),
    }


@pytest.mark.parametrize(
    "event", [{}, {"event": "round", "round": "x", "accuracy": "y"}, {"event": "replied"}]
)
def test_an_event_without_numbers_tells_none(event: dict[str, Any]) -> None:
    assert list(scalars_of(event)) == []


def test_tensorboard_reads_what_was_written(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install -e '.[tensorboard]'")
    folder = write_scalars(run, tmp_path)
    assert folder == tmp_path / run.name
    found = read_back(folder)
    of_sites = {f"{what}{site}" for what in ("seconds/", "bytes-up/") for site in "01"}
    assert set(found) == {"accuracy", "bytes/up"} | of_sites
    rounds = metrics_of(run)["rounds"]
    assert [(step, value) for step, value, _ in found["accuracy"]] == [
        (entry["round"], pytest.approx(entry["accuracy"])) for entry in rounds
    ]
    times = [
        datetime.fromisoformat(event["time"]).timestamp()
        for event in events_of(run)
        if event["event"] == "round"
    ]
    assert [moment for _, _, moment in found["accuracy"]] == pytest.approx(times, abs=1e-3, rel=0)
    # After a second call, no scalar occurs twice.
    assert read_back(write_scalars(run, tmp_path)) == found


def test_the_command_names_the_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="pip install -e '.[tensorboard]'")
    copy = Path(shutil.copytree(run, tmp_path / run.name))
    monkeypatch.setattr(sys, "argv", ["coordinator", "tensorboard", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert capsys.readouterr().out == f"{copy / 'tensorboard'}\n"
    assert read_back(copy / "tensorboard")["accuracy"]


def test_without_the_library_the_extra_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["coordinator", "tensorboard", str(run)])
    with hidden("tensorboard"), pytest.raises(SystemExit, match="1"):
        cli.main()
    error = capsys.readouterr().err
    assert "fedsurrogate[tensorboard]" in error
    assert error.count("\n") == 1
    assert not (run / "tensorboard").exists()
    assert json.loads((run / "metrics.json").read_text())["status"] == "ok"
