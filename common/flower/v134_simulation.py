"""Ray under Flower 1.34's simulation: a patient start, and a new worker for each that is killed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.flower.environment import RAY_PATIENCE
from fedsurrogate.common.flower.interface import FlowerSimulation

if TYPE_CHECKING:
    from flwr.serverapp import Grid

ENGINE = "Flower's simulation"
# Names of the programs of Ray's two servers.
RAYLET, GCS = "raylet", "gcs_server"
LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")


class Simulation134(FlowerSimulation):
    """Flower 1.34 with Ray 2.55."""

    def __init__(self) -> None:
        self._preparing, self._prepared = threading.Lock(), False

    def is_simulation(self, grid: Grid) -> bool:
        """By the name of its class, so that nothing is imported."""
        return type(grid).__name__ == "InMemoryGrid"

    def ray_has_started(self) -> bool:
        """Ray says so itself."""
        with needed_for(ENGINE):
            import ray

        return bool(ray.is_initialized())

    def prepare_ray(self, seconds: float) -> None:
        """Half a minute can be too short on a busy machine.

        Constants in Ray's code bound these waits. Two are in Python. The third, of 15 seconds, is
        in the raylet: until its two agents, which are Python programs, have written which ports
        they have. With given ports it does not wait.
        """
        with needed_for(ENGINE):
            from ray._private import node, services

        with self._preparing:
            if self._prepared:
                return
            # The raylet, which this process starts, inherits it: time in milliseconds for the
            # agent without which no worker starts.
            os.environ.setdefault("RAY_agent_register_timeout_ms", str(round(1000 * seconds)))
            node.wait_for_persisted_port = patient(node.wait_for_persisted_port, GCS, seconds)
            services.get_node = patient(services.get_node, RAYLET, seconds)
            node.Node.start_raylet = with_ports(node.Node.start_raylet)
            self._prepared = True

    def replace_killed_workers(self) -> None:
        """Flower puts a killed worker back among the idle ones.

        It then fails at once for every site that it is given, and so takes most of the sites with
        it.
        """
        from flwr.simulation.ray_transport.ray_actor import BasicActorPool as Pool

        with needed_for(ENGINE):
            from ray.exceptions import RayActorError

        fetch = Pool.fetch_result_and_return_actor_to_pool

        def fetched(pool: Any, future: Any) -> Any:
            try:
                return fetch(pool, future)
            except RayActorError:
                # Without the raylet no worker starts any more. A site would wait for it until the
                # deadline.
                if _runs(RAYLET):
                    # Flower's caller puts the worker of this future back.
                    pool._future_to_actor[future] = pool.create_actor_fn()
                raise

        Pool.fetch_result_and_return_actor_to_pool = fetched  # type: ignore[assignment, method-assign]


def with_ports(start: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's method that starts the raylet, with free ports for its agents where none are set."""

    def started(node: Any, *arguments: Any, **named: Any) -> Any:
        with needed_for(ENGINE):
            from ray import _raylet

        settings = node._ray_params
        with ExitStack() as open_sockets:
            for name in AGENT_PORTS:
                probe = open_sockets.enter_context(socket.socket())
                probe.bind(("", 0))
                setattr(settings, name, getattr(settings, name) or probe.getsockname()[1])
        # The only one that the raylet does not take as an argument; it reads this file.
        _raylet.persist_port(  # type: ignore[attr-defined]
            node._session_dir, node._node_id, LISTEN_PORT, getattr(settings, LISTEN_PORT)
        )
        return start(node, *arguments, **named)

    return started


def patient(
    attempt: Callable[..., Any],
    program: str,
    seconds: float = RAY_PATIENCE,
) -> Callable[..., Any]:
    """A function that repeats a failed `attempt` for some time, while a child process runs this
    program.

    Args:
        attempt: Raises an exception when it fails.
        program: Name of the program's file.
        seconds: After these the failure is raised.
    """

    def repeated(*arguments: Any, **named: Any) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                return attempt(*arguments, **named)
            except Exception:
                if time.monotonic() > end or not _runs(program):
                    raise
                time.sleep(0.1)

    return repeated


def _runs(program: str) -> bool:
    """Whether a child process runs this program."""
    import psutil

    for child in psutil.Process().children():
        try:
            if child.name() == program and child.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.Error:
            continue
    return False
