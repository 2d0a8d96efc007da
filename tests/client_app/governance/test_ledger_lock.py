"""A ledger is read and written by one process at a time; tests of real processes are slow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app.governance import ledger as module
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from fedsurrogate.common.errors import LedgerError
from tests.client_app.governance.ledger_processes import TOTAL, release


def opened(tmp_path: Path) -> Callable[[], Ledger]:
    """A function that gives the ledger to one more process."""

    def another() -> Ledger:
        return Ledger(
            tmp_path / "ledgers",
            "data",
            CheckLog(tmp_path / "check-log", "data", tmp_path / "ledgers"),
        )

    another().open()
    return another


OPERATIONS: dict[str, Callable[[Ledger], Any]] = {
    "entries": lambda ledger: ledger.entries(),
    "check": lambda ledger: ledger.check(),
    "open": lambda ledger: ledger.open(),
    "charge": lambda ledger: ledger.charge(release(), TOTAL),
    "answered": lambda ledger: ledger.answered(),
    "reopen": lambda ledger: ledger.reopen("a test", 0.0, 1e-5),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_while_another_process_holds_the_lock_a_ledger_waits_and_then_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = opened(tmp_path)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with another()._locked(), pytest.raises(LedgerError, match="cannot be locked"):
        OPERATIONS[name](another())
    another().charge(release(), TOTAL)
    assert len(another().entries()) == 1


@pytest.mark.parametrize("step", ["_read", "_append", "_write_head", "check_budget"])
def test_a_charge_holds_the_lock_from_its_first_look_to_its_last_byte(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes could both find enough budget and both spend it."""
    another, held = opened(tmp_path), []
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    where: Any = module if step == "check_budget" else Ledger
    real = getattr(where, step)

    def inside(*given: Any) -> Any:
        if not held:
            held.append(False)
            with pytest.raises(LedgerError, match="cannot be locked"):
                another().entries()
            held[0] = True
        return real(*given)

    monkeypatch.setattr(where, step, inside)
    another().charge(release(), TOTAL)
    assert held == [True]
