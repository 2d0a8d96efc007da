"""Sites that are killed: before their release, while they work, between charge and reply, after
their reply.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.processes import events, newest, until
from tests.faults.conftest import opened

pytestmark = pytest.mark.faults
NODE_GONE = "the site's SuperNode was stopped, or its connection was lost (Flower error code 5)"
APP_GONE = "the site's app was ended, or did not respond for a minute (Flower error code 8)"


@dataclass
class Synthesis:
    """A run with killed sites, and a run after all were restarted: results and ledgers of both."""

    first: dict[str, Any]
    reasons: list[str]
    judged: dict[str, str]
    surrogates: set[str]
    charged: dict[str, int]
    second: dict[str, Any]
    charged_after: dict[str, int]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synthesis]:
    with opened(
        tmp_path_factory.mktemp("killed"), "healthy", "early", "memory", "charged", "replied"
    ) as scene:
        sites, held = scene.sites, ("early", "memory", "charged")
        run = scene.submit_held(*held, deadline=200.0)
        scene.kill("early")
        scene.kill("memory", app_only=True)
        # A frozen SuperNode accepts no reply: its app charges, and cannot continue.
        scene.running.nodes[3].send_signal(signal.SIGSTOP)
        for name in held:
            sites[name].let_go()
        until(lambda: bool(sites["charged"].charges()))
        scene.kill("charged")
        scene.replied("replied")
        scene.kill("replied")
        first = scene.result(run)
        folder, _ = newest(scene.output)
        reasons = [event["reason"] for event in events(scene.output, "rejected")]
        judged, charged = scene.reported("evaluation-failed"), scene.charged()
        for name in ("early", "charged", "replied"):
            scene.restart(name)
        second = scene.result(scene.submit())
        surrogates = {file.stem for file in (folder / "surrogates").iterdir()}
        yield Synthesis(first, reasons, judged, surrogates, charged, second, scene.charged())


def test_the_run_goes_on_without_killed_sites_and_says_what_became_of_each(
    story: Synthesis,
) -> None:
    assert story.first["sites"] == {"invited": 5, "used": 2, "rejected": 3, "dropped": 0}
    assert sorted(story.reasons) == sorted([NODE_GONE, NODE_GONE, APP_GONE])


def test_what_had_left_before_the_kill_is_used_and_only_the_measurement_is_missing(
    story: Synthesis,
) -> None:
    assert story.surrogates == {"healthy", "replied"}
    assert story.judged == {"replied": NODE_GONE}


def test_a_release_is_charged_before_it_leaves_and_nothing_that_was_never_made(
    story: Synthesis,
) -> None:
    assert story.charged == {"healthy": 1, "early": 0, "memory": 0, "charged": 1, "replied": 1}


def test_every_site_takes_part_again_after_a_restart_and_pays_for_the_new_release_alone(
    story: Synthesis,
) -> None:
    assert story.second["sites"]["used"] == 5
    assert story.charged_after == {name: charged + 1 for name, charged in story.charged.items()}
