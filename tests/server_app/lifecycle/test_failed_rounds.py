"""A run in rounds that fails: what a person reads, and that the command it shows works."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.settings.flat import parse_overrides
from fedsurrogate.server_app.deployment.control import ended
from fedsurrogate.server_app.monitoring.watch_view import summary
from fedsurrogate.server_app.runs.reader import LiveRun, run_folders
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
