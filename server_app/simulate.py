"""Run a whole federation on this machine: start Flower's simulation, watch it, read its true status, stop it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from common.config import Scalar
from common.errors import RunError

APP_FOLDER = Path(__file__).resolve().parents[1]
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray forks inside a process in which Flower talks gRPC; gRPC's fork handlers can hang the child.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
START_SECONDS = 90.0
RAY_ATTEMPTS = 3
SITE_LOG = "what the simulated sites say of it: ~/.local/state/fedsurrogate/site.log"

OnEvent = Callable[[dict[str, Any]], None]


class RayDidNotStartError(RunError):
    """Flower's simulation ended before any site was asked, because Ray's server did not come up."""


def simulate(sites: int, overrides: Mapping[str, Scalar], output: Path, gpus: float, on_event: OnEvent) -> Path:
    """Run `sites` simulated sites and return the run folder. Raises RunError when the run did not finish.

    When Ray does not come up, which happens now and then and has nothing to do with the run, it is tried again.
    """
    for _ in range(RAY_ATTEMPTS - 1):
        try:
            return _simulate(sites, overrides, output, gpus, on_event)
        except RayDidNotStartError:
            on_event({"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}", "event": "Ray did not start, trying again"})
    return _simulate(sites, overrides, output, gpus, on_event)


def _simulate(sites: int, overrides: Mapping[str, Scalar], output: Path, gpus: float, on_event: OnEvent) -> Path:
    """One attempt.

    Flower gets a home and ports of its own, so runs on one machine do not meet; everything started here is stopped.
    """
    with tempfile.TemporaryDirectory(prefix="fedsurrogate-") as home:
        environment = os.environ | QUIET | {"FLWR_HOME": home, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        log = Path(home) / "flower.log"
        with _superlink(Path(home), environment) as name:
            command = ["flwr", "run", str(APP_FOLDER), name, "--stream"]
            command += [
                "--federation-config",
                f"num-supernodes={sites} client-resources-num-cpus=1 client-resources-num-gpus={gpus}",
            ]
            # JSON writes strings, numbers and booleans as TOML does.
            command += ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in overrides.items())]
            with log.open("w") as stream:
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
                try:
                    folder = _follow(process, log, output, on_event)
                finally:
                    stop_process(process.pid)
            status = _status(_run_id(log), name, environment)
        if folder is None:
            kind = RayDidNotStartError if "Timed out waiting for file" in _plain(log) else RunError
            raise kind(f"the run ended as {status} before it had a run folder:\n{_reason(log)}")
        if status != "finished:completed":
            (folder / "flower.log").write_text(_plain(log))
            raise RunError(f"the run ended as {status}: {_failure(folder)}\nwhat it left: {folder}\n{SITE_LOG}")
        return folder


@contextmanager
def _superlink(home: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """A SuperLink with simulation, on free loopback ports: the name of its connection."""
    port = _free_port()
    (home / "config.toml").write_text(f'[superlink.simulation]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--control-api-address", f"127.0.0.1:{port}", "--serverappio-api-address", "127.0.0.1:0"]
    log = home / "superlink.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        _wait_for_port(process, port, log)
        yield "simulation"
    finally:
        stop_process(process.pid)


def _follow(process: subprocess.Popen[bytes], log: Path, output: Path, on_event: OnEvent) -> Path | None:
    """Hand on the run's events until Flower's log stream ends; the run folder, once there is one."""
    folder, seen = None, 0
    while True:
        ended = process.poll() is not None
        folder = folder or _find_folder(output, _run_id(log))
        if folder is not None:
            events = folder / "events.jsonl"
            lines = events.read_text().splitlines() if events.exists() else []
            for line in lines[seen:]:
                on_event(json.loads(line))
            seen = len(lines)
        if ended:
            return folder
        time.sleep(0.3)


def _find_folder(output: Path, run_id: str) -> Path | None:
    for manifest in output.glob("*/manifest.json") if run_id else ():
        try:
            if json.loads(manifest.read_text()).get("flower_run_id") == run_id:
                return manifest.parent
        except (OSError, ValueError):
            continue
    return None


def _run_id(log: Path) -> str:
    found = re.search(r"Successfully started run (\d+)", log.read_text(errors="replace"))
    return found.group(1) if found else ""


def _status(run_id: str, name: str, environment: Mapping[str, str]) -> str:
    """Flower's own word for how the run ended; `flwr run --stream` exits 0 whatever happened."""
    if not run_id:
        return "not started"
    command = ["flwr", "list", name, "--run-id", run_id, "--format", "json"]
    for _ in range(10):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        found = re.search(r'"status":\s*"([a-z:]+)"', done.stdout)
        status = found.group(1) if found else "unknown"
        if status.startswith("finished"):
            break
        time.sleep(1)
    return status


def _failure(folder: Path) -> str:
    try:
        return str(json.loads((folder / "metrics.json").read_text()).get("failure", "see events.jsonl"))
    except (OSError, ValueError):
        return "no metrics were written"


def _plain(log: Path) -> str:
    """Flower's log without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))


def _reason(log: Path) -> str:
    return "\n".join(_plain(log).splitlines()[-15:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RunError(f"flower-superlink ended with code {process.returncode}:\n{_reason(log)}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RunError(f"flower-superlink did not open its port within {START_SECONDS:.0f} s:\n{_reason(log)}")


def stop_process(pid: int) -> None:
    """End a process and all it started, by id: politely, then not."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=5)
