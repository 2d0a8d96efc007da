"""Ctrl-C on a run of real processes: it is stopped everywhere, its folder says so, and no process
is left.
"""

import signal
import subprocess
from pathlib import Path

import pytest

from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.e2e.processes import COORDINATOR, environment, events, federation, newest, until
from tests.grid import metrics_of

pytestmark = pytest.mark.faults
SETTINGS = 'method="fedavg" fedavg.rounds=200 fedavg.local-epochs=1'


def interrupt(tmp_path: Path, *words: str) -> tuple[int, str]:
    """Start the command, and send Ctrl-C to its process group after two rounds, as a terminal does."""
    output = tmp_path / "out"
    command = [*COORDINATOR, *words, "-c", f'{SETTINGS} output-dir="{output}"']
    settings = environment(tmp_path) | {"PYTHONPATH": str(APP_FOLDER), "HOME": str(tmp_path)}
    with subprocess.Popen(
        command, env=settings, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        until(lambda: len(events(output, "round")) >= 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def test_an_interrupted_simulation_of_flower_is_marked(tmp_path: Path) -> None:
    code, errors = interrupt(tmp_path, "simulate", "--engine", "flower", "--sites", "2")
    folder, metrics = newest(tmp_path / "out")
    assert code == 130
    assert metrics["status"] == "interrupted"
    assert len(metrics["rounds"]) >= 2
    assert metrics["bytes"]["up"] > 0
    assert f'resume="{folder}"' in errors
    assert (folder / "report.html").exists()


def test_an_interrupted_run_is_stopped_at_its_superlink_which_takes_the_next(
    tmp_path: Path,
) -> None:
    node = f'site="north" data="digits" cache-dir="{tmp_path}/c" state-dir="{tmp_path}/north"'
    with federation(tmp_path / "flower", [node]) as running:
        code, errors = interrupt(tmp_path, "run", *running.control)
        folder, metrics = newest(tmp_path / "out")
        assert code == 130
        assert metrics["status"] == "interrupted"
        assert events(tmp_path / "out", "interrupted")
        assert f'resume="{folder}"' in errors
        assert "coordinator run --control" in errors
        # Nothing writes into the folder any more.
        count = len(events(tmp_path / "out", "round"))
        next_run = running.submit(
            f'head.min-steps=10 head.epochs=1 output-dir="{tmp_path}/next"', tmp_path
        )
        assert running.wait(next_run) == "finished:completed"
        assert len(events(tmp_path / "out", "round")) == count
        assert metrics_of(folder)["status"] == "interrupted"
