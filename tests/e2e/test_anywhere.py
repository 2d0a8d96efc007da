"""A simulation works on odd machines, with real processes: paths with blanks, no home, no memory, killed processes."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from server_app.deployment.submit import stop_process
from tests.e2e.environments import checkout_at, environment_at, simulate, variables
from tests.e2e.processes import free_ports, until

FAST = "test-fraction=0.8 head.min-steps=100 fedpft.rank=4"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkout in a folder with a blank and an umlaut, and the `bin` of an environment in it."""
    folder = tmp_path_factory.mktemp("odd") / "mein projekt ä"
    folder.mkdir()
    return checkout_at(folder), environment_at(folder)


def test_a_simulation_runs_in_a_path_with_a_blank_and_an_umlaut(odd: tuple[Path, Path]) -> None:
    checkout, scripts = odd
    found = simulate(*("--sites", "2", "-c", FAST), cwd=checkout, env=variables(checkout), command=[scripts / "coordinator"])
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.splitlines()[-1])
    assert folder.parent == checkout / "runs"
    assert (folder / "report.html").is_file()


def test_a_superlink_makes_its_tables_in_a_path_with_a_blank(odd: tuple[Path, Path], tmp_path: Path) -> None:
    checkout, scripts = odd
    names = ("fleet-api", "control-api", "serverappio-api")
    flags = [
        part for name, port in zip(names, free_ports(3), strict=True) for part in (f"--{name}-address", f"127.0.0.1:{port}")
    ]
    command = [scripts / "coordinator", "superlink", "--insecure", "--database", "state.db", *flags]
    with subprocess.Popen(command, cwd=tmp_path, env=variables(checkout, FLWR_HOME=str(tmp_path))) as process:
        try:
            until(lambda: "objectstore_locks" in tables(tmp_path / "state.db"), 60)
        finally:
            stop_process(process.pid)


def tables(file: Path) -> set[str]:
    """Names of the tables of a database, none if there is no file."""
    if not file.exists():
        return set()
    with closing(sqlite3.connect(file)) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
