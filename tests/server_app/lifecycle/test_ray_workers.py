"""Ray under Flower's simulation, played: its start waits, its failure has a reason, a killed worker gets a successor."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from flwr.supercore.exit import exit_handler
from ray.exceptions import RayActorError

from common.errors import RunError
from common.run import parse_run
from server_app.federate import fail_before_start
from server_app.lifecycle import ray_workers
from server_app.lifecycle.ray_workers import DID_NOT_START, patient, ray_start, replace_killed_workers, with_ports
from tests.grid import events_of, metrics_of, run_folders

log = logging.getLogger("flwr")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray, which starts when `ready` is set; nothing of Ray is patched."""
    played = SimpleNamespace(ready=False, is_initialized=lambda: played.ready)
    monkeypatch.setitem(sys.modules, "ray", played)
    monkeypatch.setattr(ray_workers, "wait_longer", lambda: None)
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [])
    return played


def test_the_app_goes_on_when_ray_has_started(ray: SimpleNamespace) -> None:
    threading.Timer(0.3, lambda: setattr(ray, "ready", True)).start()
    with ray_start(30.0) as problem:
        assert problem == ""
    handlers = len(log.handlers)
    exit_handler.trigger_exit_handlers()
    assert len(log.handlers) == handlers


@pytest.mark.usefixtures("ray")
def test_flower_does_not_end_the_process_before_the_reason_is_written() -> None:
    """As in Flower: the main thread logs what failed, then what follows from it, and calls the exit handlers."""
    order: list[str] = []

    def main_thread() -> None:
        log.error("An exception occured!! %s", TimeoutError("Timed out waiting for file\n  /tmp/x."))
        log.error("An exception occurred !! %s", RuntimeError("Simulation Runtime crashed."))
        exit_handler.trigger_exit_handlers()
        order.append("ended")

    thread = threading.Timer(0.3, main_thread)
    thread.start()
    with ray_start(30.0) as problem:
        time.sleep(0.5)
        order.append("written")
    thread.join()
    assert order == ["written", "ended"]
    assert problem.startswith(f"{DID_NOT_START}: TimeoutError: Timed out waiting for file /tmp/x; ")
    assert "--engine local" in problem


@pytest.mark.usefixtures("ray")
def test_a_ray_that_hangs_is_not_waited_for_without_end() -> None:
    with ray_start(0.2) as problem:
        assert "it has not begun to work within 0 s" in problem


def test_the_run_folder_has_the_status_failed_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no luck"):
        fail_before_start(parse_run({"output-dir": str(tmp_path)}), 7, "no luck")
    (folder,) = run_folders(tmp_path)
    assert (metrics_of(folder)["status"], metrics_of(folder)["failure"]) == ("failed", "no luck")
    assert events_of(folder)[-1]["reason"] == "no luck"
    assert (folder / "report.html").is_file()


def failing(times: int) -> Callable[[], str]:
    """A function that fails so many times."""
    left = iter(range(times))

    def attempt() -> str:
        if next(left, None) is not None:
            raise RuntimeError("not yet")
        return "there"

    return attempt


def test_a_server_that_runs_is_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"]) as server:
        assert patient(failing(3), "sleep")() == "there"
        with pytest.raises(RuntimeError, match="not yet"):
            patient(failing(1000), "sleep", seconds=0.3)()
        server.kill()


def test_a_server_that_has_ended_is_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"]) as server:
        # A zombie until this process asks for its exit code, as under Ray.
        server.kill()
        time.sleep(0.2)
        with pytest.raises(RuntimeError, match="not yet"):
            patient(failing(3), "sleep")()


def test_rays_agents_have_ports_and_the_file_that_the_raylet_reads(tmp_path: Path) -> None:
    settings = SimpleNamespace(**dict.fromkeys(ray_workers.AGENT_PORTS, 0))
    settings.metrics_export_port = 4711
    node = SimpleNamespace(_ray_params=settings, _session_dir=str(tmp_path), _node_id="ab12")
    assert with_ports(lambda node, *words, **named: (words, named))(node, 1, a=2) == ((1,), {"a": 2})
    ports = [getattr(settings, name) for name in ray_workers.AGENT_PORTS]
    assert ports[1] == 4711
    assert len({*ports, 0}) == 5
    (file,) = tmp_path.iterdir()
    assert file.read_text().strip() == str(settings.dashboard_agent_listen_port)


@pytest.mark.parametrize(("server", "expected"), [(True, [0, 1, 1, 1]), (False, [0, 0, 0, 0])])
def test_a_killed_worker_is_replaced_so_that_only_its_own_site_is_lost(
    monkeypatch: pytest.MonkeyPatch, server: bool, expected: list[int]
) -> None:
    """Flower's own pool and backend, without Ray: the first worker is killed at its first task.

    When Ray's server has ended too, a new worker would never start; then each site fails at once.
    """
    made = iter(range(10))
    asked: list[int] = []

    class Worker:
        def __init__(self) -> None:
            self.number = next(made)
            self.run = SimpleNamespace(remote=lambda *words: (asked.append(self.number), object())[1])

    def get(future: object) -> Any:
        if asked[-1] == 0:
            raise RayActorError("killed")
        return "0", "reply", "context"

    monkeypatch.setattr(ray_workers, "_runs", lambda program: server)
    monkeypatch.setattr("flwr.simulation.ray_transport.ray_actor.ray.get", get)
    fetch = "fetch_result_and_return_actor_to_pool"
    monkeypatch.setattr(BasicActorPool, fetch, getattr(BasicActorPool, fetch))
    pool = BasicActorPool.__new__(BasicActorPool)
    pool.pool, pool._future_to_actor, pool.create_actor_fn = [Worker()], {}, Worker  # type: ignore[list-item]
    backend = RayBackend.__new__(RayBackend)
    backend.pool, backend.app_fn = pool, object  # type: ignore[assignment]
    context: Any = SimpleNamespace(node_config={"partition-id": 0})
    replace_killed_workers()
    for _ in range(4):
        with suppress(RayActorError):
            assert backend.process_message(None, context) == ("reply", "context")  # type: ignore[arg-type]
    assert asked == expected
