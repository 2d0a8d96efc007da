"""Processes of `site join` that are killed: nothing is left of a site whose first process is gone, and a
site that lost another takes part in the next run.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hospitals import Hospital
from tests.e2e.processes import Federation, events, federation, until
from tests.faults.conftest import Scene
from tests.faults.joined import JoinedSite

pytestmark = pytest.mark.faults


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
def site(scene: Scene) -> Iterator[JoinedSite]:
    made = JoinedSite(scene.running, scene.sites["north"])
    yield made
    made.end()


@pytest.mark.parametrize("phase", ["starts", "rests", "works"])
def test_nothing_is_left_of_a_site_whose_first_process_is_killed(
    scene: Scene, site: JoinedSite, phase: str
) -> None:
    if phase == "starts":
        site.await_process("node")
    else:
        site.connected()
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
    site.connected()
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
    site.connected(2 if kind == "node" else 1)
    before = scene.charged()["north"]
    assert scene.result(scene.submit())["sites"]["used"] == 1
    assert scene.charged()["north"] == before + 1
