"""Flower's SuperLink, with a database that many sites can write to at once.

Flower keeps the SuperLink's state in SQLite, and gives up on a writer that has waited five seconds for the others; its
SuperNode then drops the message it was about to receive or to send. On a busy machine a release that is paid for can be lost
that way when thirty sites answer together (`benchmarks/many_senders.py`).
"""

import sys
from collections.abc import Sequence

WAIT = 600
"""Seconds that a writer waits for the others."""


def serve(arguments: Sequence[str]) -> None:
    """Be `flower-superlink` with these arguments. Does not return."""
    from flwr.superlink.cli import flower_superlink

    let_writers_wait()
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def let_writers_wait() -> None:
    """For all databases that this process opens from now on."""
    from flwr.supercore import sql_mixin

    sql_mixin.SQLITE_PRAGMAS = (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", str(1000 * WAIT)))  # type: ignore[assignment, attr-defined]
