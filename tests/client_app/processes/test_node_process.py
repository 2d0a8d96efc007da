"""The process of a SuperNode: what its threads may print, and why it has ended, where it has no app."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.client_app.processes import node_process, supervisor
from fedsurrogate.client_app.processes.node_process import look_at_link
from fedsurrogate.client_app.processes.supervisor import TWIN, Commands, Supervisor
from fedsurrogate.common.errors import RunError


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (ValueError("Cannot monitor channel state: Channel closed!"), False),
        (ValueError("another"), True),
    ],
)
def test_only_a_closed_channel_ends_a_thread_in_silence(
    error: Exception,
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(threading, "excepthook", node_process._of_a_thread)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert ("Traceback" in capsys.readouterr().err) == printed


OPEN = Finding("port", "PASS", "open")
WRONG = Finding("key", "FAIL", "the clocks are more than 5 seconds apart", "set both by NTP")


def commands(said: str, look: object) -> Commands:
    """Of a SuperNode that says something and ends by an error."""
    code = f"import sys; print({said!r}); sys.exit(1)"
    return Commands(([sys.executable, "-c", code], {}), None, look)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "found", "why"),
    [
        ("Failed to activate SuperNode", [OPEN, WRONG], f"key: {WRONG.found}; {WRONG.remedy}"),
        ("Failed to activate SuperNode", [OPEN], TWIN),
        ("x", [OPEN], "its connection is good; its log names the cause"),
        ("x", None, "its connection could not be checked; its log names the cause"),
    ],
)
def test_why_a_node_ended_is_found_by_checking_not_guessed(
    said: str, found: list[Finding] | None, why: str
) -> None:
    def look() -> list[Finding]:
        if found is None:
            raise OSError
        return found

    lines = list[str]()
    with pytest.raises(RunError) as error:
        Supervisor(commands(said, look), lambda _, line: lines.append(line)).run()
    assert str(error.value) == f"the SuperNode has ended: {why}"
    assert said in lines


def test_a_node_that_ended_is_started_again_where_it_is_told_to() -> None:
    looks = list[float]()

    def look() -> list[Finding]:
        looks.append(1.0)
        if len(looks) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return [WRONG]

    lines = list[str]()
    Supervisor(commands("x", look), lambda _, line: lines.append(line), 0.1).run()
    again = (
        f"the SuperNode has ended: key: {WRONG.found}; {WRONG.remedy}; it is started again in 0.1 s"
    )
    assert lines.count(again) == 2
    assert lines.count("x") == 3
    assert supervisor.FIRST_PAUSE > 0.1, "the pause is the one that is given"


@pytest.mark.parametrize("slept", [0.0, 30.0, 3600.0])
def test_a_hospital_that_slept_is_told(slept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, clock = list[str](), iter([10.0, 10.0])

    def asleep() -> float:
        # A machine cannot sleep in a test.
        return next(clock, 10.0 + slept)

    def look() -> list[Finding]:
        if len(lines) > 3 or not slept:
            os.kill(os.getpid(), signal.SIGTERM)
        return [WRONG]

    monkeypatch.setattr(supervisor, "_asleep", asleep)
    Supervisor(commands("x", look), lambda _, line: lines.append(line), 0.1).run()
    told = [line for line in lines if "was asleep for 60 min" in line]
    assert len(told) == (slept == 3600.0), "once"


def test_the_node_waits_for_data_and_its_link_is_that_of_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[object]()
    monkeypatch.setattr(supervisor, "await_data", steps.append)
    monkeypatch.setattr(supervisor, "own_socket", lambda runtime: runtime)
    monkeypatch.setattr(supervisor, "look_at_link", lambda link: steps.append(link) or [])
    monkeypatch.setattr(Supervisor, "run", lambda self: self._commands.look())
    arguments = ["--superlink", "fl:9092", "--root-certificates", "ca.crt", "--node-config", "x=1"]
    umask = os.umask(0o077)
    try:
        supervisor.serve_node("unix:/x", arguments)
    finally:
        os.umask(umask)
    assert steps == ["unix:/x", arguments[:4]]


def test_the_connection_is_checked_by_a_program_whose_arguments_are_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, program = tmp_path / "asked.txt", tmp_path / "site"
    words = '"$@" "$FEDSURROGATE_ARGUMENTS"'
    row = '[{"what": "port", "state": "PASS", "found": "open", "remedy": ""}]'
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {words} > {asked}\necho '{row}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(supervisor.sys, "executable", str(tmp_path / "python"))
    link = ["--superlink", "fl:9092"]
    assert look_at_link(link) == [OPEN]
    seen, unseen = asked.read_text().splitlines()
    assert (seen, json.loads(unseen)) == ("doctor", ["--link-only", "--json", *link])
