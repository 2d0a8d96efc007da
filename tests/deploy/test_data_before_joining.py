"""A site in two containers stays away while its folder of data is empty or not mounted: the programs
of the containers, as processes that share the folder of the sockets.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from PIL import Image

import fedsurrogate.client_app.processes.supervisor as joining
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.processes.app_report import Reporter, reporting
from fedsurrogate.client_app.processes.node_process import LOOK_SECONDS
from fedsurrogate.client_app.processes.supervisor import WAITS, await_data, check_data, found_data
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.settings.base import parse_overrides
from tests.children import ok, ran
from tests.client_app.model_use.hospitals import site
from tests.e2e.processes import APP_FOLDER, SITE, free_ports, ready, until


class Containers:
    """The two programs of a site. `data` is a folder of images, empty at first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.shared = folder, folder / "data", folder / "runtime"
        self.data.mkdir()
        self.shared.mkdir()
        self.policy = folder / "policy.toml"
        self.policy.write_text("")
        self.runtime = f"unix:{self.shared}/app"
        self.running: list[subprocess.Popen[bytes]] = []

    @property
    def config(self) -> str:
        return (
            f'site="north" data="imagefolder" data-dir="{self.data}" policy="{self.policy}" '
            f'state-dir="{self.folder}/state" check-log-dir="{self.folder}/check-log" '
            f'cache-dir="{self.folder}/cache"'
        )

    @property
    def node_config(self) -> NodeConfig:
        return parse_node_config(parse_overrides([self.config]))

    def fill(self, records: int = 1) -> None:
        (self.data / "no").mkdir(exist_ok=True)
        for number in range(records):
            Image.new("L", (8, 8)).save(self.data / "no" / f"{number}.png")

    def start(self, *words: str) -> Path:
        """Start a program; returns the file of what it prints."""
        output = self.folder / f"{words[0]}-{len(self.running)}.txt"
        settings = os.environ | {"PYTHONPATH": str(APP_FOLDER), "PYTHONUNBUFFERED": "1"}
        settings["FLWR_HOME"] = str(self.folder)
        if words[0] == "app":
            settings["FEDSURROGATE_NODE_CONFIG"] = self.config
        with output.open("w") as stream:
            command = [*SITE, *words]
            self.running.append(
                subprocess.Popen(command, env=settings, stdout=stream, stderr=stream)
            )
        return output

    def app(self) -> Path:
        return self.start("app", "--runtime", self.runtime)

    def node(self) -> Path:
        (port,) = free_ports(1)
        link = ("--superlink", f"127.0.0.1:{port}", "--insecure")
        return self.start("node", "--runtime", self.runtime, *link)

    @property
    def joins(self) -> bool:
        """Whether the SuperNode, which opens its socket as it starts, has started."""
        path = self.shared / "app"
        return path.exists() and stat.S_ISSOCK(path.stat().st_mode)

    def end(self, *which: int) -> None:
        for process in [self.running[index] for index in which] or self.running:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def app_runs(containers: Containers) -> Iterator[Reporter]:
    """As the app begins, without a pause before it gives up."""
    runtime, node = containers.runtime, containers.node_config
    with reporting(runtime, node) as reporter:
        reporter.found_data = found_data(runtime, node, 0.0)
        yield reporter


