"""A run whose app was killed is reported truly by everything that reads its folder, at whatever
write it died.
"""

import itertools
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from fedsurrogate.server_app.lifecycle import ends
from fedsurrogate.server_app.lifecycle.before_start import continuation
from fedsurrogate.server_app.lifecycle.ends import complete_killed
from fedsurrogate.server_app.monitoring.watch import look
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.reader import LiveRun, read_run
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.server_app.runs.writer_lock import (
    FILE,
    SILENT_SECONDS,
    WriterLock,
    writer_is_gone,
)
from fedsurrogate.strategies.base.outcome import Outcome, Site
from tests.commands import coordinator
from tests.e2e.processes import until
from tests.grid import events_of, metrics_of, run_folders

# A fork has everything imported already.
FORKS = multiprocessing.get_context("fork")
# Calls that change a folder, as Python's audit events name them.
CALLS = ("open", "os.rename", "os.mkdir", "os.remove", "os.chmod")
SETTINGS = 'method="fedavg" fedavg.rounds=200 fedavg.local-epochs=1'
Captured = pytest.CaptureFixture[str]


def write_run(output: Path) -> None:
    """All writes of a run in two rounds with three sites, one of which is rejected."""
    config = parse_run(
        {"output-dir": str(output), "method": "fedavg", "fedavg.rounds": 2, "sites": 4}
    )
    folder = RunWriter(config, 7)
    folder.event("configured", method="fedavg", rounds=2)
    for name in ("north", "south", "west"):
        folder.event("invited", site=name)
    folder.event("invited", sites=3, names="registered")
    folder.event("absent", site="east", reason="registered, and not connected")
    for number in (1, 2):
        folder.keep("checkpoint.safetensors", b"state" * 100)
        for name in ("north", "south"):
            folder.event("replied", site=name, round=number, bytes=1000 * number)
        folder.event("rejected", site="west", reason="not finite", bytes=10, round=number)
        folder.event("round", round=number, accuracy=0.5, bytes_up=2010 * number)
    sites = {
        1: Site("north", "used", "", 2000),
        2: Site("south", "used", "", 2000),
        3: Site("west", "rejected", "bad", 10),
    }
    folder.finish(Outcome(sites, names="registered", absent=["east"]), "ok")


def killed(act: Callable[[], None], stop: int, below: Path) -> bool:
    """Do work in another process, which is killed before its change number `stop` below a folder;
    True if it ended first.
    """

    def child() -> None:
        calls = itertools.count()

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            if event in CALLS and str(arguments[0]).startswith(str(below)) and next(calls) == stop:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        act()

    process = FORKS.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


# The change of `write_run` at which a run has replies of its first round.
IN_THE_FIRST_ROUND = 31


def killed_run(output: Path) -> Path:
    """The folder of a run that was killed in its first round."""
    assert not killed(lambda: write_run(output), IN_THE_FIRST_ROUND, output)
    (folder,) = run_folders(output)
    return folder


