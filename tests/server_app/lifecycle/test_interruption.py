"""An interrupted run says so in its folder, ends those who watch it, and can be continued with the
printed command.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from fedsurrogate.server_app.lifecycle.before_start import Interrupted, goodbye, interruptible
from fedsurrogate.server_app.lifecycle.ends import complete_interrupted
from tests.commands import coordinator
from tests.e2e.processes import PATIENCE, until
from tests.grid import events_of, metrics_of, run_folders

# Enough that a busy machine sees the second round long before the last.
ROUNDS = 100
SETTINGS = f'method="fedavg" fedavg.rounds={ROUNDS} fedavg.local-epochs=1'


def interrupted(tmp_path: Path, engine: str, number: signal.Signals) -> tuple[int, str]:
    """Start a long simulation, and send the signal to its whole process group after two rounds, as
    a terminal does.
    """
    words = [
        "simulate",
        "--sites",
        "2",
        "--engine",
        engine,
        "-c",
        f'{SETTINGS} output-dir="{tmp_path}/runs"',
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fedsurrogate.server_app.cli.main", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(APP_FOLDER), "HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        until(
            lambda: (
                '"round": 2' in "".join(f.read_text() for f in tmp_path.glob("runs/*/events.jsonl"))
            )
        )
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


@pytest.mark.slow
def test_an_interrupted_simulation_is_marked_and_the_printed_command_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = interrupted(tmp_path, "local", signal.SIGINT)
    assert code == 130
    (folder,) = run_folders(tmp_path / "runs")
    metrics = metrics_of(folder)
    assert metrics["status"] == "interrupted"
    assert metrics["failure"].startswith("interrupted by")
    assert events_of(folder)[-1]["event"] == "interrupted"
    assert (folder / "report.html").exists()
    assert "Traceback" not in errors
    # `watch` ends by itself, and reports that the run did not succeed.
    assert coordinator(monkeypatch, "watch", folder) == 1
    assert "interrupted" in capsys.readouterr().out
    (line,) = (line for line in errors.splitlines() if line.startswith("continue it: "))
    program, *words = shlex.split(line.removeprefix("continue it: "))
    assert program == "coordinator"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert coordinator(monkeypatch, *words) == 0
    resumed = run_folders(tmp_path / "runs")[-1]
    assert [entry["round"] for entry in metrics_of(resumed)["rounds"]] == list(range(1, ROUNDS + 1))
    assert events_of(resumed)[0]["event"] == "configured"


def test_only_the_first_signal_counts_and_handlers_return() -> None:
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(5)
            finally:
                # While the run is being ended.
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stop:
        work()
    assert stop.value.exit_code == 143
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_has_succeeded_is_not_marked(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"status": "ok"}')
    complete_interrupted(tmp_path, "interrupted by Ctrl-C")
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"status": "ok"}
    assert not (tmp_path / "events.jsonl").exists()


def test_a_half_written_event_of_a_killed_run_does_not_hide_the_interruption(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.json").write_text('{"status": "running"}')
    (tmp_path / "events.jsonl").write_text('{"event": "invited"}\n{"event": "rou')
    complete_interrupted(tmp_path, "interrupted by Ctrl-C")
    assert (
        json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["event"]
        == "interrupted"
    )
    assert metrics_of(tmp_path)["status"] == "interrupted"


@pytest.mark.parametrize(
    ("settings", "arrived", "wanted"),
    [
        ({"method": "fedpft"}, 3, "coordinator refit"),
        ({"method": "ensemble"}, 1, "coordinator refit"),
        ({"method": "fedpft", "fedpft.covariance": "gram"}, 2, "coordinator refit"),
        ({"method": "fedpft"}, 0, "nothing is left to continue from"),
        ({"method": "fedpft", "secure-aggregation": True, "classes": "a,b"}, 2, "nothing is left"),
        ({"method": "fedavg"}, 2, "nothing is left to continue from"),
    ],
)
def test_what_sites_have_sent_is_learned_from_in_place_of_asking_again(
    settings: dict[str, str | bool], arrived: int, wanted: str, tmp_path: Path
) -> None:
    (tmp_path / "surrogates").mkdir()
    for number in range(arrived):
        (tmp_path / "surrogates" / f"{number}.pb").write_bytes(b"")
    stop = Interrupted(signal.SIGTERM)
    stop.folder = tmp_path
    _, line = goodbye(stop, ["coordinator", "run"], settings)
    assert wanted in line
    assert ("refit" in wanted) == (f"what {arrived} sites have sent" in line)
    assert "start it again: coordinator run" in line


def test_a_simulation_that_is_stopped_before_it_learns_is_learned_from_its_surrogates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", "--engine", "local", "--sites", "2"]
    words += ["-c", f'output-dir="{tmp_path}/runs"']
    assert coordinator(monkeypatch, *words) == 0
    (folder,) = run_folders(tmp_path / "runs")
    for name in ("metrics.json", "model.safetensors", "report.html"):
        (folder / name).unlink()
    stop = Interrupted(signal.SIGTERM)
    stop.folder = folder
    _, line = goodbye(stop, ["coordinator", "simulate"], {"seed": 0})
    command = line.partition("nothing more: ")[2].partition(";")[0]
    assert coordinator(monkeypatch, *shlex.split(command)[1:]) == 0
