"""The process of a SuperNode: what its threads may print."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsurrogate.client_app.processes import node_process
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.interface import SignatureRefusedError


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


def test_a_node_connects_after_it_has_waited_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[str]()
    monkeypatch.setattr(node_process, "await_data", steps.append)
    monkeypatch.setattr(node_process, "configure_log", lambda _: None)
    connected = SimpleNamespace(supernode=lambda runtime, _: steps.append(f"connected {runtime}"))
    monkeypatch.setattr(node_process, "flower", lambda: connected)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    umask = os.umask(0o077)
    try:
        node_process.serve("unix:/x", ())
    finally:
        os.umask(umask)
    assert steps == ["unix:/x", "connected unix:/x"]


FINDINGS = {
    "TLS": ("the certificate is refused: certificate has expired", "ask the coordinator"),
    "key": ("the clocks are more than 5 seconds apart", "set both clocks by NTP"),
}


@pytest.mark.parametrize("wrong", [*FINDINGS, None])
@pytest.mark.parametrize("error", ["RpcError: {Failed to activate SuperNode.}", "ValueError: x"])
def test_why_a_node_ended_is_found_by_checking_not_guessed(
    wrong: str | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"what": "way", "state": "PASS", "found": "open", "remedy": ""}]
    if wrong:
        found, remedy = FINDINGS[wrong]
        rows.append({"what": wrong, "state": "FAIL", "found": found, "remedy": remedy})
    asked = tmp_path / "asked.txt"
    program = tmp_path / "site"
    words = '"$@" "$FEDSURROGATE_ARGUMENTS"'
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {words} > {asked}\ncat {tmp_path}/rows.json\n")
    program.chmod(0o755)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setattr(node_process.sys, "executable", str(tmp_path / "python"))
    arguments = ["--superlink", "fl:9092", "--root-certificates", "ca.crt", "--node-config", "x=1"]
    why = node_process.why_ended(error, arguments)
    if wrong:
        assert why.endswith(f"{wrong}: {'; '.join(FINDINGS[wrong])}")
    elif "activate" in error:
        assert "a node with this key is connected already" in why
    else:
        assert "its connection is good" in why
        assert "ValueError" in why
    seen, unseen = asked.read_text().splitlines()
    assert (seen, json.loads(unseen)) == ("doctor", ["--link-only", "--json", *arguments[:4]])
    assert "\n" not in why


def test_a_connection_that_could_not_be_checked_is_not_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process.sys, "executable", str(tmp_path / "python"))
    why = node_process.why_ended("ValueError: x", ["--superlink", "fl:9092"])
    assert "could not be checked" in why
    assert "good" not in why


@pytest.mark.parametrize("retry", [0.0, 0.01])
def test_a_node_that_ended_says_why_in_its_next_process(
    retry: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ReplacedError(Exception):
        """This process is replaced by another."""

    def replace(*_: object) -> None:
        raise ReplacedError

    def fail(*_: object) -> None:
        raise SignatureRefusedError("not this key")

    monkeypatch.setattr(node_process, "await_data", lambda _: None)
    monkeypatch.setattr(node_process, "configure_log", lambda _: None)
    monkeypatch.setattr(node_process, "why_ended", lambda error, _: f"because {error}")
    monkeypatch.setattr(node_process, "flower", lambda: SimpleNamespace(supernode=fail))
    monkeypatch.setattr(node_process.os, "execve", replace)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv(node_process.ENDED, "")
    umask = os.umask(0o077)
    try:
        with pytest.raises(ReplacedError):
            node_process.serve("unix:/x", (), retry)
        assert os.environ[node_process.ENDED] == "SignatureRefusedError: not this key"
        with pytest.raises(ReplacedError if retry else RunError) as second:
            node_process.serve("unix:/x", (), retry)
    finally:
        os.umask(umask)
    said = capsys.readouterr().err if retry else str(second.value)
    assert "because SignatureRefusedError: not this key" in said
