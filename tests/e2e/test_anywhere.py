"""A simulation works on odd machines, with real processes: paths with blanks, no home, no memory,
killed processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fedsurrogate.client_app.processes.own_account import own_folder
from fedsurrogate.server_app.deployment import submit as flower_engine
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, flower_environment, stop_process
from fedsurrogate.server_app.lifecycle.before_start import DID_NOT_START
from tests.children import ok
from tests.e2e.environments import checkout_at, environment_at, simulate, variables
from tests.e2e.processes import COORDINATOR, free_ports, submit, until, wait
from tests.grid import events_of, metrics_of, run_folders

FAST = "test-fraction=0.8 head.min-steps=100 fedpft.rank=4"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkout in a folder with a blank and an umlaut, and the `bin` of an environment in it."""
    folder = tmp_path_factory.mktemp("odd") / "mein projekt ä"
    folder.mkdir()
    return checkout_at(folder), environment_at(folder)


def test_a_superlink_makes_its_tables_in_a_path_with_a_blank(
    odd: tuple[Path, Path], tmp_path: Path
) -> None:
    checkout, scripts = odd
    flags = ["--database", "state.db", "--fleet-api-address", f"127.0.0.1:{free_ports(1)[0]}"]
    command = [scripts / "coordinator", "superlink", "--insecure", *flags]
    own = variables(checkout, FLWR_HOME=str(tmp_path), HOME=str(tmp_path))
    # Below `tmp_path`, the path of a socket may be too long.
    with own_folder() as sockets:
        own["FEDSURROGATE_CONTROL"] = f"unix:{sockets}/control:9093"
        with subprocess.Popen(command, cwd=tmp_path, env=own) as process:
            try:
                until(lambda: "objectstore_locks" in tables(tmp_path / "state.db"), 60)
            finally:
                stop_process(process.pid)


def tables(file: Path) -> set[str]:
    """Names of the tables of a database, none if there is no file."""
    if not file.exists():
        return set()
    with closing(sqlite3.connect(file)) as database:
        return {
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }


# A folder that nobody can make, not even root.
NOWHERE = "/proc/nowhere"


@pytest.fixture
def odd_machine(tmp_path: Path) -> dict[str, str]:
    """No home folder, an ASCII locale, and a folder for temporary files with a blank, an umlaut and
    a long path.
    """
    temporary = tmp_path / ("ein langer Name ä " * 3)
    temporary.mkdir()
    plain = {
        key: value
        for key, value in variables().items()
        if not key.startswith(("XDG_", "LANG", "LC_", "RAY_"))
    }
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return plain | locale | {"HOME": NOWHERE, "TMPDIR": str(temporary)}


@pytest.mark.parametrize("engine", ["flower", "local"])
def test_a_simulation_runs_on_an_odd_machine(
    odd: tuple[Path, Path], odd_machine: dict[str, str], tmp_path: Path, engine: str
) -> None:
    """And with a checkout and an environment in a path with a blank and an umlaut, one core, a strict
    umask, and a working folder that another user owns.
    """
    checkout, scripts = odd
    before = [
        "sh",
        "-c",
        'umask 077; exec "$@"',
        "sh",
        *(["taskset", "-c", one_core()] if shutil.which("taskset") else []),
    ]
    settings = f'{FAST} output-dir="{tmp_path}/läufe"'
    found = ok(
        simulate(
            "--engine",
            engine,
            "--sites",
            "2",
            "-c",
            settings,
            cwd=Path("/proc"),
            env=odd_machine | {"PYTHONPATH": str(checkout)},
            before=before,
            command=[scripts / "coordinator"],
        )
    )
    (folder,) = run_folders(tmp_path / "läufe")
    assert metrics_of(folder)["sites"]["used"] == 2
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "report.html").is_file()
    warnings = [
        line for line in found.stderr.splitlines() if " warning " in line and "XDG_" in line
    ]
    assert ["XDG_STATE_HOME" in warnings[0], "XDG_CACHE_HOME" in warnings[1]] == [True, True]
    assert not list(Path(odd_machine["TMPDIR"]).iterdir())


