"""`site doctor` without arguments lists what it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import site

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "fedsurrogate.client_app.cli.main", "doctor"]


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "FEDSURROGATE_NODE_CONFIG"}
    return kept | {"PYTHONPATH": str(ROOT), "HOME": str(home)}


def test_without_a_terminal_it_lists_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert all(
        option in done.stderr
        for option in ("--node-config", "--superlink", "--run-config", "site settings")
    )


def test_a_health_check_of_no_connection_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site(monkeypatch, "doctor", "--link-only") == 2
    assert "--superlink" in capsys.readouterr().err
