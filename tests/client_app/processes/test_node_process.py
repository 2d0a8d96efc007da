"""The process of a SuperNode: what its threads may print, and why it has ended, where it has no app."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from fedsurrogate.client_app.diagnostics.connection_checks import Finding
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


# What a channel of gRPC does at the end of an interpreter, at times: it waits for a thread that has ended.
HELD = """
import sys, threading
from fedsurrogate.client_app.processes.own_account import end_after

class Channel:
    def __del__(self):
        threading.Event().wait()

channel = Channel()
end_after(lambda: {work})
"""


@pytest.mark.parametrize(
    ("work", "code", "printed"),
    [
        ("print('done')", 0, "done"),
        ("sys.exit('no key')", 1, "no key"),
        ("sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_process_ends_although_a_channel_waits_for_ever(
    work: str, code: int, printed: str
) -> None:
    command = [sys.executable, "-c", HELD.format(work=work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert (done.stdout + done.stderr).strip().endswith(printed)


def test_an_error_of_a_connection_has_one_line_in_the_log_and_of_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower logs it with its trace, as a part of a text, and as itself; other errors keep theirs."""
    log, shown = logging.getLogger("flwr"), io.StringIO()
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(shown)])
    monkeypatch.setattr(threading, "excepthook", None)
    node_process.shorten_errors()
    call = grpc.insecure_channel("127.0.0.1:1").unary_unary("/no/thing")

    def fail() -> None:
        call(b"", timeout=60)

    with pytest.raises(grpc.RpcError) as error:
        fail()
    log.error("Failed to push 100 %", exc_info=error.value)
    log.error("Failed to push: %s", str(error.value))
    log.error(error.value)
    log.error("Failed", exc_info=ValueError("Cannot invoke RPC on closed channel!"))
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    lines = [*shown.getvalue().splitlines(), *capsys.readouterr().err.splitlines()]
    assert len(lines) == 5, lines
    assert lines[0].startswith("Failed to push 100 %: UNAVAILABLE: ")
    assert sum("UNAVAILABLE" in line for line in lines) == 4
    log.error("x", exc_info=ValueError("y"))
    assert "ValueError: y" in shown.getvalue().splitlines()


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


@pytest.mark.parametrize("longest", [0.5, 60.0])
def test_a_site_that_was_stopped_says_for_how_long(
    longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is stopped, as a laptop's that sleeps, while a site of it waits."""
    lines = list[str]()
    stops = 'kill -STOP "$1"; sleep 1.5; kill -CONT "$1"; sleep 1; kill -TERM "$1"'
    monkeypatch.setattr(supervisor, "SLEPT", longest)
    site = Supervisor(commands("x", lambda: [WRONG]), lambda _, line: lines.append(line), 60.0)
    with subprocess.Popen(["sh", "-c", f"sleep 1; {stops}", "sh", str(os.getpid())]):
        site.run()
    told = [line for line in lines if "was asleep, or this program was stopped, for" in line]
    assert len(told) == (longest < 60), "once"


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
