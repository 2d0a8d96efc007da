"""Real processes on one ledger, killed, in parallel, or on a full disk: no release leaves without a
record.
"""

import multiprocessing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedsurrogate.client_app.governance.ledger import Ledger
from tests.client_app.governance.ledger_processes import (
    TOTAL,
    fill_the_disk,
    race,
    release,
)

RACES = 1000
# A fork has everything imported already.
FORKS = multiprocessing.get_context("fork")


@pytest.mark.parametrize("room", [0, 1, 100])
def test_on_a_full_disk_it_refuses_and_takes_the_line_back(tmp_path: Path, room: int) -> None:
    ledger = Ledger(tmp_path, "data")
    for number in range(3):
        ledger.charge(release(run=str(number)), TOTAL)
    before = ledger.path.read_bytes()
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=fill_the_disk, args=(tmp_path, len(before) + room, there))
    process.start()
    assert here.poll(60)
    message = here.recv()
    process.join(60)
    assert message.startswith("ledger ")
    assert "cannot be read or written" in message
    assert ledger.path.read_bytes() == before
    assert len(ledger.entries()) == 3


def test_two_processes_at_once_never_spend_more_than_there_is(tmp_path: Path) -> None:
    # Flushing to memory takes no time; this tests the lock.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        _race(Path(folder))


def _race(folder: Path) -> None:
    pipes = [FORKS.Pipe() for _ in range(2)]
    racers = [FORKS.Process(target=race, args=(there,)) for _, there in pipes]
    for racer in racers:
        racer.start()
    for attempt in range(RACES):
        for here, _ in pipes:
            here.send(folder / str(attempt))
        assert all(here.poll(60) for here, _ in pipes)
        assert sorted(here.recv() for here, _ in pipes) == ["left", "refused"], attempt
    for (here, _), racer in zip(pipes, racers, strict=True):
        here.send(None)
        racer.join(60)
