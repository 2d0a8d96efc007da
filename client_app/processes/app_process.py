"""Run the code installed at this site for every task; code that arrives with a run is never
started.

Flower sends an app's code with every run, and a SuperNode starts it. A malicious coordinator could
so send code that reads a hospital's data and returns them, past policy and ledger. A site that
starts its app with `site join`, or with `site app` next to its own SuperNode, runs only the code
installed at the site. It uses only the settings of a run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.client_app.processes.app_metrics import reporting
from fedsurrogate.client_app.processes.app_status import answering
from fedsurrogate.client_app.processes.joining import found_data
from fedsurrogate.common.files import owner_only
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import without_proxy_here
from fedsurrogate.common.logs.output import configure_log
from fedsurrogate.common.version import own_version

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from fedsurrogate.client_app.node_config import NodeConfig

COMMAND = "site-app"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
ENDED = "the site's app was stopped"
log = logging.getLogger("fedsurrogate.site")


def serve(runtime: str, node: NodeConfig | None = None) -> None:
    """Start `site-app` for every task of a SuperNode. Does not return.

    Args:
        runtime: Address of the SuperNode's Runtime API: host:port, or unix:/path.
        node: The site's settings, to look at its data before a SuperNode on a Unix socket joins.

    Raises:
        RunError: The site lacks data, and has not joined.
    """
    os.environ.update(without_proxy_here(os.environ))
    configure_log(os.environ)
    with reporting(runtime, node), found_data(runtime, node), answering(runtime, node):
        flower().superexec(runtime, str(Path(sys.executable).with_name(COMMAND)))


@owner_only()
def answer() -> None:
    """The command `site-app`: runs one task, with the arguments of flwr-clientapp."""
    configure_log(os.environ)
    flower().client_task(_load_installed, AnswerOnTermination())


class AnswerOnTermination:
    """Sends the SuperNode a reply when a signal ends this process during its work.

    Flower's own app sends none. The SuperNode then waits for ever: connected, healthy, but it takes
    no other run. Signals are blocked until there is a message to answer, and while a reply is being
    sent. Threads that start meanwhile inherit this, among them the one in which Flower checks
    whether the parent process has ended; the work is then finished first.
    """

    def __init__(self) -> None:
        self._answered = False
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)

    def received(self, give_up: Callable[[str], None]) -> None:
        """From now on a signal ends the process, with an error as its reply."""

        def reply() -> None:
            if not self._answered:
                give_up(ENDED)

        flower().at_exit(reply)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Block signals; if the reply cannot be sent, they stay blocked until the process ends."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        self._answered = True
        yield
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def _load_installed(name: str, packed: str) -> ClientApp:
    """The app installed here, whatever the name and the version of the one that a run brings."""
    from fedsurrogate.client_app.clientapp import app

    if packed != (own := own_version()):
        log.warning(
            "the run contains version %s of %s; this site uses its own, %s", packed, name, own
        )
    return app