def one_core() -> str:
    return str(min(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("engine", "kib"), [("local", 600_000), ("flower", 600_000), ("flower", 6_000_000)]
)
def test_few_addresses_are_refused_in_one_line_that_names_ulimit(
    tmp_path: Path, engine: str, kib: int
) -> None:
    before = ["sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh"]
    found = simulate(
        "--engine", engine, "--sites", "2", "-c", FAST, cwd=tmp_path, env=variables(), before=before
    )
    assert found.returncode == 1
    *warnings, line = found.stderr.splitlines()
    assert all(" warning " in each or each.endswith(" ...") for each in warnings), warnings
    assert f"`ulimit -v` = {kib}" in line
    assert run_folders(tmp_path / "runs") == []


@contextmanager
def watched(
    kind: str, act: Callable[[psutil.Process], object], *options: str, cwd: Path
) -> Iterator[subprocess.Popen[str]]:
    """A simulation, in which the first process with `kind` in its command line meets with `act`."""
    words = [*COORDINATOR, "simulate", *options]
    with subprocess.Popen(
        words, cwd=cwd, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            until(lambda: run.poll() is not None or met(run.pid, kind, act), 80)
            yield run
        finally:
            stop_process(run.pid)


def met(parent: int, kind: str, act: Callable[[psutil.Process], object]) -> bool:
    with suppress(psutil.Error):
        for process in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.Error):
                if any(word.startswith(kind) or word.endswith(kind) for word in process.cmdline()):
                    act(process)
                    return True
    time.sleep(0.02)
    return False


def test_a_site_whose_process_is_killed_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    options = ("--sites", "4", "--parallel", "1", "-c", FAST)
    with watched("ray::ClientAppActor.run", psutil.Process.kill, *options, cwd=tmp_path) as run:
        _, errors = run.communicate(timeout=80)
    assert run.returncode == 0, errors
    (folder,) = run_folders(tmp_path / "runs")
    assert metrics_of(folder)["sites"] == {"invited": 4, "used": 3, "rejected": 1, "dropped": 0}
    (event,) = (event for event in events_of(folder) if event["event"] == "rejected")
    assert "was killed, most likely for lack of memory" in event["reason"]
    assert event["site"] in json.dumps(metrics_of(folder)["card"])


def test_the_end_of_rays_server_ends_the_run_soon_and_with_a_reason(tmp_path: Path) -> None:
    """Workers outlive their server by a few seconds, so that a short run would still succeed."""
    options = (
        "--sites",
        "4",
        "--parallel",
        "2",
        "-c",
        'method="fedlap" fedlap.rounds=30 quorum=1.0',
    )

    def kill_server(worker: psutil.Process) -> None:
        next(each for each in worker.parents() if each.name() == "raylet").kill()

    with watched("ray::ClientAppActor.run", kill_server, *options, cwd=tmp_path) as run:
        _, errors = run.communicate(timeout=80)
    assert run.returncode == 1
    (folder,) = run_folders(tmp_path / "runs")
    assert metrics_of(folder)["status"] in ("failed", "interrupted")
    assert metrics_of(folder)["failure"] in errors
    assert "memory" in metrics_of(folder)["failure"], metrics_of(folder)["failure"]


def test_a_slow_agent_of_ray_is_waited_for_longer_than_ray_does(tmp_path: Path) -> None:
    """A busy machine, played: the raylet gives its agents 15 seconds to start, and Ray does not
    start without them.
    """
    stopped: list[psutil.Process] = []

    def stop(process: psutil.Process) -> None:
        process.suspend()
        stopped.append(process)

    with watched(
        "runtime_env/agent/main.py",
        stop,
        *("--engine", "flower", "--sites", "1", "-c", FAST),
        cwd=tmp_path,
    ) as run:
        time.sleep(17)
        stopped[0].resume()
        _, errors = run.communicate(timeout=80)
    assert run.returncode == 0, errors
    assert "trying again" not in errors


def test_under_flowers_own_command_a_ray_that_does_not_start_leaves_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", NOWHERE)
    settings = f'{FAST} output-dir="{tmp_path}/runs"'
    with flower_engine.superlink(tmp_path, flower_environment(tmp_path)) as control:
        trust = f'[superlink.here]\naddress = "{control}"\ninsecure = true\n'
        (tmp_path / "config.toml").write_text(trust)
        options = ("--federation-config", "num-supernodes=2", "--run-config", settings)
        run_id = submit(tmp_path, "here", APP_FOLDER, tmp_path, *options)
        assert wait(tmp_path, "here", run_id, 80) == "finished:failed"
    (folder,) = run_folders(tmp_path / "runs")
    assert metrics_of(folder)["status"] == "failed"
    assert metrics_of(folder)["failure"].startswith(f"{DID_NOT_START}: ")
    assert NOWHERE in metrics_of(folder)["failure"]
    assert "--engine local" in metrics_of(folder)["failure"]
    assert (folder / "report.html").is_file()
