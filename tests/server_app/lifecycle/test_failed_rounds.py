"""A run in rounds that fails: what a person reads, and that the command it shows works."""

import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from typer.main import get_command

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.cli.main import app
from fedsurrogate.server_app.deployment.submit import ended, options_of
from fedsurrogate.server_app.monitoring.watch import summary
from fedsurrogate.server_app.runs.reader import LiveRun, run_folders
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.strategies.base.outcome import Outcome
from tests.grid import Fault, InProcessGrid, metrics_of, run_federation, sites

SHORT: dict[str, Any] = {
    "method": "fedavg", "fedavg.rounds": 3, "fedavg.local-epochs": 1, "quorum": 1.0, "sites": 2,
}  # fmt: skip


@pytest.mark.parametrize("completed", [0, 1, 2])
def test_a_failed_run_shows_the_command_that_continues_it(tmp_path: Path, completed: int) -> None:
    replies = list[int]()

    def breaks(record: RecordDict) -> None:
        replies.append(1)
        if len(replies) > completed:
            record.clear()

    with pytest.raises(RunError):
        run_federation(tmp_path, InProcessGrid(sites(2), {1: Fault(reply=breaks)}), **SHORT)
    (folder,) = run_folders(tmp_path / "runs")
    assert metrics_of(folder)["status"] == "failed"
    shown = str(ended(folder, "finished:failed")).splitlines()
    live = LiveRun(folder)
    live.refresh()
    assert not any("with resume" in line for line in shown), "a hint without its command"
    assert shown[-1] in "\n".join(summary(live))
    program, word, option, text = shlex.split(shown[-1].removeprefix("continue it: "))
    assert (program, word, option) == ("coordinator", "run", "-c")
    typed = parse_overrides([text])
    assert typed["resume"] == str(folder)
    again = run_federation(tmp_path, sites(2), **typed)
    assert metrics_of(again)["status"] == "ok"
    assert [each["round"] for each in metrics_of(again)["rounds"]] == [1, 2, 3]


def test_the_command_names_the_superlink_and_the_end_is_no_state_that_goes_on(
    tmp_path: Path,
) -> None:
    """What is printed can be typed: the program itself reads it."""
    broken = InProcessGrid(sites(2), {1: Fault(reply=RecordDict.clear)})
    with pytest.raises(RunError):
        run_federation(tmp_path, broken, **SHORT)
    (folder,) = run_folders(tmp_path / "runs")
    at = options_of("fl.example.org:9093", tmp_path / "ca.crt")
    # A SuperLink that was restarted may list an ended run so.
    first, *_, last = str(ended(folder, "running", at)).splitlines()
    assert first.startswith("the run ended as failed: ")
    program, word, *typed = shlex.split(last.partition(": ")[2])
    assert (program, word) == ("coordinator", "run")
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    read = command.make_context("run", typed).params
    assert read["control"] == "fl.example.org:9093"
    assert Path(read["root_certificates"]) == tmp_path / "ca.crt"
    assert parse_overrides(list(read["run_config"]))["method"] == "fedavg"


@pytest.mark.parametrize("late", [0.0, 0.7])
@pytest.mark.parametrize(
    ("status", "how"),
    [("failed", "ended as finished:failed"), ("interrupted", "was interrupted")],
)
def test_the_reason_is_shown_also_if_it_is_recorded_after_flower_has_reported_the_end(
    tmp_path: Path, status: str, how: str, late: float
) -> None:
    """Flower reports the end of an app that gets SIGTERM before the app can record why."""
    folder = RunWriter(parse_run({"output-dir": str(tmp_path), "sites": 1}), 7)
    recording = threading.Timer(
        late, folder.end_early, (Outcome(), status, "Flower ended this app")
    )
    recording.start()
    shown = str(ended(folder.path, "finished:failed"))
    recording.join()
    assert shown.startswith(f"the run {how}: Flower ended this app")
