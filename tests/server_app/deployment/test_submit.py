"""Following a run that was submitted to a SuperLink."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.server_app.deployment import submit
from tests import commands


@pytest.mark.parametrize("command", [("run",), ("survey", "--classes", "a,b")])
def test_without_a_superlink_nothing_is_started(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit.subprocess, "Popen", None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert commands.coordinator(monkeypatch, *command, "--control", address) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert address in line
    assert "no SuperLink listens there" in line


@pytest.mark.parametrize("pending", [True, False])
def test_a_run_that_does_not_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    monkeypatch.setattr(submit, "LOOK_SECONDS", 0.1)
    (tmp_path / "log").write_text("Successfully started run 7")
    reported: list[dict[str, Any]] = []
    with subprocess.Popen(["sleep", "1"]) as process:
        assert (
            submit._follow(process, tmp_path / "log", tmp_path, reported.append, lambda: pending)
            is None
        )
    assert {event["event"] for event in reported} == ({"waiting"} if pending else set())
    assert all("coordinator app" in event["reason"] for event in reported)
