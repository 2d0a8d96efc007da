"""Run this site's own, installed code for every task; code that arrives with a run is never started.

Flower sends an app's code with every run, and a SuperNode starts it. Whoever commands the coordinator could so send code
that reads a hospital's data and answers with it, past policy and ledger. A site that starts its app with `site join`, or
with `site app` next to a SuperNode of its own, works with what is installed at the site, and takes from a run its settings
only.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore.exit import add_exit_handler

COMMAND = "site-app"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
ENDED = "the site's app was told to end"
log = logging.getLogger("fedsurrogate.site")


def serve(runtime: str) -> None:
    """Start `site-app` for every task of the SuperNode whose Runtime API is at `runtime`, host:port. Does not return."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

    TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP] = str(Path(sys.executable).with_name(COMMAND))
    sys.argv = ["flower-superexec", "--insecure", "--plugin-type", "clientapp", "--appio-api-address", runtime]
    flower_superexec()


def answer() -> None:
    """The command `site-app`: one task, with the arguments of flwr-clientapp."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as task

    task.install_from_fab = _leave_packed  # type: ignore[assignment, attr-defined]
    task.get_load_client_app_fn = _load_installed  # type: ignore[assignment, attr-defined]
    _answer_when_told_to_end(task)
    flwr_clientapp()


def _answer_when_told_to_end(task: Any) -> None:
    """Give the SuperNode an answer when a signal ends this process in the midst of its work.

    Flower's own app leaves it without one, and the SuperNode then waits for ever: connected, healthy, and deaf to every
    other run. Signals that come before there is something to answer, or while an answer is on its way, wait.
    That holds for threads that begin meanwhile as well: the one in which Flower looks whether the process above is gone, so
    that the work is finished then.
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
    """What arrived is not even unpacked."""


def _load_installed(**_: object) -> Callable[[str, str, str], ClientApp]:
    def load(name: str, asked: str, digest: str) -> ClientApp:
        from client_app.app import app

        if asked != (own := version("fedsurrogate")):
            log.warning("the run brought version %s of %s; this site works with its own, %s", asked, name, own)
        return app

    return load
