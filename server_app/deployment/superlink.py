"""Flower's SuperLink with four changes: many sites can write to its database at once, senders are authenticated, APIs may
be on Unix sockets, and the path of the installation may hold blanks.

Flower stores the SuperLink's state in SQLite. A writer that waits five seconds for others fails, and its SuperNode drops
the message that it was receiving or sending. On a busy machine with thirty sites replying together, a release can be lost
after it was charged to the budget (`benchmarks/many_senders.py`).
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from common.flower_environment import UNIX, allow_unix_sockets, without_proxy_here
from common.logs.output import configure_log
from server_app.deployment.fleet_guard import authenticate_senders
from server_app.deployment.request_key import KEY
from server_app.deployment.request_key import VARIABLE as SIGNING
from strategies.base.registered import TABLE, VARIABLE

WAIT = 600
"""Seconds that a writer of the database waits for other writers."""


def serve(arguments: Sequence[str]) -> None:
    """Run `flower-superlink` with these arguments in this process. Does not return."""
    from flwr.supercore import grpc
    from flwr.superlink.cli import flower_superlink

    allow_unix_sockets(grpc)
    os.environ.update(without_proxy_here(os.environ))
    if any(UNIX in argument for argument in arguments):
        os.umask(0o077)
    configure_log(os.environ)
    let_writers_wait()
    find_migrations()
    authenticate_senders()
    if table := table_of_registered(arguments):
        # The coordinator's app inherits this variable, and does not run without the table.
        os.environ.setdefault(VARIABLE, str(table))
    if folder := folder_of_key(arguments):
        os.environ.setdefault(SIGNING, str(folder))
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def let_writers_wait() -> None:
    """Make writers wait for `WAIT` seconds, in all databases that this process opens from now on."""
    from flwr.supercore import sql_mixin

    sql_mixin.SQLITE_PRAGMAS = (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", str(1000 * WAIT)))  # type: ignore[assignment, attr-defined]


def find_migrations() -> None:
    """Let Flower make the tables of its database wherever it is installed.

    Flower joins the folders of its migrations to one text, which alembic splits at blanks and commas. In a path with a blank
    it then finds no migration and makes no table. The name of a resource of a package has neither.
    """
    from flwr.supercore.state.alembic import utils

    utils.ALEMBIC_DIR = Path("flwr.supercore.state:alembic")


def table_of_registered(arguments: Sequence[str]) -> Path | None:
    """The file with the table of registered sites, next to the certificate of a SuperLink that accepts only such sites.

    None for a SuperLink that accepts any site.
    """
    found = _parsed(arguments)
    if not (found.enable_supernode_auth and found.ssl_certfile):
        return None
    return Path(found.ssl_certfile).expanduser().absolute().parent / TABLE


def folder_of_key(arguments: Sequence[str]) -> Path | None:
    """The folder of the coordinator's key, next to the SuperLink's certificate; None if there is no key."""
    certificate = _parsed(arguments).ssl_certfile
    folder = Path(certificate).expanduser().absolute().parent if certificate else None
    return folder if folder is not None and (folder / KEY).is_file() else None


def _parsed(arguments: Sequence[str]) -> Namespace:
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    found, _ = _parse_args_run_superlink().parse_known_args(list(arguments))
    return found