def content_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder, hidden ones too: its content and its time. A writer that exists
    touches its own.
    """
    return {
        file.relative_to(folder).as_posix(): (
            file.read_bytes(),
            file.name != FILE and file.stat().st_mtime_ns,
        )
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_reading_a_killed_run_changes_nothing_and_shows_its_end(tmp_path: Path) -> None:
    folder = killed_run(tmp_path)
    before = content_of(folder)
    live = LiveRun(folder)
    live.refresh()
    run = read_run(folder)
    assert content_of(folder) == before
    assert live.state.status == run.metrics["status"] == "interrupted"
    assert run.failure == live.state.failure
    assert "without recording why" in run.failure
    assert run.metrics["sites"] == {"invited": 3, "used": 2, "rejected": 1, "dropped": 0}
    page = write_report(folder).read_text()
    assert "was interrupted" in page
    (folder / "report.html").unlink()
    assert content_of(folder) == before


def test_the_end_that_is_written_is_what_readers_saw_and_is_drawn_once(tmp_path: Path) -> None:
    folder = killed_run(tmp_path)
    seen, before = read_run(folder).metrics, set(content_of(folder))
    complete_killed(folder)
    assert metrics_of(folder) == seen
    assert events_of(folder)[-1]["event"] == "interrupted"
    assert set(content_of(folder)) == before - {FILE, ".reserve"} | {"report.html"}
    (folder / "report.html").unlink()
    complete_killed(folder)
    assert not (folder / "report.html").exists(), "it has an end now"


def test_a_killed_run_that_many_commands_read_at_once_gets_one_end(tmp_path: Path) -> None:
    folder, together = killed_run(tmp_path), FORKS.Barrier(8)

    def command() -> None:
        together.wait(30)
        complete_killed(folder)

    processes = [FORKS.Process(target=command) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert [event["event"] for event in events_of(folder)].count("interrupted") == 1
    assert metrics_of(folder)["status"] == "interrupted"


@pytest.mark.slow
def test_killed_at_any_write_the_run_is_interrupted_and_everything_that_was_recorded_is_in_the_result(
    tmp_path: Path,
) -> None:
    seen = set()
    for stop in itertools.count():
        output = tmp_path / str(stop)
        lived = killed(lambda output=output: write_run(output), stop, output)  # type: ignore[misc]
        for folder in run_folders(output):
            complete_killed(folder)
            live = LiveRun(folder)
            live.refresh()
            state, metrics = live.state, metrics_of(folder)
            seen.add(state.status)
            assert state.status == metrics["status"]
            assert lived or state.status in ("interrupted", "ok"), stop
            run = read_run(folder)
            assert (folder / "report.html").exists() or state.status == "ok"
            events = [event for event in events_of(folder) if event["event"] == "round"]
            if state.status == "interrupted":
                assert [each["round"] for each in metrics["rounds"]] == [
                    each["round"] for each in events
                ]
                assert metrics["bytes"]["up"] == sum(site.bytes or 0 for site in run.sites)
                assert "without recording why" in metrics["failure"]
                again = (
                    "continue it"
                    if (folder / "checkpoint.safetensors").exists()
                    else "start it again"
                )
                assert again in continuation(folder)
                assert not (folder / FILE).exists()
            if events and state.status == "interrupted":
                assert metrics["sites"] == {"invited": 3, "used": 2, "rejected": 1, "dropped": 0}
                assert metrics["card"]["absent"] == ["east"]
                assert metrics["card"]["names"] == "registered"
        if lived:
            break
    assert stop > 20, "every write was tried"
    assert seen == {"interrupted", "ok"}


@pytest.mark.slow
def test_a_killed_simulation_is_reported_and_the_printed_command_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = [
        "simulate",
        "--sites",
        "2",
        "--engine",
        "local",
        "-c",
        f'{SETTINGS} output-dir="{tmp_path}/runs"',
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fedsurrogate.server_app.cli.main", *words],
        env=os.environ | {"PYTHONPATH": str(APP_FOLDER), "HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        until(
            lambda: (
                '"event": "round", "round": 2'
                in "".join(f.read_text() for f in tmp_path.glob("runs/*/events.jsonl"))
            )
        )
        assert coordinator(monkeypatch, "watch", tmp_path / "runs", "--once") == 0
        process.kill()
    capsys.readouterr()
    (folder,) = run_folders(tmp_path / "runs")
    assert metrics_of(folder)["status"] == "running", "nothing has read it"
    assert coordinator(monkeypatch, "watch", tmp_path / "runs", "--once") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "interrupted" in shown
    assert 'resume=\\"' in shown or "resume=" in shown
    metrics = metrics_of(folder)
    assert metrics["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    assert metrics["bytes"]["up"] > 0
    assert len(metrics["rounds"]) >= 2
    assert "2 of 2 sites had replied" in (folder / "report.html").read_text()
    assert coordinator(monkeypatch, "report", folder) == 0
    program, *words = shlex.split(continuation(folder).removeprefix("continue it: "))
    assert (program, words[0]) == ("coordinator", "simulate")
    assert words[words.index("--sites") + 1] == "2"
    assert f'resume="{folder}"' in words[-1]


def test_a_writer_that_exists_is_left_alone(tmp_path: Path) -> None:
    folder = RunWriter(parse_run({"output-dir": str(tmp_path)}), 7)
    assert not writer_is_gone(folder.path)
    check = (
        "from fedsurrogate.server_app.runs.writer_lock import writer_is_gone; from pathlib import Path; "
        "import sys"
    )
    command = [
        sys.executable,
        "-c",
        f"{check}; print(writer_is_gone(Path(sys.argv[1])))",
        str(folder.path),
    ]
    environment = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    before = content_of(folder.path)
    complete_killed(folder.path)
    live = LiveRun(folder.path)
    look(live)
    assert live.state.status == "running"
    assert content_of(folder.path) == before
    folder.finish(Outcome(), "failed", "no site")
    assert not list(folder.path.glob(".*"))
    assert read_run(folder.path).failure == "no site"


def test_on_another_machine_the_heartbeat_shows_whether_the_writer_exists(tmp_path: Path) -> None:
    writer = WriterLock(tmp_path)
    writer.close()
    (tmp_path / FILE).write_text(json.dumps({"boot": "another", "host": "far", "pid": 1}))
    assert not writer_is_gone(tmp_path)
    old = (tmp_path / FILE).stat().st_mtime - SILENT_SECONDS - 5
    os.utime(tmp_path / FILE, (old, old))
    assert writer_is_gone(tmp_path)


def test_a_folder_that_cannot_be_written_is_shown_truly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config = parse_run({"output-dir": str(tmp_path)})

    def begin() -> None:
        RunWriter(config, 7).event("configured", method="fedpft")
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORKS.Process(target=begin)
    process.start()
    process.join(60)

    def refuse(*_: object) -> None:
        raise OSError(30, "read-only file system")

    monkeypatch.setattr(ends, "_record", refuse)
    (folder,) = run_folders(tmp_path)
    assert coordinator(monkeypatch, "watch", folder, "--once") == 1
    assert "interrupted" in capsys.readouterr().out
    assert metrics_of(folder)["status"] == "running"


@pytest.mark.parametrize("mask", [0o022, pytest.param(0o077, marks=pytest.mark.slow)])
def test_results_follow_the_umask_and_what_sites_sent_is_for_this_account_only(
    tmp_path: Path, mask: int
) -> None:
    from tests.grid import run_federation, sites

    before = os.umask(mask)
    try:
        folder = run_federation(tmp_path, sites(2), **{"head.min-steps": 5, "head.epochs": 1})
        chain = run_federation(
            tmp_path / "chain",
            sites(2),
            **{"head.min-steps": 5, "head.epochs": 1, "fedpft.topology": "chain"},
        )
    finally:
        os.umask(before)
    modes = {
        file.relative_to(folder).as_posix(): file.stat().st_mode & 0o777
        for file in folder.rglob("*")
        if file.is_file()
    }
    sent = {name for name in modes if name.startswith("surrogates/")}
    assert len(sent) == 2
    assert {"model.safetensors", "metrics.json", "events.jsonl", "model.fedsurrogate"} <= set(modes)
    assert modes == {name: 0o600 if name in sent else 0o666 & ~mask for name in modes}
    assert (chain / "relay.bin").stat().st_mode & 0o777 == 0o600
