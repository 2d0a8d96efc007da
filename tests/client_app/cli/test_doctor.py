"""`site doctor` without arguments asks what to examine, or lists what it needs."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import site
from tests.e2e.processes import PATIENCE

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


@pytest.mark.slow
def test_on_a_terminal_it_asks_and_examines_the_answers(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        f'# this site\ndata = "imagefolder"\ndata-dir = "{tmp_path}/missing"\nstate-dir = '
        f'"{tmp_path}/state"\n'
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        COMMAND,
        env=environment(tmp_path),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        os.write(ours, f"{file}\n\n".encode())
        shown, _ = process.communicate(timeout=PATIENCE)
    os.close(ours)
    os.close(theirs)
    assert "What shall be examined" in shown
    assert "FAIL" in shown
    assert f"{tmp_path}/missing" in shown
    assert process.returncode == 1


def test_a_health_check_of_no_connection_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site(monkeypatch, "doctor", "--link-only") == 2
    assert "--superlink" in capsys.readouterr().err
