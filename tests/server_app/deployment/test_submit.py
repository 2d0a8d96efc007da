"""Submitting a run to a SuperLink."""

import socket
from pathlib import Path

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
    monkeypatch.setattr(submit, "submit", None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert commands.coordinator(monkeypatch, *command, "--control", address) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert address in line
    assert "no SuperLink listens there" in line
