"""Processes of `site join` that are killed: nothing is left of a site whose first process is gone, and a
site that lost another takes part in the next run.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedsurrogate.client_app.processes.app_process import READY_NAME, TASK_NAME
from fedsurrogate.client_app.processes.supervisor import NODE_MODULE
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.e2e.hospitals import Hospital
from tests.e2e.processes import BIN, Federation, environment, events, federation, until
from tests.faults.conftest import Scene

pytestmark = pytest.mark.faults
MARK = "FEDSURROGATE_TEST_SITE"


class JoinedSite:
    """`site join` of a hospital."""

    def __init__(self, running: Federation, hospital: Hospital, folder: Path) -> None:
        self._mark, self.log = f"{hospital.name}-{id(self)}", folder / f"{hospital.name}.log"
        command = [str(BIN / "site"), "join", "--insecure", "--superlink", running.fleet]
        variables = {MARK: self._mark, "PYTHONPATH": str(APP_FOLDER)}
        with self.log.open("w") as log:
            self.first = subprocess.Popen(
                [*command, "--node-config", hospital.node_config],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(running.home) | variables,
            )

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
            words, name = process.cmdline(), process.name()
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
        until(lambda: self.process(kind) is not None)
        found = self.process(kind)
        assert found is not None
        return found

    def end(self) -> None:
        self.first.terminate()
        try:
            self.first.wait(120)
        finally:
            for process in self.all():
                process.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, Path]]:
    home = tmp_path_factory.mktemp("joined")
    with federation(home / "flower", [], isolated=False) as running:
        yield running, home


@pytest.fixture
def scene(shared: tuple[Federation, Path], tmp_path: Path) -> Scene:
    running, _ = shared
    return Scene(running, {"north": Hospital(tmp_path, "north", 0)}, tmp_path)


@pytest.fixture
def site(scene: Scene, tmp_path: Path) -> Iterator[JoinedSite]:
    made = JoinedSite(scene.running, scene.sites["north"], tmp_path)
    yield made
    made.end()


def connected(site: JoinedSite, times: int = 1) -> None:
    until(lambda: site.log.read_text().count("connected; only") >= times)


@pytest.mark.parametrize("phase", ["starts", "rests", "works"])
def test_nothing_is_left_of_a_site_whose_first_process_is_killed(
    scene: Scene, site: JoinedSite, phase: str
) -> None:
    if phase == "starts":
        site.await_process("node")
    else:
        connected(site)
        site.await_process("warm")
    run = scene.submit_held("north", deadline=60.0) if phase == "works" else ""
    site.first.kill()
    site.first.wait()
    if run:
        scene.sites["north"].let_go()
    until(lambda: not site.all(), 180)
    if run:
        assert scene.result(run)["status"] == "failed"


@pytest.mark.parametrize("kind", ["task", "warm", "app", "node"])
def test_a_site_that_lost_a_process_takes_part_in_the_next_run(
    scene: Scene, site: JoinedSite, kind: str
) -> None:
    connected(site)
    site.await_process("warm")
    run = scene.submit_held("north", deadline=150.0)
    site.await_process(kind).kill()
    scene.sites["north"].let_go()
    first = scene.result(run)
    # A task goes on without the processes that started it.
    assert first["sites"]["used"] == (1 if kind in ("warm", "app") else 0)
    if kind == "task":
        (event,) = events(scene.output, "rejected")
        assert event["reason"].endswith("(Flower error code 8)")
    connected(site, 2 if kind == "node" else 1)
    before = scene.charged()["north"]
    assert scene.result(scene.submit())["sites"]["used"] == 1
    assert scene.charged()["north"] == before + 1
