"""Flower's SuperLink, with a database that many sites can write to at once, and with senders that are who they say.

Flower keeps the SuperLink's state in SQLite, and gives up on a writer that has waited five seconds for the others; its
SuperNode then drops the message it was about to receive or to send. On a busy machine a release that is paid for can be lost
that way when thirty sites answer together (`benchmarks/many_senders.py`).
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from server_app.deployment.fleet_guard import authenticate_senders
from strategies.base.registered import TABLE, VARIABLE

WAIT = 600
"""Seconds that a writer waits for the others."""


def serve(arguments: Sequence[str]) -> None:
    """Be `flower-superlink` with these arguments. Does not return."""
    from flwr.superlink.cli import flower_superlink

    let_writers_wait()
    authenticate_senders()
    if table := table_of_registered(arguments):
        # The coordinator's app inherits it, and refuses to run without that table.
        os.environ.setdefault(VARIABLE, str(table))
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def let_writers_wait() -> None:
    """For all databases that this process opens from now on."""
    from flwr.supercore import sql_mixin

    sql_mixin.SQLITE_PRAGMAS = (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", str(1000 * WAIT)))  # type: ignore[assignment, attr-defined]


def table_of_registered(arguments: Sequence[str]) -> Path | None:
    """The table of registered sites, next to the certificate of a SuperLink that lets only such sites in.

    None for a SuperLink that lets any site in.
    """
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    found, _ = _parse_args_run_superlink().parse_known_args(list(arguments))
    if not (found.enable_supernode_auth and found.ssl_certfile):
        return None
    return Path(found.ssl_certfile).expanduser().absolute().parent / TABLE
