"""Flower's SuperLink with seven changes: many sites can write to its database at once, senders are
authenticated, strangers are not heard, only this account reaches the APIs that ask for no key, no
run brings another app than the installed one, the audit log has each run before it starts, and the
path of the installation may hold blanks.

Flower stores the SuperLink's state in SQLite. A writer that waits five seconds for others fails,
and its SuperNode drops the message that it was receiving or sending. On a busy machine with thirty
sites replying together, a release can be lost after it was charged to the budget
(`benchmarks/many_senders.py`).
"""

import os
from collections.abc import Sequence
from pathlib import Path

from fedsurrogate.common.files import owner_only
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET, without_proxy_here
from fedsurrogate.common.flower.interface import CONTROL_OPTION, RUNTIME_OPTION
from fedsurrogate.common.logs import configure_log
from fedsurrogate.common.security.registrations import TABLE, VARIABLE

from .addresses import check_socket, usual_control, usual_runtime
from .fleet_guard import Validity
from .request_key import KEY
from .request_key import VARIABLE as SIGNING
from .submit import COORDINATOR, admission


# Its database holds what sites send, and its sockets ask for no authentication.
@owner_only()
def serve(arguments: Sequence[str]) -> None:
    """Run `flower-superlink` with these arguments in this process. Does not return."""
    # Flower would else fetch packages for each run, which fails without internet.
    os.environ.update(QUIET | dict(os.environ) | without_proxy_here(os.environ))
    configure_log(os.environ)
    arguments = with_sockets(arguments)
    meant = flower().parse_superlink(arguments)
    for address in meant.open_apis:
        check_socket(address)
    table = table_of_registered(arguments)
    if table is not None:
        # The coordinator's app inherits this variable, and does not run without the table.
        table = Path(os.environ.setdefault(VARIABLE, str(table)))
    credentials = meant.certificate.parent if meant.certificate else None
    if credentials is not None and (credentials / KEY).is_file():
        # The coordinator's app signs with the key that is next to the SuperLink's certificate.
        os.environ.setdefault(SIGNING, str(credentials))
    apps = (*COORDINATOR, "app", "--parent-pid", str(os.getpid()), "--runtime")
    admit = admission(not meant.simulates, credentials)
    flower().superlink(arguments, Validity(table).refusal, admit, apps)


def with_sockets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a SuperLink, with the usual address of each API that they do not place."""
    named = {each.partition("=")[0] for each in arguments}
    usual = {CONTROL_OPTION: usual_control(), RUNTIME_OPTION: usual_runtime()}
    missing = [part for name, own in usual.items() if name not in named for part in (name, own)]
    return [*arguments, *missing]


def table_of_registered(arguments: Sequence[str]) -> Path | None:
    """The file with the table of registered sites, next to the certificate of a SuperLink that
    accepts only such sites.

    None for a SuperLink that accepts any site.
    """
    settings = flower().parse_superlink(arguments)
    return (
        settings.certificate.parent / TABLE
        if settings.certificate and settings.authenticates
        else None
    )
