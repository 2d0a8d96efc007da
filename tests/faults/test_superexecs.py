"""Killed SuperExecs, which start the apps: the coordinator's and a site's, and the effect of a
restart policy.
"""

import os
import subprocess

import pytest

from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.e2e.processes import COORDINATOR, until
from tests.faults.conftest import PRIVATE, Scene, apps

pytestmark = pytest.mark.faults


def test_without_the_coordinators_superexec_a_run_waits_and_says_so_and_goes_through_once_it_is_back(
    isolated: Scene,
) -> None:
    scene = isolated
    scene.running.execs[0].kill()
    command = [*COORDINATOR, "run", *scene.running.control, "-c"]
    command += [f'{PRIVATE} sites=2 deadline=200.0 output-dir="{scene.output}"']
    message = scene.home / "message.txt"
    environment = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
    with (
        message.open("w") as stream,
        subprocess.Popen(command, stderr=stream, cwd=scene.home, env=environment) as user,
    ):
        until(lambda: "waiting reason=the SuperLink has not started the run" in message.read_text())
        assert not scene.output.exists()
        scene.running.restart_exec(0)
        assert user.wait(400) == 0
    assert scene.charged() == {"north": 1, "south": 1}


def test_a_run_whose_superexec_is_killed_fails_and_says_so_and_the_next_goes_through(
    isolated: Scene,
) -> None:
    scene, south = isolated, isolated.sites["south"]
    run = scene.submit_held("south", deadline=200.0)
    scene.replied("north")
    scene.running.execs[0].kill()
    scene.running.execs[0].wait()
    failed = scene.result(run)
    assert failed["status"] == "failed"
    assert failed["failure"].startswith("stopped by SystemExit: Flower ended this app")
    south.let_go()
    until(lambda: not apps(scene.running.execs[2]))
    assert scene.charged() == {"north": 1, "south": 1}
    scene.running.restart_exec(0)
    assert scene.result(scene.submit())["sites"]["used"] == 2
    assert scene.charged() == {"north": 2, "south": 2}


def test_a_site_whose_app_gets_sigterm_is_named_and_takes_part_in_the_next_run(
    isolated: Scene,
) -> None:
    scene, south = isolated, isolated.sites["south"]
    run = scene.submit_held("south", deadline=200.0)
    (app,) = apps(scene.running.execs[2])
    app.terminate()
    # The signal waits while the app reads from a disk that does not respond.
    south.let_go()
    assert scene.result(run)["sites"] == {"invited": 2, "used": 1, "rejected": 1, "dropped": 0}
    assert [
        why.endswith("(Flower error code 8)") for why in scene.reported("rejected").values()
    ] == [True]
    before = scene.charged()["south"]
    assert before <= 1
    assert scene.result(scene.submit())["sites"]["used"] == 2
    assert scene.charged() == {"north": 2, "south": before + 1}


def test_a_site_whose_superexec_is_killed_ends_its_work_and_takes_part_again_once_it_is_back(
    isolated: Scene,
) -> None:
    scene, south = isolated, isolated.sites["south"]
    run = scene.submit_held("south", deadline=60.0)
    scene.running.execs[2].kill()
    scene.running.execs[2].wait()
    south.let_go()
    assert scene.result(run)["sites"]["used"] == 2
    assert scene.charged() == {"north": 1, "south": 1}
    # Without a restart the site misses the deadline of every run.
    assert scene.result(scene.submit(deadline=60.0))["sites"] == {
        "invited": 2,
        "used": 1,
        "rejected": 0,
        "dropped": 1,
    }
    scene.running.restart_exec(2)
    assert scene.result(scene.submit())["sites"]["used"] == 2
    assert scene.charged() == {"north": 3, "south": 2}
