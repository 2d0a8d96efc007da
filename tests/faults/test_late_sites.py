"""Late sites: a minute late within the deadline, after the deadline, and completely frozen."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import newest, until
from tests.faults.conftest import Scene, apps, opened

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with opened(tmp_path_factory.mktemp("late"), "north", "slow", "frozen") as found:
        yield found


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_ends_without_those_beyond_the_deadline_and_what_they_send_later_is_in_no_result(
    scene: Scene,
) -> None:
    slow, frozen = scene.sites["slow"], scene.sites["frozen"]
    run = scene.submit_held("slow", "frozen", deadline=50.0)
    (app,) = apps(scene.running.nodes[2])
    app.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    metrics = scene.result(run)
    assert (metrics["sites"]["invited"], metrics["sites"]["used"]) == (3, 1)
    assert list(scene.reported("dropped").values()) == ["no reply before the deadline"] * 2
    folder, _ = newest(scene.output)
    before = contents(folder)
    until(lambda: time.monotonic() - stopped > 75)
    for site in (slow, frozen):
        site.let_go()
    app.send_signal(signal.SIGCONT)
    until(lambda: bool(slow.charges()))
    until(lambda: not apps(scene.running.nodes[1]) and not apps(scene.running.nodes[2]))
    assert contents(folder) == before
    charged = scene.charged()

    # A finished release is charged, even if it did not arrive; Flower may end the frozen app before
    # it makes one.
    assert (charged["north"], charged["slow"]) == (1, 1)
    assert charged["frozen"] <= 1
    again = scene.result(scene.submit())
    assert again["sites"]["used"] == 3
    assert scene.charged() == {name: count + 1 for name, count in charged.items()}
