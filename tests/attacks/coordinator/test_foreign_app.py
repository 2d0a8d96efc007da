"""A coordinator sends its own code with a run; hospitals that follow the documentation never start
any of it.

The commands are read from its pages: a command that starts foreign code makes these tests fail.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsurrogate.client_app.diagnostics.site_checks import check_isolation
from fedsurrogate.server_app.deployment.federation import make_federation, superlink_here
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, stop_process
from tests import documents
from tests.attacks.coordinator.test_sent_code import changed_app
from tests.children import ok, ran
from tests.documents import BETWEEN_MACHINES, ONE_MACHINE
from tests.e2e.processes import (
    BIN,
    PATIENCE,
    environment,
    free_ports,
    heed_signals,
    listens,
    newest,
    submit,
    until,
)

SUPERLINK, HOSPITAL, RUN = (
    "coordinator superlink",
    ("site join", "flower-supernode"),
    ("coordinator run", "flwr "),
)
# A coordinator that hospitals should not trust: its SuperLink takes any app, and starts the code of it.
ROGUE = """
from fedsurrogate.common.flower import v134
from fedsurrogate.server_app.cli.main import main
start = v134.start_own_apps
flags = ["flower-superexec", "--insecure", "--plugin-type", "serverapp", "--appio-api-address"]
v134.start_own_apps = lambda command: start([*flags, command[-1]])
v134.admit_runs = lambda admit: None
main()
"""
PATIENTS = "Keller,Anna,C50.9"
PORTS = ("9091", "9092", "9093", "9094", "9095", "9096")
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "visitor"
version = "1.0.0"
description = "Somebody else's app"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.34"]
[tool.flwr.app]
publisher = "visitor"
fab-format-version = 1
flwr-version-target = "1.34.0"
fab-include = ["visitor/*.py", "LICENSE", "README.md"]
[tool.flwr.app.components]
serverapp = "visitor.server:app"
clientapp = "visitor.client:app"
[tool.flwr.app.config]
nodes = 0
"""
# Leaves a trace when it is imported, and another when it has read a file of the hospital for its
# reply.
THIEF = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
Path({trace!r}).mkdir(exist_ok=True)
Path({trace!r}, "imported").touch()
app = ClientApp()
def steal(message, context):
    Path({trace!r}, "called").touch()
    return Message(RecordDict({{"loot": ConfigRecord({{"text": Path({secret!r}).read_text()}})}}), reply_to=message)
app.train()(steal)
app.evaluate()(steal)
app.query()(steal)
"""
# Sends a request to every node, and a training request to the first; stores the replies.
SENDER = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while len(nodes := sorted(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(0.5)
    asked = [*((node, "query") for node in nodes), (nodes[0], "train")]
    content = lambda: RecordDict({{"info": ConfigRecord({{"a": 1}})}})
    replies = grid.send_and_receive([Message(content(), dst_node_id=n, message_type=kind) for n, kind in asked], timeout=600)
    found = [str(reply.error) if reply.has_error() else repr(dict(reply.content)) for reply in replies]
    Path({answers!r}).write_text(json.dumps({{"asked": len(asked), "replies": found}}))
"""


def deployment_commands(page: Path) -> list[str]:
    """The commands of the page's one block that starts a coordinator, as typed, and of the blocks
    after it that start hospitals or a run and nothing else.
    """
    blocks = documents.commands(page)
    found = [
        number
        for number, block in enumerate(blocks)
        if any(line.startswith(SUPERLINK) for line in block)
    ]
    assert len(found) == 1, f"{page} has {len(found)} blocks that start a coordinator"
    after = takewhile(
        lambda block: all(line.startswith((*HOSPITAL, *RUN)) for line in block),
        blocks[found[0] + 1 :],
    )
    return [line for block in (blocks[found[0]], *after) for line in block]


