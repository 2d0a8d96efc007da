"""SIGKILL at every write: ledger and check log always record every release, and they always agree
afterwards.
"""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from fedsurrogate.common.errors import BudgetError, LedgerError
from tests.client_app.governance.ledger_processes import TOTAL, release

# A fork has everything imported already.
FORKS = multiprocessing.get_context("fork")
# Calls that change a file or a folder, or make a change durable.
CALLS = ("write", "fsync", "replace", "ftruncate", "open", "mkdir")
LARGE = release(1.4)


def logged(home: Path) -> Ledger:
    return Ledger(home / "state", "data", CheckLog(home / "check-log", "data", home / "state"))


def killed(home: Path, stop: int, act: Callable[[Ledger], object], left: Path) -> bool:
    """Do work in another process, which is killed before its call number `stop`; return True if it
    ended first.

    A byte is written to `left` once it has returned.
    """

    def child() -> None:
        calls = itertools.count()
        for name in CALLS:
            setattr(os, name, _dying(getattr(os, name), calls, stop))
        act(logged(home))
        _write(left)

    process = FORKS.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def _write(left: Path) -> None:
    with left.open("ab", buffering=0) as file:
        file.write(b".")


def _dying(call: Callable[..., Any], calls: Iterator[int], stop: int) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if next(calls) == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return wrapped


def test_killed_at_any_write_of_a_charge_the_next_one_goes_on_and_nothing_is_forgotten(
    tmp_path: Path,
) -> None:
    for stop in itertools.count():
        home, left = tmp_path / str(stop), tmp_path / f"left-{stop}"
        logged(home).open()
        _write(left)
        logged(home).charge(release(), TOTAL)
        lived = killed(home, stop, lambda ledger: ledger.charge(release(), TOTAL), left)
        recorded, out = len(logged(home).entries()), left.stat().st_size
        assert out <= recorded <= out + 1
        assert not lived or recorded == out
        logged(home).charge(release(), TOTAL)
        logged(home).check()
        if lived:
            break
    assert stop > 8, "every write was tried"


def test_killed_at_any_write_a_check_log_that_is_put_back_is_noticed(tmp_path: Path) -> None:
    """The entry left by the kill does not hide that two entries were lost."""
    for stop in itertools.count():
        home, left = tmp_path / str(stop), tmp_path / f"left-{stop}"
        ledger = logged(home)
        ledger.open()
        old = {file: file.read_bytes() for file in (ledger.path, ledger.head)}
        ledger.charge(release(), TOTAL)
        lived = killed(home, stop, lambda ledger: ledger.charge(release(), TOTAL), left)
        for file, content in old.items():
            file.write_bytes(content)
        with pytest.raises(LedgerError, match="entries, but"):
            ledger.charge(release(), TOTAL)
        if lived:
            break


@pytest.mark.parametrize("damage", ["none", "check-log", "ledger", "both"])
@pytest.mark.parametrize("keep", [False, True])
def test_killed_at_any_write_of_a_decision_there_is_no_fresh_budget(
    tmp_path: Path, damage: str, keep: bool
) -> None:
    if keep and damage in ("ledger", "both"):
        pytest.skip("there is nothing to keep")
    for stop in itertools.count():
        home, left = tmp_path / str(stop), tmp_path / f"left-{stop}"
        ledger = logged(home)
        ledger.open()
        ledger.charge(LARGE, TOTAL)
        assert ledger.check_log is not None
        for file in (ledger.path, ledger.head) if damage in ("ledger", "both") else ():
            file.unlink()
        if damage in ("check-log", "both"):
            ledger.check_log.file.unlink()
        lived = killed(
            home, stop, lambda each: each.reopen("lost", 0.0 if keep else 3.5, 1e-5, keep), left
        )
        with pytest.raises((LedgerError, BudgetError)):
            ledger.charge(LARGE, TOTAL)
        ledger.reopen("lost, again", 3.5, 1e-5)
        with pytest.raises(BudgetError):
            ledger.charge(LARGE, TOTAL)
        ledger.charge(release(), TOTAL)
        if lived:
            break
    assert stop > 8, "every write was tried"


def test_killed_at_any_write_of_an_opening_a_person_can_go_on(tmp_path: Path) -> None:
    for stop in itertools.count():
        home = tmp_path / str(stop)
        lived = killed(home, stop, lambda ledger: ledger.open(), tmp_path / f"left-{stop}")
        ledger = logged(home)
        try:
            ledger.open()
        except LedgerError:
            assert lived or (home / "check-log" / "data.witness").exists()
            ledger.reopen("killed at the opening", 0.0, 1e-5)
        ledger.charge(release(), TOTAL)
        if lived:
            break
    assert stop > 8, "every write was tried"
