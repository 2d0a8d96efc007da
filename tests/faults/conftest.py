"""Hospitals with their own data and ledgers, and runs with them that take seconds."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from fedsurrogate.client_app.processes.own_account import TASK_NAME
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.submit import stop_process
from fedsurrogate.server_app.lifecycle.ends import await_end
from tests.e2e.hospitals import CLASSES, Hospital
from tests.e2e.processes import PATIENCE, Federation, events, federation, newest, until

PRIVATE = (
    f'classes="{CLASSES}" epsilon=1.0 delta=1e-5 fedpft.covariance="spherical" '
    "head.min-steps=50 head.epochs=1"
)


class Scene:
    """A running federation of hospitals, and its run folders. `sites`: the sites by name, in the
    order of their nodes.
    """

    def __init__(self, running: Federation, sites: dict[str, Hospital], home: Path) -> None:
        self.running, self.sites = running, sites
        self.home, self.output = home, home / "out"

    def submit(self, settings: str = "", deadline: float = 150.0) -> str:
        """Start a one-shot run with differential privacy and a quorum of two sites; settings may
        change this.
        """
        count = len(self.sites)
        shared = (
            f"{PRIVATE} sites={count} quorum={0.6 / count} deadline={deadline} "
            f'output-dir="{self.output}"'
        )
        return self.running.submit(f"{shared} {settings}", self.home)

    def submit_held(self, *names: str, settings: str = "", deadline: float = 150.0) -> str:
        """Start a run in which these sites introduce themselves, and wait before their work until a test
        lets them continue.
        """
        before = self.introductions()
        for name in names:
            self.sites[name].hold()
        run = self.submit(settings, deadline)
        for name in names:
            self.sites[name].introduce(lambda name=name: self.introductions()[name] > before[name])
        for name in names:
            self.sites[name].await_app()
        return run

    def introductions(self) -> Counter[str]:
        """How often each site has introduced itself, in all runs."""
        return Counter(event["site"] for event in events(self.output, "identified"))

    def result(self, run: str) -> dict[str, Any]:
        """Wait for a run's end, print the time, and return its metrics."""
        begun = time.monotonic()
        status = self.running.wait(run)
        # An app that Flower has ended records its own end after that.
        metrics = await_end(newest(self.output)[0], PATIENCE)
        print(
            f"{time.monotonic() - begun:.0f} s to {status}: {metrics['sites']} "
            f"{metrics.get('failure', '')}"
        )
        assert (status == "finished:completed") == (metrics["status"] == "ok"), (status, metrics)
        return metrics

    def reported(self, kind: str) -> dict[str, str]:
        """Reasons by site in the events of this type, in all runs."""
        return {event["site"]: event.get("reason", "") for event in events(self.output, kind)}

    def replied(self, site: str, times: int = 1) -> None:
        """Wait until a site's replies have been accepted this many times, over all runs."""
        until(
            lambda: [event["site"] for event in events(self.output, "replied")].count(site) >= times
        )

    def charged(self) -> dict[str, int]:
        """The number of releases in each ledger."""
        return {name: len(site.charges()) for name, site in self.sites.items()}

    def kill(self, name: str, app_only: bool = False) -> None:
        """Kill a site's app and its SuperNode."""
        node = self.running.nodes[list(self.sites).index(name)]
        doomed = (
            apps(node)
            if app_only
            else [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        )
        assert doomed
        for process in doomed:
            process.kill()
        psutil.wait_procs(doomed, timeout=10)

    def stop(self, name: str) -> None:
        """Stop a site's SuperNode, as an update of its machine would."""
        stop_process(self.running.nodes[list(self.sites).index(name)].pid)

    def restart(self, name: str) -> None:
        """Restart a site's SuperNode, as a restart policy would."""
        self.running.restart_node(list(self.sites).index(name))


def apps(of: Popen[bytes]) -> list[psutil.Process]:
    """The sites' app processes below a process that was started here."""
    found = []
    for process in psutil.Process(of.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # The warm process, whose children run the tasks, is none.
            works = process.name() == TASK_NAME
            if works or any("flwr-clientapp" in part for part in process.cmdline()):
                found.append(process)
    return found


@contextmanager
def opened(home: Path, *names: str, isolated: bool = False, keys: bool = False) -> Iterator[Scene]:
    """A federation of hospitals with these names. keys: registered, so that a restarted site keeps
    its node id.
    """
    sites = {name: Hospital(home, name, seed) for seed, name in enumerate(names)}
    configs, credentials = (
        [site.node_config for site in sites.values()],
        home / "certificates" if keys else None,
    )
    if credentials is not None:
        issue(credentials, ("127.0.0.1",), names)
    with federation(
        home / "flower", configs, credentials, isolated=isolated, names=names
    ) as running:
        yield Scene(running, sites, home)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """North and south; their apps are started below the SuperNodes."""
    with opened(tmp_path, "north", "south") as found:
        yield found


@pytest.fixture
def isolated(tmp_path: Path) -> Iterator[Scene]:
    """North and south with SuperExecs apart, as in deploy/."""
    with opened(tmp_path, "north", "south", isolated=True) as found:
        yield found
