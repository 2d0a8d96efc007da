"""The demo federation in containers, on a machine with Docker or Podman and its image: its
permissions, and faults.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from tests.containers import IMAGE, engine, started
from tests.e2e.processes import until

pytestmark = pytest.mark.faults

DEPLOY = Path(__file__).parents[2] / "deploy"
PROJECT = "fedsurrogate-faults"
SITES = ("north", "south", "west")
ROUNDS = 'method="fedavg" fedavg.rounds=4 sites=3 deadline=600.0'
PRIVATE = 'epsilon=0.5 delta=1e-5 classes="0,1,2,3,4,5,6,7,8,9" sites=3 deadline=600.0'


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        [engine()[0], *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


class Demo:
    """The running demo federation. Run folders are in a volume; `output` is the output of
    `coordinator run` so far.
    """

    def __init__(self, log: Path) -> None:
        self.engine, compose = engine()
        self._compose = [*compose, "-p", PROJECT, "-f", str(DEPLOY / "compose.demo.yml")]
        self.log = log

    def compose(self, *arguments: str) -> str:
        environment = os.environ | {"IMAGE": IMAGE}
        done = subprocess.run(
            [*self._compose, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def container(self, service: str) -> str:
        return started(PROJECT, service, self.engine)

    def facts(self, service: str) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", self.container(service)))[0])

    def begin(self, settings: str) -> subprocess.Popen[bytes]:
        """Start a run."""
        stream = self.log.open("wb")
        command = [*self._compose, "exec", "-T", "superlink", "coordinator", "run", "-c", settings]
        return subprocess.Popen(
            command, stdout=stream, stderr=stream, env=os.environ | {"IMAGE": IMAGE}
        )

    def run(self, settings: str) -> str:
        """Run to the end, which must be a success, and return the output."""
        assert self.begin(settings).wait(1200) == 0, self.log.read_text()
        return self.log.read_text()

    def message(self, word: str) -> bool:
        return word in self.log.read_text()

    def crash(self, *services: str) -> None:
        """Kill a container's process, as a crash would; the restart policy starts it again."""
        before = {service: self.facts(service) for service in services}
        for facts in before.values():
            os.kill(facts["State"]["Pid"], signal.SIGKILL)
        for service, facts in before.items():
            until(
                lambda service=service, facts=facts: (
                    self.facts(service)["RestartCount"] > facts["RestartCount"]
                )
            )  # type: ignore[misc]

    def releases(self, site: str) -> list[dict[str, Any]]:
        """Private releases recorded at a hospital; for the bundled digits every run has its own
        ledger.
        """
        reported = docker(
            "exec", self.container(f"{site}-app"), "sh", "-c", "cat /state/public/*/*.jsonl"
        )
        return [entry for entry in map(json.loads, reported.splitlines()) if entry.get("events")]

    def charges(self) -> list[int]:
        """How many of those each hospital has."""
        return [len(self.releases(site)) for site in SITES]

    def healthy(self, service: str) -> bool:
        return bool(self.facts(service)["State"]["Health"]["Status"] == "healthy")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    up = Demo(tmp_path_factory.mktemp("demo") / "run.log")
    try:
        up.compose("up", "-d")
        yield up
    finally:
        up.compose("down", "--volumes", "--timeout", "5")


def test_nothing_is_root_and_nothing_but_the_fleet_port_can_be_reached(demo: Demo) -> None:
    for service in ("superlink", "coordinator-app", *SITES, *(f"{site}-app" for site in SITES)):
        facts = demo.facts(service)
        assert facts["Config"]["User"] == "10001:10001"
        assert facts["HostConfig"]["ReadonlyRootfs"] is True
        assert facts["HostConfig"]["CapDrop"] == ["ALL"] or not facts["EffectiveCaps"]
        assert facts["HostConfig"]["PidsLimit"] == 1024
        assert facts["HostConfig"]["Memory"] == 4 * 2**30
        assert not facts["HostConfig"]["PortBindings"]
        for mount in facts["Mounts"]:
            assert mount["RW"] is (
                mount["Destination"] in ("/state", "/runs", "/cache", "/runtime", "/control")
            ), (service, mount)
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    for host, port in (("superlink", "9091"), ("superlink", "9093")):
        done = subprocess.run(
            [demo.engine, "exec", demo.container("north"), "python", "-c", reach, host, port],
            check=False,
        )
        assert done.returncode != 0, f"a hospital reaches {host}:{port}"
    alone = subprocess.run(
        [
            demo.engine, "exec", demo.container("north-app"), "python", "-c", reach, "superlink",
            "9092",
        ],
        check=False,
    )  # fmt: skip
    assert alone.returncode != 0, "a hospital's app reaches the coordinator"
    seen = docker("exec", demo.container("superlink"), "sh", "-c", "ls /server /certificates")
    assert "server.key" in seen
    assert "ca.key" not in seen


def test_a_private_run_is_charged_once_at_every_hospital(demo: Demo) -> None:
    assert "3 of 3 sites used" in demo.run(PRIVATE)
    assert demo.charges() == [1, 1, 1]
    for site in SITES:
        charged = [
            GaussianEvent(**event) for entry in demo.releases(site) for event in entry["events"]
        ]
        assert epsilon_spent(charged, 1e-5) == pytest.approx(0.5, rel=1e-3)


def test_a_hospital_that_crashes_in_a_run_comes_back_by_itself(demo: Demo) -> None:
    run = demo.begin(ROUNDS)
    until(lambda: demo.message("round=1"))
    demo.crash("north", "north-app")
    assert run.wait(1800) == 0, demo.log.read_text()
    assert demo.message("finished:completed")
    assert "3 of 3 sites used" in demo.run(PRIVATE)
    assert demo.charges() == [2, 2, 2]


def test_a_hospital_whose_network_is_gone_for_half_a_minute_is_in_the_result(demo: Demo) -> None:
    run = demo.begin(ROUNDS)
    until(lambda: demo.message("round=1"))
    network, container = f"{PROJECT}_south-line", demo.container("south")
    docker("network", "disconnect", network, container)
    time.sleep(30)
    docker("network", "connect", network, container)
    assert run.wait(1800) == 0, demo.log.read_text()
    assert demo.message("3 of 3 sites used")


def test_runs_go_on_after_the_coordinators_app_crashed(demo: Demo) -> None:
    demo.crash("coordinator-app")
    assert "3 of 3 sites used" in demo.run('fedpft.covariance="spherical" sites=3 deadline=600.0')


def test_a_run_survives_that_the_superlink_is_restarted(demo: Demo) -> None:
    run = demo.begin(ROUNDS)
    until(lambda: demo.message("round=1"))
    docker("restart", "--time", "10", demo.container("superlink"))
    # The process that watched the run was in the container and has ended too; the next run shows
    # that all works.
    run.wait(600)
    until(lambda: demo.healthy("superlink"))
    assert "3 of 3 sites used" in demo.run(PRIVATE.replace("0.5", "0.25"))
    assert demo.charges() == [3, 3, 3]
