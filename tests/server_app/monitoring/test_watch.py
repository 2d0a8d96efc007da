"""A run that is watched: to its end, once, by name; and its progress in words."""

import io
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.cli import monitoring
from fedsurrogate.server_app.monitoring.watch import Progress, progress_line, watch
from fedsurrogate.server_app.runs.state import state_of
from tests.commands import coordinator
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.server_app.runs.test_reader import make_run

ROUNDS = {"method": "fedavg", "fedavg.rounds": 3, "fedavg.local-epochs": 1}
# A terminal would clear its screen, set its title, ring; rich would use bold, or fail on an end tag
# without a start.
EVIL = "x\x1b[2J\x1b]0;title\x07\r\n\x9b31m[bold]loud[/red] :smile: \u202egnp.exe"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_federation(tmp_path_factory.mktemp("run"), sites(2), **ROUNDS)


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "runs" / original.name))


def change(folder: Path, **metrics: object) -> None:
    (folder / "metrics.json").write_text(json.dumps(metrics_of(folder) | metrics))


class CheckLog(io.StringIO):
    """Records with every line the current state of the only run below a folder. `began` is set by
    the first line.
    """

    def __init__(self, output: Path) -> None:
        super().__init__()
        self.output = output
        self.seen: list[str] = []
        self.began = threading.Event()

    def write(self, text: str) -> int:
        if text.strip():
            (metrics,) = self.output.glob("*/metrics.json")
            self.seen.append(json.loads(metrics.read_text())["status"])
            self.began.set()
        return super().write(text)

    def wait(self, reply: object) -> None:
        """Hold a reply back until something was written."""
        assert self.began.wait(120)


def test_a_run_is_watched_from_before_it_begins_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    out = CheckLog(tmp_path / "runs")
    # The first site answers once the watcher has shown a line, however busy the machine is.
    grid = InProcessGrid(sites(2), {0: Fault(reply=out.wait)})
    thread = threading.Thread(
        target=lambda: folders.append(run_federation(tmp_path, grid, **ROUNDS))
    )
    thread.start()
    monkeypatch.setattr(sys, "stdout", out)
    try:
        assert coordinator(monkeypatch, "watch", tmp_path / "runs", "--json", "--timeout", 300) == 0
    finally:
        thread.join()
    *events, metrics = (json.loads(line) for line in out.getvalue().splitlines())
    assert events == events_of(folders[0])
    assert metrics == metrics_of(folders[0])
    assert (out.seen[0], out.seen[-1]) == ("running", "ok")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
@pytest.mark.parametrize("options", [(), ("--json",), ("--once",), ("--once", "--json")])
def test_the_exit_code_is_the_run_s(
    run: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int, options: tuple[str, ...]
) -> None:
    change(run, status=status)
    assert coordinator(monkeypatch, "watch", run, *options) == code


def test_a_run_that_goes_on_is_shown_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    change(run, status="running")
    assert coordinator(monkeypatch, "watch", run.parent, "--once") == 0
    shown = capsys.readouterr().out
    assert "fedavg: running for" in shown
    assert "round 3 of 3 done" in shown
    assert "sites: 2 used" in shown
    assert coordinator(monkeypatch, "watch", run.parent, "--once", "--json") == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["status"], state["done"], state["folder"]) == ("running", 3, str(run))
    assert {name: site["doing"] for name, site in state["sites"].items()} == {
        "0": "evaluated",
        "1": "evaluated",
    }


