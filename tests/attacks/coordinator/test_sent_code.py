"""Nobody runs code of his own in the coordinator's name: not another account of its machine, nor
whoever may submit runs. Each run that a SuperLink takes stands in the audit log first.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import StartAutomationRequest, StartRunRequest
from flwr.proto.control_pb2_grpc import ControlStub
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

from fedsurrogate.common.flower import flower
from fedsurrogate.server_app.control_api import list_runs
from fedsurrogate.server_app.deployment.submit import (
    APP_FOLDER,
    PACKED,
    flower_environment,
    stop_process,
)
from fedsurrogate.server_app.deployment.submit import superlink as simulation
from tests.children import ok, ran
from tests.e2e.processes import (
    BIN,
    Federation,
    coordinator,
    environment,
    free_ports,
    newest,
    submit,
    until,
    wait,
)
from tests.other_account import as_other_account

pytestmark = pytest.mark.slow
# Does all that an account of the machine can try at each door of a SuperLink, which it finds in /proc,
# and prints what succeeded.
INTRUDER = """
import hashlib, json, os, sys
import grpc
from flwr.proto import control_pb2 as c, runtime_pb2 as r
from flwr.proto.control_pb2_grpc import ControlStub
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2_grpc import RuntimeStub
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor as Version
folder, *doors = sys.argv[1:]
trust = open(folder + "/ca.crt", "rb").read() if os.path.exists(folder + "/ca.crt") else None
bundle = open(folder + "/bundle", "rb").read()
key = open(folder + "/key.pub", "rb").read()
fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
tries = [
    (ControlStub, "StartRun", c.StartRunRequest(fab=fab)),
    (ControlStub, "ListRuns", c.ListRunsRequest()),
    (ControlStub, "ListNodes", c.ListNodesRequest()),
    (ControlStub, "RegisterNode", c.RegisterNodeRequest(public_key=key)),
    (RuntimeStub, "PullPendingTasks", r.PullPendingTasksRequest()),
    (RuntimeStub, "ClaimTask", r.ClaimTaskRequest(task_id=1)),
]
found = []
for door in doors:
    opened = [grpc.insecure_channel(door)]
    if trust: opened.append(grpc.secure_channel(door, grpc.ssl_channel_credentials(trust)))
    for channel in opened:
        try: grpc.channel_ready_future(channel).result(timeout=3)
        except grpc.FutureTimeoutError: continue
        for stub, name, request in tries:
            who = "flwr CLI" if stub is ControlStub else "SuperExec"
            call = getattr(stub(grpc.intercept_channel(channel, Version(component_name=who))), name)
            try: call(request, timeout=10)
            except grpc.RpcError: continue
            found.append(door + " " + name)
print(json.dumps(found))
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="root alone can act as two accounts")


