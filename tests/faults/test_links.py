"""A site's connection to the SuperLink fails: between requests, during the site's work, while it
sends its reply.
"""

import time
from collections.abc import Iterator

import pytest

from fedsurrogate.strategies.flower import MEANINGS
from tests.e2e.hospitals import Hospital
from tests.e2e.processes import federation, until
from tests.faults.conftest import Scene
from tests.faults.links import Link

pytestmark = pytest.mark.faults
# Half of a reply of this size is more than all data sent before it.
WIDTH, HALF = 4096, 8_000
# Longer than Flower's timeout for a node.
IDLE = 75
# Flower gives a node up that has been silent for 37 to 60 seconds, and its SuperNode, which stands
# here for that of a site with Flower's own, may wait 20 seconds before it tries again.
SHORT = 10


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, Link]]:
    """North connects directly to the SuperLink, south through a `Link`."""
    home = tmp_path_factory.mktemp("links")
    sites = {
        name: Hospital(home, name, seed, WIDTH) for seed, name in enumerate(("north", "south"))
    }
    with federation(home / "flower", [sites["north"].node_config], isolated=False) as running:
        link = Link(running.fleet)
        running.join(sites["south"].node_config, link.address)
        yield Scene(running, sites, home), link


@pytest.mark.parametrize("fault", ["cut", "swallow"])
def test_a_site_whose_line_fails_while_it_works_comes_back_by_itself_and_is_used(
    line: tuple[Scene, Link], fault: str
) -> None:
    (scene, link), south = line, line[0].sites["south"]
    before = scene.charged()
    run = scene.submit_held("south", deadline=200.0)
    fail(link, fault)
    south.let_go()
    until(lambda: len(south.charges()) > before["south"])
    time.sleep(SHORT)
    heal(link, fault)
    assert scene.result(run)["sites"]["used"] == 2
    assert scene.charged() == {name: count + 1 for name, count in before.items()}


def test_a_reply_that_was_broken_off_is_paid_for_once_and_used_or_its_site_is_named(
    line: tuple[Scene, Link],
) -> None:
    (scene, link), south = line, line[0].sites["south"]
    before = scene.charged()
    run = scene.submit_held("south", deadline=200.0)
    link.swallow_after(HALF)
    south.let_go()
    until(lambda: link.swallows)
    link.cut()
    time.sleep(30)
    link.flow()
    link.mend()
    # If a receipt is lost, Flower does not send the data again, and waits three minutes for the
    # receipt.
    if scene.result(run)["sites"]["used"] < 2:
        why = list(scene.reported("rejected").values())[-1]
        assert why == f"{MEANINGS[3]} (Flower error code 3)"
    assert scene.charged() == {name: count + 1 for name, count in before.items()}
    assert scene.result(scene.submit())["sites"]["used"] == 2


@pytest.mark.parametrize("fault", ["cut", "swallow"])
def test_a_site_that_was_out_of_reach_before_the_run_is_there_again(
    line: tuple[Scene, Link], fault: str
) -> None:
    scene, link = line
    before = scene.charged()
    fail(link, fault)
    time.sleep(IDLE)
    heal(link, fault)
    assert scene.result(scene.submit())["sites"]["used"] == 2
    assert scene.charged() == {name: count + 1 for name, count in before.items()}


def test_a_site_killed_in_the_middle_of_its_reply_is_named_and_has_paid(
    line: tuple[Scene, Link],
) -> None:
    (scene, link), south = line, line[0].sites["south"]
    before = scene.charged()
    run = scene.submit_held("south", deadline=50.0)
    link.swallow_after(HALF)
    south.let_go()
    until(lambda: link.swallows)
    scene.kill("south")
    metrics = scene.result(run)
    link.flow()
    assert metrics["sites"]["used"] == 1
    assert scene.charged() == {name: count + 1 for name, count in before.items()}
    scene.restart("south")
    assert scene.result(scene.submit())["sites"]["used"] == 2


def fail(link: Link, fault: str) -> None:
    """Make a connection fail so that both ends notice, or neither does."""
    link.cut() if fault == "cut" else link.swallow()


def heal(link: Link, fault: str) -> None:
    """Restore the connection."""
    link.mend() if fault == "cut" else link.flow()