def test_a_folder_is_watched_by_its_files_and_a_name_at_the_superlink(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    change(run, status="ok")
    monkeypatch.setenv("FEDSURROGATE_CONTROL", f"unix:{run}/nobody:9093")
    assert coordinator(monkeypatch, "watch", run) == 0
    capsys.readouterr()
    for named, code in ((run.name, 0), ("latest", 0), ("123456", 1)):
        words = ("watch", named, "--runs", run.parent)
        assert coordinator(monkeypatch, *words) == code
        assert (f"{run}/nobody" in capsys.readouterr().err) == bool(code), "no such SuperLink"
        assert coordinator(monkeypatch, *words, "--once") == 1
        assert "need a folder" in capsys.readouterr().err


def test_nothing_to_watch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for options, word in (
        (("--once",), "there is no run in"),
        (("--timeout", "0.1"), "no run has begun"),
        (("--json", "--timeout", "0.1"), "no run has begun"),
    ):
        assert coordinator(monkeypatch, "watch", tmp_path, *options) == 1
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert word in error


def test_the_next_run_is_not_one_that_is_there(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert coordinator(monkeypatch, "watch", run.parent, "--next", "--timeout", "0.1") == 1
    assert "no run has begun" in capsys.readouterr().err


def test_without_a_terminal_there_are_lines_without_control_characters(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert coordinator(monkeypatch, "watch", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert len(lines) == len(events_of(run)) + 5
    assert lines[-1] == str(run)


@pytest.mark.parametrize("terminal", [True, False])
def test_no_site_can_speak_to_the_terminal(run: Path, terminal: bool) -> None:
    lines = [
        {"event": "rejected", "site": EVIL, "reason": EVIL},
        {"event": EVIL, EVIL: EVIL, "list": [EVIL]},
    ]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    up: dict[str, Any] = {"up_per_site": {EVIL: 10}}
    change(run, status="failed", failure=EVIL, stopped=EVIL, method=EVIL, bytes=up)
    screen = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=200)
    assert not watch(run, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]loud[/red] :smile:" in shown
    for bad in ("\x1b[2J\x1b]", "\x1b]0", "\x07", "\x9b", "\u202e"):
        assert bad not in shown
    if not terminal:
        assert all(line.isprintable() for line in shown.splitlines())


def test_a_run_given_up_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    make_run(tmp_path / "runs", "r", "running", {"event": "invited", "sites": 1})
    assert coordinator(monkeypatch, "watch", tmp_path / "runs", "--json", "--timeout", "0.4") == 1
    out, error = capsys.readouterr()
    assert json.loads(out)["event"] == "invited"
    assert "its coordinator may have stopped" in error
    with pytest.raises(RunError, match="may have stopped"):
        watch(tmp_path / "runs", monitoring.console, 0.4)


def event(second: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "time": f"2026-01-01T00:{int(second) // 60:02}:{second % 60:06.3f}+00:00",
        "event": kind,
    } | fields


def training(
    done: int, rounds: int = 30, seconds: float = 4.0, start: int = 0
) -> list[dict[str, Any]]:
    """Events of a run in rounds; each takes `seconds`, and two sites send 600 kB each. Bytes of a
    site are those of this run alone if it was resumed after round `start`.
    """
    events = [event(0, "configured", method="fedavg", rounds=rounds), event(10, "invited", sites=2)]
    if start:
        events.append(event(20, "resumed", round=start))
    for index in range(start + 1, done + 1):
        at = (20 if start else 10) + seconds * (index - start)
        events += [
            event(at, "replied", site=name, round=index, bytes=600_000 * (index - start))
            for name in ("a", "b")
        ]
        events.append(event(at, "round", round=index, accuracy=0.5, bytes_up=1_200_000 * index))
    return events


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (training(0), "round 0 of 30 done"),
        (training(3), "round 3 of 30 done, 1 min 48 s left; 1.2 MB a round"),
        (training(27), "round 27 of 30 done, 12 s left; 1.2 MB a round"),
        (training(30), "round 30 of 30 done; 1.2 MB a round"),
        # A continued run is as fast as its rounds since then.
        (training(28, start=26), "round 28 of 30 done, 8 s left; 1.2 MB a round"),
        (
            [event(0, "configured", method="fedpft"), event(1, "invited", sites=2)],
            "round 0 of 1 done",
        ),
    ],
)
def test_the_line_has_steps_time_left_and_bytes(events: list[dict[str, Any]], line: str) -> None:
    assert progress_line(state_of(events)) == line


def test_one_cause_of_many_sites_is_written_once_and_in_full_at_the_end() -> None:
    """Sites of another cause keep their own, and a site's name may look like one."""
    cause, other = "none of the 60 images of 'imagefolder' can be read", "no reply" + " at all" * 9
    causes = {"0": cause, "as site 0": cause, "2": other, "3": cause, "4": "gone"}
    progress = Progress()
    lines = [
        progress.line(event(1, "rejected", site=name, reason=why)) for name, why in causes.items()
    ]
    failed = event(2, "failed", reason=f"quorum missed: 0 of 5; 3 of them: {cause}")
    lines.append(progress.line(failed))
    assert [line.partition("reason=")[2] for line in lines] == [
        cause,
        "as site 0",
        other,
        "as site 0",
        "gone",
        failed["reason"],
    ]
