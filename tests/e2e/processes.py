"""Real Flower processes on loopback: a SuperLink, SuperNodes and `flwr run`, all stopped by their process id."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from server_app.simulate import APP_FOLDER, QUIET, stop_process

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def environment(home: Path) -> dict[str, str]:
    return os.environ | QUIET | {"FLWR_HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def coordinator(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The coordinator command as a user would call it, from `cwd`."""
    command = [sys.executable, "-m", "server_app.cli", *arguments]
    settings = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=300, check=False)


def site_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The site command as a hospital would call it."""
    command = [sys.executable, "-m", "client_app.cli", *arguments]
    settings = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)


class Federation:
    """A running SuperLink with SuperNodes. `run` submits the app and returns Flower's status of the run."""

    def __init__(self, home: Path, control: int) -> None:
        self.home = home
        home.joinpath("config.toml").write_text(
            f'[superlink.local-test]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
        )

    def run(self, run_config: str, cwd: Path) -> str:
        env = environment(self.home)
        command = [str(BIN / "flwr"), "run", str(APP_FOLDER), "local-test", "--stream", "--run-config", run_config]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
        (self.home / "flwr-run.log").write_text(done.stdout + done.stderr)
        run_id = re.search(r"Successfully started run (\d+)", done.stdout)
        assert run_id, done.stdout + done.stderr
        command = [str(BIN / "flwr"), "list", "local-test", "--run-id", run_id.group(1), "--format", "json"]
        for _ in range(20):
            listed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
            status = str(json.loads(listed.stdout)["runs"][0]["status"])
            if status.startswith("finished"):
                return status
            time.sleep(1)
        return status


@contextmanager
def federation(home: Path, node_configs: Sequence[str]) -> Iterator[Federation]:
    """Start everything, wait until every node is registered, and stop everything again."""
    home.mkdir(parents=True, exist_ok=True)
    fleet, control, runtime, *app_ports = free_ports(3 + len(node_configs))
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        log = (home / f"{name}.log").open("w")
        arguments = [str(BIN / command[0]), *command[1:]]
        started.append(subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, env=environment(home), cwd=home))

    try:
        addresses = {"fleet-api": fleet, "control-api": control, "serverappio-api": runtime}
        flags = [part for name, port in addresses.items() for part in (f"--{name}-address", f"127.0.0.1:{port}")]
        start("superlink", "flower-superlink", "--insecure", "--database", str(home / "state.db"), *flags)
        _wait_for_port(control)
        for number, (config, port) in enumerate(zip(node_configs, app_ports, strict=True)):
            link = ["--insecure", "--superlink", f"127.0.0.1:{fleet}", "--clientappio-api-address", f"127.0.0.1:{port}"]
            start(f"supernode-{number}", "flower-supernode", *link, "--node-config", config)
        for port in app_ports:
            _wait_for_port(port)
        yield Federation(home, control)
    finally:
        for process in reversed(started):
            stop_process(process.pid)


def _wait_for_port(port: int, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise TimeoutError(f"nothing listens on port {port}")
