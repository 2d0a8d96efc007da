"""What is mended in Flower 1.34: concurrent writers of its database, and Ray under its simulation, played."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr
import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from flwr.supercore import sql_mixin
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from ray.exceptions import RayActorError

from fedsurrogate.common.flower import flower, v134
from fedsurrogate.common.flower.environment import RAY_HOOK, prepared_ray
from fedsurrogate.common.flower.v134 import let_writers_wait, patient, with_ports
from fedsurrogate.server_app.deployment.submit import APP_FOLDER

FLOWERS_PATIENCE = 5.0


@pytest.mark.slow
def test_a_reply_waits_for_a_writer_longer_than_flower_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    let_writers_wait()
    store = SqlObjectStore(str(tmp_path / "state.db"))
    store.initialize()
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    busy = threading.Timer(FLOWERS_PATIENCE + 1.5, other.rollback)
    busy.start()
    name = sha256(b"reply").hexdigest()
    assert store.preregister(1, ObjectTree(object_id=name)) == [name]
    busy.join()
    other.close()


@pytest.mark.parametrize("folder", ["mein projekt ä", "a,b", "100%", "it's $HOME"])
def test_the_tables_are_made_wherever_flower_is_installed(tmp_path: Path, folder: str) -> None:
    """In such a folder Flower alone finds no migration, so that its database has no table."""
    where = tmp_path / folder
    shutil.copytree(
        Path(flwr.__file__).parent, where / "flwr", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = (
        "from flwr.supercore.object_store.sql_object_store import SqlObjectStore\n"
        "import flwr; print(flwr.__file__)\n"
        "from fedsurrogate.common.flower.v134 import find_migrations\n"
        "find_migrations(); SqlObjectStore('state.db').initialize()\n"
    )
    settings = os.environ | {"PYTHONPATH": os.pathsep.join([str(where), str(APP_FOLDER)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(where)
    with closing(sqlite3.connect(tmp_path / "state.db")) as database:
        tables = {
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
    assert {"objectstore_locks", "run"} <= tables


# Starts Ray as Flower's simulation does, in the main thread, and ends when Ray begins to start its
# servers.
MAIN_THREAD = """
import ray
from ray._private import node
flowers = node.wait_for_persisted_port, node.Node.start_raylet
def begin(*_, **__):
    print(*(old is not new for old, new in zip(flowers, (node.wait_for_persisted_port, node.Node.start_raylet))))
    raise SystemExit
node.Node.__init__ = begin
ray.init(include_dashboard=False)
"""


@pytest.mark.parametrize("named", [True, False])
def test_ray_is_prepared_in_the_thread_that_starts_it_even_if_the_app_is_late(named: bool) -> None:
    """Here the app never comes. Without the variable only the app would prepare Ray."""
    settings = os.environ | {"PYTHONPATH": str(APP_FOLDER), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    settings |= prepared_ray({}) if named else {}
    done = subprocess.run(
        [sys.executable, "-c", MAIN_THREAD], env=settings, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(named)] * 2, done.stderr


def test_a_function_that_a_person_has_named_for_ray_stays() -> None:
    assert prepared_ray({RAY_HOOK: "theirs.begin"}) == {}


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
    settings = SimpleNamespace(**dict.fromkeys(v134.AGENT_PORTS, 0))
    settings.metrics_export_port = 4711
    node = SimpleNamespace(_ray_params=settings, _session_dir=str(tmp_path), _node_id="ab12")
    assert with_ports(lambda node, *words, **named: (words, named))(node, 1, a=2) == (
        (1,),
        {"a": 2},
    )
    ports = [getattr(settings, name) for name in v134.AGENT_PORTS]
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
            self.run = SimpleNamespace(remote=self.ask)

        def ask(self, *words: object) -> object:
            asked.append(self.number)
            return object()

    def get(future: object) -> Any:
        if asked[-1] == 0:
            raise RayActorError("killed")
        return "0", "reply", "context"

    monkeypatch.setattr(v134, "_runs", lambda program: server)
    monkeypatch.setattr("flwr.simulation.ray_transport.ray_actor.ray.get", get)
    fetch = "fetch_result_and_return_actor_to_pool"
    monkeypatch.setattr(BasicActorPool, fetch, getattr(BasicActorPool, fetch))
    pool = BasicActorPool.__new__(BasicActorPool)
    pool.pool, pool._future_to_actor, pool.create_actor_fn = [Worker()], {}, Worker  # type: ignore[list-item]
    backend = RayBackend.__new__(RayBackend)
    backend.pool, backend.app_fn = pool, object  # type: ignore[assignment]
    context: Any = SimpleNamespace(node_config={"partition-id": 0})
    flower().replace_killed_workers()
    for _ in range(4):
        with suppress(RayActorError):
            assert backend.process_message(None, context) == ("reply", "context")  # type: ignore[arg-type]
    assert asked == expected


ENDING = """
import signal, sys, threading
from flwr.supercore.exit import ExitCode, flwr_exit, register_signal_handlers
from flwr.supercore.telemetry import EventType
from fedsurrogate.common.flower.v134 import end_once

def stop():
    heartbeat = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
    heartbeat.start()
    heartbeat.join()
    threading.Event().wait(0.1)

if sys.argv[1] == "mended":
    end_once()
register_signal_handlers(event_type=EventType.PING, exit_handlers=[stop])
flwr_exit(ExitCode.SUCCESS)
"""


ONLY_134 = pytest.mark.skipif(
    not flwr.__version__.startswith("1.34"), reason="a later Flower lets its process go"
)


@pytest.mark.parametrize(
    "mended",
    [pytest.param(True, id="mended"), pytest.param(False, id="Flower's own", marks=ONLY_134)],
)
def test_a_heartbeat_that_is_refused_while_a_task_ends_does_not_hold_its_process(
    mended: bool,
) -> None:
    """Flower's own waits for ever for the lock of its own exit: the process of a run stayed."""
    words = [sys.executable, "-c", ENDING, "mended" if mended else "own"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.wait(60 if mended else 15) == 0
            assert mended
        except subprocess.TimeoutExpired:
            assert not mended
        finally:
            process.kill()
