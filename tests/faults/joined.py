"""`site join` of a hospital, all of whose processes a test can find."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from fedsurrogate.client_app.processes.app_process import READY_NAME
from fedsurrogate.client_app.processes.own_account import TASK_NAME
from fedsurrogate.client_app.processes.supervisor import NODE_MODULE
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.e2e.hospitals import Hospital
from tests.e2e.processes import BIN, Federation, environment, until

MARK = "FEDSURROGATE_TEST_SITE"


class JoinedSite:
    """`site join` of a hospital.

    Args:
        running: the federation.
        hospital: its data and folders.
        link: options of the connection.
        before: a program that starts it.
        variables: of its environment.
    """

    def __init__(
        self,
        running: Federation,
        hospital: Hospital,
        link: Sequence[str] = (),
        before: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._mark, self.log = f"{hospital.name}-{id(self)}", hospital.home / "join.log"
        link = link or ("--insecure", "--superlink", running.fleet)
        self._command = [*before, str(BIN / "site"), "join", *link]
        self._command += ["--node-config", hospital.node_config]
        self._environment = environment(running.home) | {
            MARK: self._mark, "PYTHONPATH": str(APP_FOLDER), **(variables or {}),
        }  # fmt: skip
        self.start()

    def start(self, source: Path = APP_FOLDER) -> None:
        """Start it, again after its end, with the code of this folder."""
        with self.log.open("a") as log:
            self.first = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment | {"PYTHONPATH": str(source)},
            )  # fmt: skip

    def shown(self) -> str:
        """What its terminal shows."""
        return self.log.read_text()

    def connected(self, times: int = 1) -> None:
        """Wait until it has said so often that it is connected."""
        until(lambda: self.shown().count("connected; only") >= times)

    def all(self) -> list[psutil.Process]:
        """Its processes, those without a parent too."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def process(self, kind: str) -> psutil.Process | None:
        """Its process of this kind, if it runs: node, app, warm or task."""
        for process in self.all():
            try:
                words, name = process.cmdline(), process.name()
            except psutil.Error:
                continue
            kinds = {
                "node": NODE_MODULE in words,
                "app": words[-1:] == ["app"],
                "warm": name == READY_NAME,
                "task": name == TASK_NAME,
            }
            if kinds[kind]:
                return process
        return None

    def await_process(self, kind: str) -> psutil.Process:
        """Wait until its process of this kind runs."""
        until(lambda: self.process(kind) is not None)
        found = self.process(kind)
        assert found is not None
        return found

    def end(self) -> None:
        """End it in order, and kill what is left."""
        self.first.terminate()
        try:
            self.first.wait(120)
        finally:
            for process in self.all():
                process.kill()
