"""Ray under Flower's simulation: a patient start, a reason where it does not start, a new worker for each that is killed.

Flower's simulation starts Ray in the main thread of the process in which the coordinator's app has a thread of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from common.extras.packages import needed_for

ENGINE = "Flower's simulation"
DID_NOT_START = "Ray, which runs the simulated sites, did not start"
REMEDY = (
    "the machine may be busy or short of memory: try again later, with fewer sites at the same time (`coordinator simulate "
    "--parallel 1`), or without Ray (`coordinator simulate --engine local`)"
)
# Names of the programs of Ray's two servers.
RAYLET, GCS = "raylet", "gcs_server"
LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")
# How long Ray may take for each step of its start, in seconds.
RAY_PATIENCE = 240.0
LONGEST_CAUSE = 300
# How long Flower's end of this process waits until the app has written why.
RECORD_SECONDS = 120.0


@contextmanager
def ray_start(seconds: float = 2 * RAY_PATIENCE) -> Iterator[str]:
    """Wait until Flower has started Ray. While the block runs, Flower does not end this process.

    Until then no run folder is needed, and no process forks while torch's libraries are loaded.

    Args:
        seconds: How long to wait. Ray's own waits are shorter, so that it names its reason.

    Yields:
        Why Ray did not start, and what to do; empty if it has started.
    """
    from flwr.supercore.exit import add_exit_handler

    errors, ended, recorded = _Errors(), threading.Event(), threading.Event()

    def end() -> None:
        ended.set()
        recorded.wait(RECORD_SECONDS)

    # Flower calls this in the main thread when the simulation has failed, and then ends the process.
    add_exit_handler(end)
    logging.getLogger("flwr").addHandler(errors)
    wait_longer()
    try:
        started = _wait(ended, seconds)
        yield "" if started else _problem(errors.cause, seconds, over=ended.is_set())
    finally:
        recorded.set()
        logging.getLogger("flwr").removeHandler(errors)


def _wait(ended: threading.Event, seconds: float) -> bool:
    """Whether Ray starts before the process ends, and in this time."""
    with needed_for(ENGINE):
        import ray

    end = time.monotonic() + seconds
    while not ray.is_initialized():
        if ended.wait(0.05) or time.monotonic() > end:
            return False
    return True


def _problem(cause: str, seconds: float, over: bool) -> str:
    if not over:
        cause = f"it has not begun to work within {seconds:.0f} s"
    return f"{DID_NOT_START}: {cause or 'Flower has ended the simulation'}; {REMEDY}"


class _Errors(logging.Handler):
    """Keeps the first exception that Flower logs: the cause of those that follow."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.cause = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record that has an exception among its arguments."""
        for each in record.args if isinstance(record.args, tuple) else ():
            if isinstance(each, BaseException) and not self.cause:
                text = " ".join(str(each).split())[:LONGEST_CAUSE].rstrip(".;")
                self.cause = f"{type(each).__name__}: {text}" if text else type(each).__name__


def wait_longer() -> None:
    """Let Ray wait longer for its servers, as long as they run: half a minute can be too short on a busy machine.

    Constants in Ray's code bound these waits. Two are in Python. The third, of 15 seconds, is in the raylet: until its two
    agents, which are Python programs, have written which ports they have. With given ports it does not wait.
    """
    with needed_for(ENGINE):
        from ray._private import node, services

    # The raylet, which this process starts, inherits it: milliseconds for the agent without which no worker starts.
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(round(1000 * RAY_PATIENCE)))
    node.wait_for_persisted_port = patient(node.wait_for_persisted_port, GCS)
    services.get_node = patient(services.get_node, RAYLET)
    node.Node.start_raylet = with_ports(node.Node.start_raylet)


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


def patient(attempt: Callable[..., Any], program: str, seconds: float = RAY_PATIENCE) -> Callable[..., Any]:
    """A function that repeats a failed `attempt` for some time, while a child process runs this program.

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
    for child in psutil.Process().children():
        try:
            if child.name() == program and child.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.Error:
            continue
    return False


def replace_killed_workers() -> None:
    """Give each site that follows a killed worker a new one.

    Flower puts a killed worker back among the idle ones. It then fails at once for every site that it is given, and so
    takes most of the sites with it.
    """
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool

    with needed_for(ENGINE):
        from ray.exceptions import RayActorError

    fetch = BasicActorPool.fetch_result_and_return_actor_to_pool

    def fetched(pool: Any, future: Any) -> Any:
        try:
            return fetch(pool, future)
        except RayActorError:
            # Without the raylet no worker starts any more, and a site would wait for it until the deadline.
            if _runs(RAYLET):
                # Flower's caller puts the worker of this future back.
                pool._future_to_actor[future] = pool.create_actor_fn()
            raise

    BasicActorPool.fetch_result_and_return_actor_to_pool = fetched  # type: ignore[assignment, method-assign]