@pytest.fixture
def looks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the data in this process, in place of one that loads torch first."""
    monkeypatch.setattr(
        joining, "ProcessPoolExecutor", lambda most, mp_context: ThreadPoolExecutor(most)
    )


@pytest.mark.slow
def test_a_node_joins_only_after_its_app_has_found_data(containers: Containers) -> None:
    # An earlier app, which had data, leaves its socket behind.
    with ready(containers.runtime):
        pass
    app, node = containers.app(), containers.node()
    until(lambda: "has no records of kind 'imagefolder'" in app.read_text() or containers.joins, 60)
    until(lambda: WAITS in node.read_text() or containers.joins, 60)
    assert not containers.joins, "an empty folder takes part"
    assert "smallest-site" in app.read_text()
    containers.end(0)
    containers.fill()
    containers.app()
    until(lambda: containers.joins, 60)
    assert node.read_text().count(WAITS) == 1
    # What empties later stays noise: the app of a site that has joined is started again, and serves.
    shutil.rmtree(containers.data / "no")
    containers.end(2)
    again = containers.app()
    until(lambda: "this site has joined, and answers as one without records" in again.read_text())
    assert containers.running[-1].poll() is None
    # Its node, started anew, stays away.
    containers.end(1)
    until(lambda: not containers.joins, 60)
    last = containers.node()
    until(lambda: WAITS in last.read_text() or containers.joins, 60)
    assert not containers.joins


@pytest.mark.parametrize(
    ("records", "smallest", "joins"),
    [(0, None, False), (0, 0, True), (1, None, True), (3, 4, False), (4, 4, True)],
)
@pytest.mark.usefixtures("looks_here")
def test_the_policy_decides_how_many_records_are_enough(
    records: int, smallest: int | None, joins: bool, containers: Containers
) -> None:
    if records:
        containers.fill(records)
    if smallest is not None:
        containers.policy.write_text(f"smallest-site = {smallest}\n")
    assert check_data(containers.runtime).state == "FAIL"
    if joins:
        with app_runs(containers):
            assert check_data(containers.runtime).state == "PASS"
            await_data(containers.runtime)
    else:
        with pytest.raises(RunError, match="smallest-site"), app_runs(containers):
            pass
    assert check_data(containers.runtime).state == "FAIL", "the app has ended"


@pytest.mark.parametrize("wrong", ["policy", "folder", "columns"])
@pytest.mark.usefixtures("looks_here")
def test_what_cannot_be_read_is_a_reason_not_to_join(wrong: str, containers: Containers) -> None:
    config = containers.node_config
    if wrong == "policy":
        containers.policy.write_text("smallest-site = many\n")
    elif wrong == "folder":
        containers.data.rmdir()
    else:
        config = config.model_copy(update={"data": "parquet", "dataset": ("none",)})
    with pytest.raises(RunError):
        found_data(containers.runtime, config, 0.0)


@pytest.mark.slow
def test_the_app_looks_without_loading_torch_into_its_own_process(containers: Containers) -> None:
    containers.fill()
    code = (
        "import sys\nfrom fedsurrogate.client_app.cli.options import node_of\n"
        "from fedsurrogate.client_app.processes.supervisor import found_data\n"
        "if __name__ == '__main__':\n"
        f"    assert found_data({containers.runtime!r}, node_of([{containers.config!r}]))\n"
        "    assert 'torch' not in sys.modules\n"
    )
    script = containers.folder / "script.py"
    script.write_text(code)
    ok(ran([sys.executable, str(script)], env=os.environ | {"PYTHONPATH": str(APP_FOLDER)}))


@pytest.mark.usefixtures("looks_here")
def test_a_site_that_has_joined_is_served_without_data_but_does_not_let_a_new_node_join(
    containers: Containers, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as node:
        node.bind(str(containers.shared / "app"))
        node.listen()
        with app_runs(containers):
            assert check_data(containers.runtime).state == "FAIL"
    assert "answers as one without records" in caplog.text
    # The file of a node that was killed is no node.
    with pytest.raises(RunError):
        found_data(containers.runtime, containers.node_config, 0.0)


def test_a_waiting_node_says_so_at_once_and_then_seldom(
    containers: Containers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, bound = [0.0], list[ExitStack]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 1500:
            bound.append(ready(containers.runtime))

    monkeypatch.setattr(joining.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(joining.time, "sleep", sleep)
    await_data(containers.runtime)
    bound[0].close()
    assert clock[0] <= 1500 + 2 * LOOK_SECONDS
    assert capsys.readouterr().out == f"{WAITS}\n" * 3


def test_the_doctor_of_a_node_shows_whether_its_app_has_data(containers: Containers) -> None:
    words = ("doctor", "--link-only", "--superlink", "127.0.0.1:9", "--runtime", containers.runtime)
    assert "FAIL  data            this site stays away" in site(*words).stdout
    with ready(containers.runtime):
        assert "PASS  data            the app runs" in site(*words).stdout
