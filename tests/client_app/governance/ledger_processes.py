"""Processes that charge a ledger; tests kill them, run them in parallel, or fill their disk."""

import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from fedsurrogate.client_app.governance.budget import Budget, Release
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.common.errors import BudgetError, LedgerError
from fedsurrogate.common.privacy.accounting import GaussianEvent

TOTAL = Budget(epsilon_total=4.0, delta=1e-5, epsilon_per_run=4.0)


def release(noise_multiplier: float = 1000.0, run: str = "1", number: int = 1) -> Release:
    """A private release; without noise, an unprotected one."""
    events = (GaussianEvent(noise_multiplier),) if noise_multiplier else ()
    facts = {"signal-to-noise-sums": 1.5}
    return Release(
        "digest",
        run,
        "fedpft",
        number,
        "sums",
        events,
        "record",
        1.0,
        1e-5,
        {"sums": 2.0},
        {"sums": 1.0},
        facts,
        10,
        "0" * 64,
        rounds=10**6,
    )


def race(pipe: Connection) -> None:
    """For each received folder, try to charge more than half the budget, and report whether it
    succeeded.
    """
    while folder := pipe.recv():
        try:
            Ledger(folder, "data").charge(release(1.4), TOTAL)
            pipe.send("left")
        except BudgetError:
            pipe.send("refused")


def fill_the_disk(folder: Path, size: int, pipe: Connection) -> None:
    """Charge with a file-size limit, which acts like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        Ledger(folder, "data").charge(release(), TOTAL)
        pipe.send("left")
    except LedgerError as error:
        pipe.send(str(error))
