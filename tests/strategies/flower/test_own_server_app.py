"""The example with its own ServerApp: in this process for each strategy, and once with `flwr run`."""

from __future__ import annotations

import importlib
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.interface import CONTROL_OPTION, RUNTIME_OPTION
from fedsurrogate.server_app.deployment.submit import DONE, flower_environment, stop_process
from tests.e2e.processes import BIN, free_ports, listens, submit, until, wait
from tests.grid import FAST, ROOT, InProcessGrid, sites

EXAMPLE = ROOT / "examples" / "own_server_app"
QUICK = {
    **FAST,
    "fedlap.image-steps": 5,
    "fedlap.server-steps": 5,
    "dpcvae.local-epochs": 1,
    "dpcvae.synthetic": 100,
}


@pytest.mark.parametrize(("method", "rounds"), [("fedpft", 1), ("fedlap", 2), ("dpcvae", 3)])
def test_the_example_runs_each_strategy(
    tmp_path: Path,
    method: str,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedsurrogate.strategies.base.collection.POLL_SECONDS", 0.01)
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "config"
    ]
    flat = {"method": method, "alpha": config["alpha"], "device": "cpu", **QUICK}
    flat |= {
        f"{name}.{key}": value
        for name in ("fedlap", "dpcvae")
        for key, value in config[name].items()
    }
    grid = InProcessGrid(
        sites(3, state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"))
    )
    grid.run_config = dict(flat)
    app = importlib.import_module("own_server_app.server").app
    app(grid, Context(grid.run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(flat)))
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert f"{{{rounds}:" in shown, shown
    assert {path.name for path in tmp_path.iterdir()} == {"state", "cache"}, (
        "nothing is kept that nobody asked for"
    )


def test_the_example_fits_on_a_page() -> None:
    code = (EXAMPLE / "own_server_app" / "server.py").read_text().partition('"""\n\n')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


@pytest.mark.slow
def test_flower_runs_the_example_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    environment = flower_environment(tmp_path)
    with any_superlink(tmp_path, environment) as name:
        flags = (
            "--federation-config",
            "num-supernodes=2 client-resources-num-cpus=1",
            "--run-config",
            "head.min-steps=20",
        )
        run = submit(tmp_path, name, EXAMPLE, tmp_path, *flags)
        status = wait(tmp_path, name, run)
    assert status == DONE, (tmp_path / "superlink.log").read_text()[-3000:]


@contextmanager
def any_superlink(home: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Flower's own SuperLink with simulation: ours runs the installed app only."""
    control, runtime = (f"127.0.0.1:{port}" for port in free_ports(2))
    (home / "config.toml").write_text(
        f'[superlink.simulation]\naddress = "{control}"\ninsecure = true\n'
    )
    flags = [CONTROL_OPTION, control, RUNTIME_OPTION, runtime]
    command = [str(BIN / "flower-superlink"), *flower().simulation_flags(), *flags]
    with (home / "superlink.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        until(lambda: listens(control))
        yield "simulation"
    finally:
        stop_process(process.pid)
