"""The coordinator's app is killed, its command ends, its SuperLink restarts: what is reported stays
true, and a run is found again, stopped, or watched to its end.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, stop_process
from tests.children import ok
from tests.e2e.processes import (
    COORDINATOR,
    Federation,
    coordinator,
    environment,
    events,
    federation,
    newest,
    until,
)
from tests.grid import metrics_of

pytestmark = pytest.mark.faults
LONG = 'method="fedavg" fedavg.rounds=200 fedavg.local-epochs=1 sites=2'
SHORT = 'method="fedavg" fedavg.rounds=3 fedavg.local-epochs=1 sites=2'


class Coordinator:
    """A federation of two registered sites, named 0 and 1, and the coordinator's commands."""

    def __init__(self, running: Federation, home: Path) -> None:
        self.running, self.home, self.output = running, home, home / "out"

    def begin(self, settings: str) -> subprocess.Popen[str]:
        """Start `coordinator run` in its own process group."""
        words = ["run", *self.running.control, "-c", f'{settings} output-dir="{self.output}"']
        known = environment(self.home) | {"PYTHONPATH": str(APP_FOLDER), "HOME": str(self.home)}
        return subprocess.Popen(
            [*COORDINATOR, *words],
            env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command on the same runs."""
        return coordinator(*words, "--runs", str(self.output), *self.running.control, cwd=self.home)

    def rounds(self) -> int:
        """The number of rounds of all runs so far."""
        return len(events(self.output, "round"))

    def app(self) -> psutil.Process:
        """The coordinator's app."""
        found = []
        for process in psutil.Process(self.running.execs[0].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any("flwr-serverapp" in part for part in process.cmdline()):
                    found.append(process)
        return found[0]

    def listed(self) -> list[dict[str, Any]]:
        """The rows of `coordinator runs`, newest first."""
        done = ok(self.call("runs", "--json"))
        return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    home = tmp_path_factory.mktemp("handles")
    issue(home / "certificates", ("127.0.0.1",), ("0", "1"))
    nodes = [
        f'site="{i}" data="digits" partition-id={i} num-partitions=2 cache-dir="{home}/c" '
        f'state-dir="{home}/{i}"'
        for i in range(2)
    ]
    with federation(home / "flower", nodes, home / "certificates") as running:
        yield Coordinator(running, home)


def test_a_killed_app_is_an_interrupted_run_with_its_rounds_its_report_and_the_command_that_continues_it(
    here: Coordinator,
) -> None:
    run = here.begin(LONG)
    until(lambda: here.rounds() >= 2)
    app = here.app()
    app.kill()
    psutil.wait_procs([app], timeout=10)
    watched = coordinator("watch", str(here.output), "--once", cwd=here.home)
    assert watched.returncode == 1
    assert "interrupted" in watched.stdout
    _, errors = run.communicate(timeout=200)
    folder, metrics = newest(here.output)
    assert run.returncode == 1
    assert (
        "the run was interrupted: the process that wrote this run has ended without recording why"
        in errors
    )
    assert f'resume="{folder}"' in errors
    assert metrics["status"] == "interrupted"
    assert metrics["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    assert metrics["card"]["used"] == ["0", "1"]
    assert metrics["bytes"]["up"] > 0
    assert len(metrics["rounds"]) == here.rounds()
    assert "2 of 2 sites had replied" in (folder / "report.html").read_text()
    assert here.listed()[0]["state"] == "interrupted"


def test_an_app_killed_before_its_first_round_leaves_no_lie(here: Coordinator) -> None:
    before = len(list(here.output.glob("*/manifest.json")))
    run = here.begin(LONG)
    until(lambda: len(list(here.output.glob("*/manifest.json"))) > before)
    here.app().kill()
    _, errors = run.communicate(timeout=200)
    folder, metrics = newest(here.output)
    assert run.returncode == 1
    assert metrics["status"] == "interrupted"
    assert metrics["rounds"] == []
    assert "start it again: coordinator run" in errors
    assert (folder / "report.html").exists()


def test_a_run_whose_terminal_was_lost_is_attached_again_and_ends_well(here: Coordinator) -> None:
    before = here.rounds()
    run = here.begin(SHORT)
    until(lambda: here.rounds() > before)
    run.send_signal(signal.SIGHUP)
    run.communicate(timeout=60)
    assert run.returncode == 129
    assert here.listed()[0]["state"] == "running"
    again = ok(here.call("watch", "latest"))
    assert "finished:completed, 2 of 2 sites used" in again.stdout
    assert newest(here.output)[1]["status"] == "ok"
    assert here.call("stop", "latest").stderr.strip().endswith("there is nothing to stop")


def test_a_run_is_stopped_by_its_folder_and_its_command_ends_with_the_reason(
    here: Coordinator,
) -> None:
    before = here.rounds()
    run = here.begin(LONG)
    until(lambda: here.rounds() > before)
    folder, _ = newest(here.output)
    stopped = ok(here.call("stop", folder.name))
    assert f'resume="{folder}"' in stopped.stdout
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "stopped with `coordinator stop`" in errors
    assert metrics_of(folder)["status"] == "interrupted"
    count = here.rounds()
    time.sleep(3)
    assert here.rounds() == count


@pytest.mark.parametrize("where", ["/", "/runs", "/state"])
def test_the_command_that_stop_prints_continues_the_run_wherever_a_container_reads_it(
    here: Coordinator, where: str
) -> None:
    """The folders of deploy/compose.coordinator.yml: runs begin in /, and people read in any folder."""
    root = here.home / f"container-{where.strip('/')}"
    typed_in = root / where.strip("/")
    for name in ("runs", "state"):
        (root / name).mkdir(parents=True)
    known = here.home, here.output
    here.home, here.output = root, root / "runs"
    try:
        run = here.begin(LONG)
        until(lambda: here.rounds() >= 1)
        folder, _ = newest(here.output)
        runs = os.path.relpath(here.output, typed_in)
        words = (folder.name, "--runs", runs, *here.running.control)
        stopped = ok(coordinator("stop", *words, cwd=typed_in))
        run.communicate(timeout=200)
        (line,) = (e for e in stopped.stdout.splitlines() if e.startswith("continue it: "))
        program, *typed = shlex.split(line.removeprefix("continue it: "))
        assert program == "coordinator"
        begun = subprocess.Popen(
            [*COORDINATOR, *typed],
            cwd=typed_in, env=environment(root) | {"PYTHONPATH": str(APP_FOLDER)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until(lambda: bool(events(here.output, "resumed")) or begun.poll() is not None)
        resumed = events(here.output, "resumed")
        here.call("stop", "latest")
        _, errors = begun.communicate(timeout=200)
        assert resumed, errors
        assert resumed[0]["round"] >= 1
    finally:
        here.home, here.output = known


def test_sites_are_listed_by_name_with_what_became_of_them(here: Coordinator) -> None:
    found = here.call("sites", "list", str(here.running.credentials), "--json")
    rows = {row["name"]: row for row in json.loads(found.stdout)}
    assert set(rows) == {"0", "1"}
    assert {row["health"] for row in rows.values()} == {"connected"}
    assert found.returncode == 0
    assert "FOLDER" not in found.stderr
    nameless = here.call("sites", "list")
    assert "`coordinator sites list FOLDER`" in nameless.stderr
    stop_process(here.running.nodes[1].pid)

    def silent() -> bool:
        rows = json.loads(
            here.call("sites", "list", str(here.running.credentials), "--json").stdout
        )
        return {row["name"]: row["health"] for row in rows} == {"0": "connected", "1": "silent"}

    until(silent, 120)
    assert here.call("sites", "list", str(here.running.credentials)).returncode == 1
    here.running.restart_node(1)
    until(lambda: here.call("sites", "list", str(here.running.credentials)).returncode == 0, 120)


def test_a_command_whose_superlink_is_restarted_ends_with_the_truth(here: Coordinator) -> None:
    before = here.rounds()
    run = here.begin(SHORT.replace("rounds=3", "rounds=6"))
    until(lambda: here.rounds() > before)
    stop_process(here.running.superlink.pid)
    here.running.start_superlink()
    output, errors = run.communicate(timeout=400)
    folder, metrics = newest(here.output)
    assert metrics["status"] != "running", errors
    assert (run.returncode == 0) == (metrics["status"] == "ok"), errors
    assert str(folder) in output + errors
    # The next run shows that all works again.
    again = here.begin(SHORT)
    _, errors = again.communicate(timeout=400)
    assert again.returncode == 0, errors
