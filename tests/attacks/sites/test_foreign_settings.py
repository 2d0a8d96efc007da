"""A SuperNode in foreign hands, and another account of a site's machine: a site has the settings of its
own start, whatever a message's context says.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.processes.supervisor import NODE_MODULE
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.submit import stop_process
from fedsurrogate.server_app.lifecycle.ends import await_end
from tests.children import ran
from tests.e2e.hospitals import CLASSES, Hospital
from tests.e2e.processes import PATIENCE, Federation, environment, federation, newest, until
from tests.other_account import as_other_account

pytestmark = pytest.mark.slow
EXACT = (
    f'classes="{CLASSES}" fedpft.covariance="spherical" head.min-steps=50 head.epochs=1 '
    "sites=1 quorum=0.5 deadline=60.0"
)
CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
# Reads all arguments of the processes below this one until a line comes in, and prints them. If they name
# a port, it takes a task there before the site's app does, and gives it back as failed, with other settings.
THIEF = """
import json, re, select, sys, time
import psutil
site, policy, state = sys.argv[1:]
seen, ports = set(), []
while not ports and not select.select([sys.stdin], [], [], 0.02)[0]:
    for each in psutil.Process(int(site)).children(recursive=True):
        try:
            words = each.cmdline()
        except psutil.Error:
            continue
        seen.update(words)
        after = [b for a, b in zip(words, words[1:]) if a == "--runtime"]
        ports += [word for word in after if word.startswith("127.0.0.1:")]
if not ports:
    print(json.dumps(sorted(seen)))
    sys.exit()
import grpc
from flwr.proto.runtime_pb2 import ClaimTaskRequest, PullPendingTasksRequest
from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
from flwr.proto.runtime_pb2_grpc import RuntimeStub
from flwr.supercore.interceptors import RuntimeTokenClientInterceptor, RuntimeVersionClientInterceptor
version = RuntimeVersionClientInterceptor(component_name="SuperExec")
channel = grpc.insecure_channel(ports[0])
stub = RuntimeStub(grpc.intercept_channel(channel, version))
while True:
    for task in stub.PullPendingTasks(PullPendingTasksRequest(), wait_for_ready=True).tasks:
        token = stub.ClaimTask(ClaimTaskRequest(task_id=task.task_id)).token
        if token:
            own = RuntimeTokenClientInterceptor(token)
            mine = RuntimeStub(grpc.intercept_channel(channel, version, own))
            context = mine.PullTaskInput(PullTaskInputRequest()).context
            context.node_config["policy"].string = policy
            context.node_config["state-dir"].string = state
            mine.PushTaskOutput(PushTaskOutputRequest(context=context, sub_status="failed"))
            sys.exit()
    time.sleep(0.005)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    home = tmp_path_factory.mktemp("foreign")
    with federation(home / "flower", [], isolated=False) as found:
        yield found


class Forger:
    """What someone else wants of a hospital: a policy that lets everything out, and an empty ledger."""

    def __init__(self, home: Path, hospital: Hospital) -> None:
        self.policy, self.state = home / "policy.toml", home / "state"
        home.mkdir()
        self.policy.write_text("without-dp = true\n")
        own = f'policy="{hospital.policy_file}"', f'state-dir="{hospital.state}"'
        theirs = f'policy="{self.policy}"', f'state-dir="{self.state}"'
        self.node_config = hospital.node_config
        for mine, other in zip(own, theirs, strict=True):
            self.node_config = self.node_config.replace(mine, other)
        open_ledger(parse_node_config(parse_overrides([self.node_config])))


def start(home: Path, name: str, *command: str, **more: str) -> subprocess.Popen[bytes]:
    log = (home / f"{name}.log").open("ab")
    settings = environment(home) | {"PYTHONUNBUFFERED": "1"} | more
    return subprocess.Popen(command, stdout=log, stderr=log, env=settings, cwd=home)


def site(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "fedsurrogate.client_app.cli.main", *words)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        stop_process(process.pid)


def used(running: Federation, home: Path) -> int:
    """Sites that gave something in a run without privacy."""
    run = running.submit(f'{EXACT} output-dir="{home}/out"', home)
    running.wait(run)
    return int(await_end(newest(home / "out")[0], PATIENCE)["sites"]["used"])


def test_settings_of_a_supernode_are_none_of_the_sites(running: Federation, tmp_path: Path) -> None:
    """An intruder in the container of the SuperNode, which has the socket, and the site's account."""
    hospital = Hospital(tmp_path, "north", 0)
    forger = Forger(tmp_path / "runtime", hospital)
    runtime = f"unix:{tmp_path}/runtime/app"
    node = (sys.executable, "-P", "-m", NODE_MODULE, runtime, "--insecure")
    link = ("--superlink", running.fleet, "--node-config", forger.node_config)
    own = {"FEDSURROGATE_NODE_CONFIG": hospital.node_config}
    processes = [
        start(tmp_path, "app", *site("app", "--runtime", runtime), **own),
        start(tmp_path, "node", *node, *link),
    ]
    try:
        until(lambda: "SuperNode ID" in (tmp_path / "node.log").read_text())
        assert used(running, tmp_path) == 0
        log = (hospital.state / "site.log").read_text()
    finally:
        end(processes)
    assert "policy" in log
    assert not hospital.charges()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start a process of another account")
def test_another_account_finds_no_way_to_a_site_that_has_joined(
    running: Federation, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path, "north", 0)
    forger = Forger(tmp_path / "forger", hospital)
    link = ("--insecure", "--superlink", running.fleet, "--node-config", hospital.node_config)
    # Without the warm process each task has a command line of its own.
    joined = start(tmp_path, "join", *site("join", *link), FEDSURROGATE_WARM="0")
    thief = subprocess.Popen(
        as_other_account(THIEF, str(joined.pid), str(forger.policy), str(forger.state)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        text=True,
    )
    try:
        until(lambda: "connected; only" in (tmp_path / "join.log").read_text())
        assert used(running, tmp_path) == 0
        seen = json.loads(thief.communicate("\n", timeout=60)[0])
        below = [psutil.Process(joined.pid), *psutil.Process(joined.pid).children(recursive=True)]
        opened: list[Any] = []
        for process in below:
            # The process of a task that has ended is gone, or has nothing any more.
            with suppress(psutil.NoSuchProcess):
                seen += process.cmdline()
                opened += process.net_connections("all")
        sockets = {each.laddr for each in opened if each.family == socket.AF_UNIX and each.laddr}
        assert not [each for each in opened if each.status == psutil.CONN_LISTEN]
        assert sockets
        for path in sockets:
            done = ran(as_other_account(CONNECT, path))
            assert "PermissionError" in done.stderr
    finally:
        thief.kill()
        end([joined])
    assert not Path(min(sockets)).parent.exists()
    assert any(Path(word).name == "site-app" for word in seen), "a task has run"
    facts = (str(tmp_path), "north", running.fleet, "--token", "--runtime", *map(str, sockets))
    assert not [word for word in seen if any(fact in word for fact in facts)]
