"""Run the code installed at this site for every task; code that arrives with a run is never
started.

Flower sends an app's code with every run, and a SuperNode starts it. A malicious coordinator could
so send code that reads a hospital's data and returns them, past policy and ledger. A site that
starts its app with `site join`, or with `site app` next to its own SuperNode, runs only the code
installed at the site. It uses only the settings of a run, and those of the site's own start.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedsurrogate.common.files import owner_only
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import without_proxy_here
from fedsurrogate.common.logs import configure_log
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.common.version import own_version

from ..node_config import parse_node_config
from .app_report import reporting
from .node_process import shorten_errors
from .own_account import SETTINGS, end_with_parent, name_process, own_socket, take_arguments
from .supervisor import found_data
from .warm import ENDS, FLAG, TASK_NAME, WarmStarter, serve_children

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

COMMAND, PARENT = "site-app", "--parent-pid"
ENDED = "the site's app was stopped"
log = logging.getLogger("fedsurrogate.site")


def serve(runtime: str, settings: str, joined: bool = False) -> None:
    """Start `site-app` for every task of a SuperNode. Does not return.

    Args:
        runtime: Address of the SuperNode's Runtime API: unix:/path.
        settings: The site's own node-config, as one text. No other holds in a task.
        joined: Whether `site join` has looked at the data, and answers for this app.

    Raises:
        RunError: The site lacks data, and has not joined.
        ConfigError: For settings that are wrong, or a socket that others could replace.
    """
    runtime, node = own_socket(runtime), parse_node_config(parse_overrides([settings]))
    os.environ.update(without_proxy_here(os.environ) | {SETTINGS: settings})
    configure_log(os.environ)
    command = Path(sys.executable).with_name(COMMAND)
    with ExitStack() as kept:
        if not joined:
            reporter = kept.enter_context(reporting(runtime, node))
            reporter.found_data = found_data(runtime, node)
        flower().superexec(runtime, kept.enter_context(WarmStarter(command, os.environ)))


@owner_only()
def answer() -> None:
    """The command `site-app`: runs one task, with the arguments of flwr-clientapp. With `--warm` it
    forks a child for each task.
    """
    configure_log(os.environ)
    shorten_errors()
    if sys.argv[1:2] == [FLAG]:
        descriptor, parent = map(int, sys.argv[2:4])
        sys.argv[1:] = serve_children(descriptor, parent)
        _end_after(answer_task)
    take_arguments(1)
    name_process(TASK_NAME)
    if PARENT in sys.argv:
        end_with_parent(signal.SIGKILL, int(sys.argv[sys.argv.index(PARENT) + 1]))
    answer_task()


def answer_task() -> None:
    """Run the task that the arguments of this process name."""
    flower().client_task(_load_installed, AnswerOnTermination())


def _end_after(work: Callable[[], None]) -> NoReturn:
    """End this process after the work, whatever it raises. It leaves the modules of its parent as
    they are: to remove them would copy their memory.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class AnswerOnTermination:
    """Sends the SuperNode a reply when a signal ends this process during its work.

    Flower's own app sends none. The SuperNode then waits for ever: connected, healthy, but it takes
    no other run. Signals are blocked until there is a message to answer, and while a reply is being
    sent. Threads that start meanwhile inherit this, among them the one in which Flower checks
    whether the parent process has ended; the work is then finished first.

    A process that has no message yet ends with its parent, and by any signal once its SuperNode does
    not answer: there is nothing to reply to.
    """

    def __init__(self) -> None:
        self._answered = self._received = False
        self._handlers = dict[int, Any]()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)

    def unreachable(self) -> None:
        """From now on a signal ends the process at once, until there is a message."""
        if not self._received and threading.current_thread() is threading.main_thread():
            for number in ENDS:
                self._handlers.setdefault(number, signal.signal(number, signal.SIG_DFL))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    def received(self, give_up: Callable[[str], None]) -> None:
        """From now on a signal ends the process, with an error as its reply."""
        self._received = True
        end_with_parent(0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

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
    from ..clientapp import app_at_site

    if packed != (own := own_version()):
        log.warning(
            "the run contains version %s of %s; this site uses its own, %s", packed, name, own
        )
    return app_at_site(os.environ[SETTINGS])
