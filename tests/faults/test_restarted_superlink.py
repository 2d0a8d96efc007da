"""The SuperLink ends in the middle of a run and restarts with the same database.

`test_long_deployment.py` tests the other case: a SuperLink ends with its app, and the run continues
with `resume`. The deadline is no part of these tests: at a load of 30 a restart takes minutes, and
a site that is held longer than the deadline is dropped, as it should be.
"""

import json
import signal
import time

import psutil
import pytest

from tests.e2e.processes import PATIENCE, events, until
from tests.faults.conftest import Scene

pytestmark = pytest.mark.faults


def end_and_restart(scene: Scene, how: signal.Signals) -> None:
    scene.running.superlink.send_signal(how)
    scene.running.superlink.wait(60)
    time.sleep(5)
    scene.running.start_superlink()


def ended(scene: Scene) -> bool:
    """Whether a run has recorded its end."""
    files = scene.output.glob("*/metrics.json")
    return any(json.loads(file.read_text())["status"] != "running" for file in files)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_whose_app_stands_apart_goes_on_and_nothing_is_asked_or_paid_twice(
    isolated: Scene, how: signal.Signals
) -> None:
    scene, south = isolated, isolated.sites["south"]
    run = scene.submit_held("south", deadline=PATIENCE)
    scene.replied("north")
    end_and_restart(scene, how)
    south.let_go()
    assert scene.result(run)["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    assert scene.charged() == {"north": 1, "south": 1}


def test_rounds_whose_app_stands_apart_go_on_and_every_round_is_paid_once(isolated: Scene) -> None:
    scene = isolated
    run = scene.submit('method="dp-fedavg" fedavg.rounds=3', deadline=PATIENCE)
    until(lambda: bool(events(scene.output, "round")), 200)
    end_and_restart(scene, signal.SIGTERM)
    metrics = scene.result(run)
    assert [entry["round"] for entry in metrics["rounds"]] == [1, 2, 3]
    for site in scene.sites.values():
        assert [entry["round"] for entry in site.charges()] == [1, 2, 3]


@pytest.mark.parametrize("pause", [0.0, 1.3, 4.1])
def test_a_run_goes_on_though_the_superlink_starts_again_in_each_of_its_phases(
    isolated: Scene, pause: float
) -> None:
    """Before its first request, at each pause after a start, and while replies are collected."""
    scene, begun = isolated, time.monotonic()
    run = scene.submit('method="dp-fedavg" fedavg.rounds=3', deadline=PATIENCE)
    restarts = 0
    while not ended(scene) and time.monotonic() - begun < 150:
        time.sleep(pause)
        end_and_restart(scene, signal.SIGTERM)
        restarts += 1
        time.sleep(8)
    metrics = scene.result(run)
    assert restarts >= 2
    assert [entry["round"] for entry in metrics["rounds"]] == [1, 2, 3]
    for site in scene.sites.values():
        assert [entry["round"] for entry in site.charges()] == [1, 2, 3]


def test_a_run_whose_app_is_below_the_superlink_fails_and_says_that_flower_ended_it(
    scene: Scene,
) -> None:
    south = scene.sites["south"]
    run = scene.submit_held("south", deadline=PATIENCE)
    below = psutil.Process(scene.running.superlink.pid).children(recursive=True)
    end_and_restart(scene, signal.SIGTERM)
    south.let_go()
    failed = scene.result(run)
    assert failed["status"] == "failed"
    assert failed["failure"].startswith("stopped by SystemExit: Flower ended this app")
    psutil.wait_procs(below, timeout=60)
    until(lambda: bool(south.charges()))
    before = scene.charged()
    assert scene.result(scene.submit())["sites"]["used"] == 2
    assert scene.charged() == {name: count + 1 for name, count in before.items()}