def changed_app(folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of the installed app, with a change."""
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(APP_FOLDER / file, folder)
    for room in (*PACKED, "fedsurrogate"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(APP_FOLDER / room, folder / room, symlinks=True, ignore=ignored)
    change(folder)
    return folder


def appended(file: str, text: str) -> Callable[[Path], object]:
    return lambda app: (app / file).write_text((app / file).read_text() + text)


def replaced(file: str, old: str, new: str) -> Callable[[Path], object]:
    def change(app: Path) -> None:
        before = (app / file).read_text()
        assert old in before
        (app / file).write_text(before.replace(old, new, 1))

    return change


def thief(secret: Path, loot: Path) -> Callable[[Path], object]:
    """Leaves the check of signatures out, and copies a key."""
    steal = f"open({str(loot)!r}, 'w').write(open({str(secret)!r}).read())"
    return appended("server_app/serverapp.py", f"\n_check_allowed = lambda *_: {steal}\n")


def doors(process: psutil.Process, fleet: int) -> list[str]:
    """Every address at which a SuperLink and its children listen, but for the one of the sites."""
    found = set()
    for each in (process, *process.children(recursive=True)):
        for place in each.net_connections("all"):
            if place.family.name == "AF_UNIX" and place.laddr:
                found.add(f"unix:{place.laddr}")
            elif place.status == psutil.CONN_LISTEN and place.laddr.port != fleet:
                found.add(f"127.0.0.1:{place.laddr.port}")
    return sorted(found)


def tried_by_another_account(folder: Path, places: list[str]) -> list[str]:
    """What another account could do at these doors, with the files in a folder."""
    done = ok(ran(as_other_account(INTRUDER, str(folder), *places), timeout=300, cwd="/"))
    return list(json.loads(done.stdout))


def words(done: subprocess.CompletedProcess[str]) -> str:
    """What Flower's command has written, without the box around it."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", done.stdout + done.stderr).split())


class Coordinator(Federation):
    """A SuperLink with keys, rules that ask for one signature, and its app; no site."""

    def __init__(self, home: Path) -> None:
        ok(
            coordinator(
                *("sites", "certs", "certificates", "--host", "127.0.0.1", "--site", "north"),
                cwd=home,
            )
        )
        self.loot = home / "loot"
        super().__init__(home, [], certificates_and_keys=home / "certificates")
        (home / "certificates" / "federation.toml").write_text("approvals = 1\n")

    def log_of(self, action: str) -> list[dict[str, Any]]:
        """The facts of all entries of the audit log with this action."""
        log = self.home / "certificates" / "audit-log.jsonl"
        lines = [json.loads(each) for each in log.read_text().splitlines()]
        return [each["facts"] for each in lines if each["action"] == action]

    def start(self, request: StartRunRequest | StartAutomationRequest) -> Any:
        """Ask the Control API as the coordinator's own account."""
        version = RuntimeVersionClientInterceptor(component_name="flwr CLI")
        with grpc.insecure_channel(self.control[1]) as channel:
            stub: Any = ControlStub(grpc.intercept_channel(channel, version))
            if isinstance(request, StartRunRequest):
                return stub.StartRun(request, timeout=60)
            return stub.StartAutomation(request, timeout=60)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    home = tmp_path_factory.mktemp("coordinator")
    federation = Coordinator(home)
    try:
        yield federation
    finally:
        federation.stop()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every account may read and write."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@as_root
def test_another_account_starts_nothing_and_sees_nothing(
    running: Coordinator, tmp_path: Path, public: Path
) -> None:
    credentials = running.home / "certificates"
    app = changed_app(tmp_path / "app", thief(credentials / "ca.key", running.loot))
    (public / "bundle").write_bytes(build_fab_from_disk(app))
    shutil.copy(credentials / "ca.crt", public)
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    (public / "key.pub").write_bytes(flower().key_bytes(key))
    places = doors(psutil.Process(running.superlink.pid), int(running.fleet.rpartition(":")[2]))
    assert {Path(each).name for each in places} >= {"control:9093", "app:9091"}
    assert tried_by_another_account(public, places) == []
    for each in map(Path, (place.removeprefix("unix:") for place in places)):
        assert stat.S_IMODE(each.stat().st_mode) & 0o077 == 0
        assert stat.S_IMODE(each.parent.stat().st_mode) == 0o700
    assert not running.loot.exists()
    assert running.log_of("submit") == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "code": replaced("server_app/serverapp.py", "check_run_allowed(rules", "print(rules"),
    "entry point": replaced("pyproject.toml", '"server_app.app:app"', '"server_app.serverapp:app"'),
    "a default": replaced("pyproject.toml", 'output-dir = "runs"', 'output-dir = "/tmp"'),
    "a dependency": replaced("pyproject.toml", '"filelock', '"evil",\n    "filelock'),
    "a new file": lambda app: (app / "common" / "evil.py").write_text("import os\n"),
    "an agent": replaced("pyproject.toml", "serverapp = ", 'agentapp = "server_app.app:app"\nserverapp = '),
    "a comment": appended("client_app/app.py", "\n# nothing\n"),
    "the readme": appended("README.md", " "),
}  # fmt: skip


def test_a_bundle_that_differs_in_anything_is_refused_and_leaves_no_run(
    running: Coordinator, tmp_path: Path
) -> None:
    same = changed_app(tmp_path / "same", lambda app: (app / "runs").mkdir())
    shutil.copy(same / "README.md", same / "runs")
    assert flower().packed_digest(same) == flower().packed_digest(APP_FOLDER)
    for name, change in CHANGES.items():
        content = build_fab_from_disk(changed_app(tmp_path / name / "fedsurrogate", change))
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        # The second names what the first has sent by its hash.
        for each in (fab, Fab(hash_str=fab.hash_str)):
            with pytest.raises(grpc.RpcError) as refused:
                running.start(StartRunRequest(fab=each))
            assert "installed" in str(refused.value.details()), name
    with pytest.raises(grpc.RpcError):
        running.start(StartRunRequest(app_spec="@flwrlabs/quickstart-numpy"))
    assert list_runs(running.control[1], None) == []
    assert running.log_of("submit") == []


