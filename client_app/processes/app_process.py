"""Run the code installed at this site for every task; code that arrives with a run is never started.

Flower sends an app's code with every run, and a SuperNode starts it. A malicious coordinator could so send code that reads a
hospital's data and returns them, past policy and ledger. A site that starts its app with `site join`, or with `site app`
next to its own SuperNode, runs only the code installed at the site. It uses only the settings of a run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore.exit import add_exit_handler

from common.flower_environment import without_proxy_here
from common.logs.output import configure_log
from common.version import own_version

COMMAND = "site-app"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
ENDED = "the site's app was stopped"
log = logging.getLogger("fedsurrogate.site")


def serve(runtime: str) -> None:
    """Start `site-app` for every task of the SuperNode whose Runtime API is at `runtime`, host:port. Does not return."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

    os.environ.update(without_proxy_here(os.environ))
    configure_log(os.environ)
    TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP] = str(Path(sys.executable).with_name(COMMAND))
    sys.argv = ["flower-superexec", "--insecure", "--plugin-type", "clientapp", "--appio-api-address", runtime]
    flower_superexec()


def answer() -> None:
    """The command `site-app`: runs one task, with the arguments of flwr-clientapp."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as task

    task.install_from_fab = _leave_packed  # type: ignore[assignment, attr-defined]
    task.get_load_client_app_fn = _load_installed  # type: ignore[assignment, attr-defined]
    _answer_on_termination(task)
    configure_log(os.environ)
    flwr_clientapp()


def _answer_on_termination(task: Any) -> None:
    """Send the SuperNode a reply when a signal ends this process during its work.

    Flower's own app sends none. The SuperNode then waits for ever: connected, healthy, but it takes no other run. Signals
    are blocked until there is a message to answer, and while a reply is being sent. Threads that start meanwhile inherit
    this, among them the one in which Flower checks whether the parent process has ended; the work is then finished first.
    """
    pull, push, answered = task.pull_task_input, task.push_message, list[bool]()

    def pull_task_input(stub: Any) -> tuple[Any, ...]:
        message, context, *code = pull(stub)

        def give_up() -> None:
            if not answered:
                push(stub, Message(Error(ErrorCode.CLIENT_APP_CRASHED, ENDED), reply_to=message), context)

        add_exit_handler(give_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        return message, context, *code

    def push_message(*reply: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        answered.append(True)
        push(*reply)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    task.pull_task_input, task.push_message = pull_task_input, push_message
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)


def _leave_packed(content: bytes, **_: object) -> None:
    """Ignore the received code; it is not even unpacked."""


def _load_installed(**_: object) -> Callable[[str, str, str], ClientApp]:
    def load(name: str, asked: str, digest: str) -> ClientApp:
        from client_app.app import app

        if asked != (own := own_version()):
            log.warning("the run contains version %s of %s; this site uses its own, %s", asked, name, own)
        return app

    return load