@dataclass
class Deployment:
    """The processes that the commands of a page have started, with a folder as the user's home."""

    home: Path
    replace: dict[str, str]
    control: str
    services: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    run_commands: list[str] = field(default_factory=list)

    @property
    def hospitals(self) -> list[subprocess.Popen[bytes]]:
        """The processes of hospitals' commands."""
        return [process for line, process in self.services.items() if line.startswith(HOSPITAL)]

    def type(self, line: str) -> None:
        """Type a command: in its own terminal if it keeps running; a hospital's command in the
        folder of its three files.
        """
        for old, new in self.replace.items():
            line = line.replace(old, new)
        kit = self.home / "certificates" / "sites" / "north"
        cwd = kit if line.startswith("site ") and kit.exists() else self.home
        if line.startswith(RUN):
            self.run_commands.append(line)
        elif line.startswith((SUPERLINK, *HOSPITAL)):
            log = self.home / f"log-{len(self.services)}.txt"
            with log.open("w") as stream:
                typed = line.replace(SUPERLINK, f"{sys.executable} -c '{ROGUE}' superlink")
                self.services[line] = subprocess.Popen(
                    ["bash", "-c", f"exec {typed}"],
                    cwd=cwd,
                    env=self.environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    preexec_fn=heed_signals,
                )
            if line.startswith(SUPERLINK):
                until(
                    lambda: listens(self.control) and listens(f"127.0.0.1:{self.replace['9092']}")
                )
        else:
            done = self.shell(line, 200, cwd)
            # The doctor may find the SuperNode of another test.
            assert done.returncode == 0 or "site doctor" in line, (
                f"{line}: {done.stdout}{done.stderr}"
            )

    @property
    def environment(self) -> dict[str, str]:
        """A user's environment with its own home folder."""
        return environment(self.home / ".flwr") | {
            "HOME": str(self.home),
            "FEDSURROGATE_CONTROL": self.control,
            "PYTHONPATH": str(APP_FOLDER),
        }

    def attack(self, theft: "Theft", *flags: str) -> None:
        """Submit an app as a coordinator can, in addition to the commands of a page."""
        submit(self.home / ".flwr", "attack", theft.app, self.home, *flags)

    def shell(
        self, line: str, seconds: float, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user would."""
        shell = ["bash", "-c", line]
        return ran(shell, cwd=cwd or self.home, env=self.environment, timeout=seconds)

    def end_hospitals(self) -> None:
        """Press Ctrl-C at the hospitals: they end, and so do all processes that they started."""
        below = [
            child
            for each in self.hospitals
            for child in psutil.Process(each.pid).children(recursive=True)
        ]
        assert len(below) >= 2 * len(self.hospitals)
        for each in self.hospitals:
            each.send_signal(signal.SIGINT)
        assert [each.wait(PATIENCE) for each in self.hospitals] == [0] * len(self.hospitals), (
            self.logs()
        )
        until(lambda: not any(map(_works, below)))

    def logs(self) -> str:
        """The output of all processes."""
        return "\n".join(file.read_text() for file in sorted(self.home.glob("log-*.txt")))


@contextmanager
def deployment(home: Path, page: Path, replace: dict[str, str]) -> Iterator[Deployment]:
    """Type the commands of a page, and end their processes later. replace: texts for this machine."""
    (home / ".flwr").mkdir(parents=True, exist_ok=True)
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    # Below the home folder of a test, the path of a socket would be too long.
    sockets = Path(tempfile.mkdtemp(prefix="link-"))
    running = Deployment(home, ports | replace, f"unix:{sockets}/control:9093")
    lines = deployment_commands(page)
    try:
        for line in lines:
            running.type(line)
        (home / ".flwr" / "config.toml").write_text(
            f'[superlink.attack]\naddress = "{running.control}"\ninsecure = true\n'
        )
        yield running
    finally:
        for process in reversed(running.services.values()):
            stop_process(process.pid)
        shutil.rmtree(sockets)


@dataclass(frozen=True)
class Theft:
    """An app whose ClientApp reads a file of the hospital. trace: the folder that it makes where it
    is started.
    """

    app: Path
    trace: Path
    answers: Path

    @classmethod
    def prepare(cls, folder: Path, home: Path) -> "Theft":
        """An app without any code of ours."""
        theft = cls(folder / "app", folder / "trace", folder / "answers")
        (theft.app / "visitor").mkdir(parents=True)
        (theft.app / "pyproject.toml").write_text(PROJECT)
        for file in ("README.md", "LICENSE"):
            shutil.copy(APP_FOLDER / file, theft.app)
        (theft.app / "visitor" / "__init__.py").write_text("")
        (theft.app / "visitor" / "client.py").write_text(theft.site_half(home))
        (theft.app / "visitor" / "server.py").write_text(SENDER.format(answers=str(theft.answers)))
        return theft

    @classmethod
    def disguise(cls, folder: Path, home: Path) -> "Theft":
        """Our app with another ClientApp. `flwr run` itself imports the package, but not this
        module.
        """
        theft = cls(folder / "app", folder / "trace", folder / "answers")
        changed_app(
            theft.app, lambda app: (app / "client_app" / "app.py").write_text(theft.site_half(home))
        )
        return theft

    def site_half(self, home: Path) -> str:
        """Code that replies with the content of a file that this test makes."""
        secret = home / "patients.csv"
        secret.write_text(PATIENTS)
        return THIEF.format(trace=str(self.trace), secret=str(secret))

    def result(self) -> dict[str, Any]:
        """The requests that the coordinator sent, and the replies."""
        until(self.answers.exists)
        return dict(json.loads(self.answers.read_text()))


def finished(runs: Path) -> bool:
    """Whether there is a run whose end is recorded."""
    return (
        runs.is_dir()
        and any(runs.glob("*/metrics.json"))
        and newest(runs)[1]["status"] != "running"
    )


def _works(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_documentation_shows_both_ways_to_deploy_and_no_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    localhost, secured = map(deployment_commands, (ONE_MACHINE, BETWEEN_MACHINES))
    for page in set(documents.PAGES) - {ONE_MACHINE, BETWEEN_MACHINES}:
        found = [
            line.partition(" #")[0].strip()
            for block in documents.commands(page)
            for line in block
            if line.startswith(SUPERLINK)
        ]
        assert found in ([], [SUPERLINK]), page
    # In the folder of a federation that command without arguments is the second way.
    make_federation(tmp_path, ("fl.example.org",), 9092)
    monkeypatch.chdir(tmp_path)
    options = {word for line in secured if line.startswith(SUPERLINK) for word in line.split()}
    assert {word for word in superlink_here() if word.startswith("--")} == {
        word for word in options if word.startswith("--")
    }
    for block in (localhost, secured):
        assert any(line.startswith(HOSPITAL) for line in block)
    assert any(line.startswith(RUN) for line in localhost)
    assert any("--enable-supernode-auth" in line for line in secured)


def test_on_localhost_no_foreign_code_is_started_and_the_run_finishes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with deployment(home, ONE_MACHINE, {}) as running:
        sites = len(running.hospitals)
        assert sites == 3
        _, started, joined, finished_run = documents.shown_after(ONE_MACHINE)
        theft = Theft.prepare(tmp_path / "theft", home)
        running.attack(theft, "--run-config", f"nodes={sites}")
        got = theft.result()
        assert (got["asked"], len(got["replies"])) == (sites + 1, sites + 1), running.logs()
        assert not theft.trace.exists(), f"foreign code was started: {list(theft.trace.iterdir())}"
        assert not any("loot" in reply or PATIENTS in reply for reply in got["replies"])
        assert sum("'info'" in reply for reply in got["replies"]) == 1, (
            "the code of the hospital has answered"
        )
        for line in running.run_commands:
            done = ok(running.shell(line, 400))
            assert documents.check_shown(finished_run[1], done.stderr + done.stdout) == 5
        logs = [file.read_text() for file in sorted(home.glob("log-*.txt"))]
        assert documents.check_shown(started[1], logs[0]) == 2
        assert [documents.check_shown(joined[1], log) for log in logs[1:]] == [5] * sites
        assert newest(home / "runs")[1]["sites"]["used"] == sites
        # Nor where it comes with our own coordinator's code.
        disguised, output = Theft.disguise(tmp_path / "disguised", home), home / "disguised"
        running.attack(
            disguised, "--run-config", f'sites={sites} deadline=600.0 output-dir="{output}"'
        )
        until(lambda: finished(output))
        assert not disguised.trace.exists()
        metrics = newest(output)[1]
        assert (metrics["status"], metrics["sites"]["used"]) == ("ok", sites), running.logs()
        running.end_hospitals()
        assert_a_bare_supernode_starts_it(running, Theft.prepare(tmp_path / "bare", home))


def assert_a_bare_supernode_starts_it(running: Deployment, theft: Theft) -> None:
    """The same app does read the file if a SuperNode runs without isolation, so the tests above can
    fail.
    """
    ports = running.replace
    command = [str(BIN / "flower-supernode"), "--insecure", "--node-config", 'data="digits"']
    command += ["--superlink", f"127.0.0.1:{ports['9092']}"]
    command += ["--clientappio-api-address", f"127.0.0.1:{ports['9094']}"]
    with (running.home / "bare.txt").open("w") as log:
        node = subprocess.Popen(
            command, env=running.environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        running.attack(theft, "--run-config", "nodes=1")
        assert [PATIENTS in reply for reply in theft.result()["replies"]] == [True, True]
        assert {path.name for path in theft.trace.iterdir()} == {"imported", "called"}
        seen = check_isolation()
        assert seen.state == "FAIL"
        assert str(node.pid) in seen.found
        assert "site join" in seen.remedy
    finally:
        stop_process(node.pid)