def test_the_superlink_notes_a_run_that_no_command_of_ours_has_submitted_before_it_starts(
    running: Coordinator,
) -> None:
    log, kept = running.home / "certificates" / "audit-log.jsonl", running.home / "kept"
    settings = f'sites=1 output-dir="{running.home}/runs" seed=7'
    command = [str(BIN / "flwr"), "run", str(APP_FOLDER), "local-test", "--run-config", settings]
    log.rename(kept)
    log.mkdir()
    refused = ran(command, env=environment(running.home))
    log.rmdir()
    kept.rename(log)
    assert "nothing is done" in words(refused)
    assert list_runs(running.control[1], None) == []
    run = running.submit(settings, running.home)
    (facts,) = running.log_of("submit")
    assert facts["settings"]["seed"] == 7
    assert facts["digest"]
    assert running.wait(run) == "finished:failed"
    metrics = newest(running.home / "runs")[1]
    assert "approvals = 1" in metrics["failure"]


def test_the_coordinators_app_leaves_code_that_comes_from_a_foreign_superlink_alone(
    tmp_path: Path,
) -> None:
    loot = tmp_path / "loot"
    steal = f"\nopen({str(loot)!r}, 'w').write('here')\n"
    # The module that Flower loads; its imports may find what is installed.
    app = changed_app(tmp_path / "app", appended("server_app/app.py", steal))
    # Flower's own, which takes whatever it is sent.
    control, runtime, fleet = (f"127.0.0.1:{port}" for port in free_ports(3))
    trust = f'[superlink.rogue]\naddress = "{control}"\ninsecure = true\n'
    (tmp_path / "config.toml").write_text(trust)
    settings = environment(tmp_path) | {"FEDSURROGATE_REGISTERED": str(tmp_path / "none")}
    places = ["--control-api-address", control, "--serverappio-api-address", runtime]
    places += ["--fleet-api-address", fleet]
    commands = [
        ["flower-superlink", "--insecure", "--isolation", "process", *places],
        ["coordinator", "app", "--runtime", runtime],
    ]
    with (tmp_path / "log").open("w") as log:
        begun = [
            subprocess.Popen([str(BIN / name), *rest], env=settings, stdout=log, stderr=log)
            for name, *rest in commands
        ]
    try:
        until(lambda: "Starting Fleet API" in (tmp_path / "log").read_text())
        wanted = f'method="none" output-dir="{tmp_path}/runs"'
        run = submit(tmp_path, "rogue", app, tmp_path, "--run-config", wanted)
        assert wait(tmp_path, "rogue", run) == "finished:failed"
    finally:
        for each in begun:
            stop_process(each.pid)
    assert "method" in newest(tmp_path / "runs")[1]["failure"]
    assert not loot.exists()


@as_root
def test_a_simulation_opens_nothing_to_another_account_and_takes_no_other_app(
    tmp_path: Path, public: Path
) -> None:
    app = changed_app(tmp_path / "app", CHANGES["code"])
    (public / "bundle").write_bytes(build_fab_from_disk(app))
    (public / "key.pub").write_bytes(b"")
    with tempfile.TemporaryDirectory() as folder:
        settings = flower_environment(Path(folder)) | {"PYTHONPATH": str(APP_FOLDER)}
        with simulation(Path(folder), settings) as control:
            (link,) = (
                each
                for each in psutil.Process().children()
                if "superlink" in each.cmdline() and folder in " ".join(each.cmdline())
            )
            assert tried_by_another_account(public, doors(link, 0)) == []
            assert not any(each.startswith("127") for each in doors(link, 0))
            trust = f'[superlink.here]\naddress = "{control}"\ninsecure = true\n'
            Path(folder, "config.toml").write_text(trust)
            done = ran([str(BIN / "flwr"), "run", str(app), "here"], env=settings)
            assert "the app that is installed" in words(done)
