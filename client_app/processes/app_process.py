"""Run the code installed at this site for every task; code that arrives with a run is never
started.

Flower sends an app's code with every run, and a SuperNode starts it. A malicious coordinator could
so send code that reads a hospital's data and returns them, past policy and ledger. A site that
starts its app with `site join`, or with `site app` next to its own SuperNode, runs only the code
installed at the site. It uses only the settings of a run, and those of the site's own start.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import LOG
from fedsurrogate.common.files import owner_only
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import without_proxy_here
from fedsurrogate.common.logs import configure_log
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.common.version import own_version

from ..node_config import parse_node_config
from . import own_account
from .app_report import reporting
from .node_process import shorten_errors
from .supervisor import found_data

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp


FLAG = "--warm"
# Variable of the environment; "0": each task is a new process, which needs less memory at rest.
SWITCH = "FEDSURROGATE_WARM"
LONGEST = 2**16
# Seconds between two starts of such a process at least; tasks meanwhile are new processes.
PAUSE = 60.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
READY_NAME = "site-warm"
MODULES = (
    "numpy",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.special",
    "scipy.stats",
    "sklearn.mixture",
    "sklearn.linear_model",
    "flwr.supernode.cli.flwr_clientapp",
    "fedsurrogate.client_app.secure_aggregation",
    "fedsurrogate.client_app.clientapp",
    "fedsurrogate.client_app.requests",
)
# Of a site; all their modules are imported.
PACKAGES = ("methods", "governance", "features")


class WarmStarter:
    """Starts a process for each task: a child of a warm process, or a new one if none runs.

    Args:
        command: Path of `site-app`.
        environment: Variables of this process.
    """

    def __init__(self, command: Path, environment: Mapping[str, str]) -> None:
        self._command = str(command)
        self._wanted = sys.platform == "linux" and environment.get(SWITCH) != "0"
        self._begun = -math.inf
        self._version = tuple[int, ...]()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._former = list[subprocess.Popen[bytes]]()
        # Handed to the warm process, which has not confirmed that it has forked.
        self._pending = deque[Sequence[str]]()

    def __enter__(self) -> WarmStarter:
        self.tend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """The warm process ends, and no other begins."""
        self._pending.clear()
        self._retire()

    def start(self, arguments: Sequence[str]) -> None:
        """Start a process for a task, with these arguments."""
        self.tend()
        if self._version and self._version != own_account.installed() and not self._pending:
            self._retire()
        self._begin()
        try:
            if self._link is None:
                raise OSError
            self._link.send(json.dumps(arguments).encode())
        except OSError:
            self._start_new(arguments)
            return
        self._pending.append(arguments)

    def tend(self) -> None:
        """Start the warm process again if it has ended, and its tasks that have not begun."""
        if self._link is not None:
            try:
                while _received(self._link):
                    self._pending.popleft()
                self._retire()
            except BlockingIOError:
                pass
            except OSError:
                self._retire()
        self._former = [each for each in self._former if each.poll() is None]
        self._begin()

    def _begin(self) -> None:
        if not self._wanted or self._link or time.monotonic() - self._begun < PAUSE:
            return
        self._begun, self._version = time.monotonic(), own_account.installed()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [self._command, FLAG, str(number), str(os.getpid())], pass_fds=[number]
            )

    def _retire(self) -> None:
        """Let the warm process end; start the tasks that it has not begun."""
        if self._link is not None and self._process is not None:
            self._link.close()
            self._former.append(self._process)
        if self._version != own_account.installed():
            self._begun = -math.inf
        self._link = self._process = None
        while self._pending:
            self._start_new(self._pending.popleft())

    def _start_new(self, arguments: Sequence[str]) -> None:
        self._former.append(
            subprocess.Popen([self._command], env=os.environ | own_account.unseen(arguments))
        )


def _received(link: socket.socket) -> bytes:
    """What has arrived; empty after the end. Of an end with unread requests the kernel tells before it
    gives what had arrived: without a second look, a task that has begun would begin again.
    """
    try:
        return link.recv(LONGEST, socket.MSG_DONTWAIT)
    except ConnectionResetError:
        return link.recv(LONGEST, socket.MSG_DONTWAIT)


def serve_children(descriptor: int, parent: int) -> list[str]:
    """Import everything, then fork a child for each request.

    Args:
        descriptor: Of the socket from which requests come.
        parent: Process id of the parent.

    Returns:
        Arguments of the task, in each child. The caller must end the process after the task.

    Raises:
        SystemExit: In the process itself, once its parent has closed the socket. Children that have
            no message yet end with it, and the others when they have replied.
    """
    own_account.end_with_parent(signal.SIGTERM, parent)
    own_account.name_process(READY_NAME)
    control = socket.socket(fileno=descriptor)
    # A kernel without them raises before there is a child.
    os.close(os.pidfd_open(os.getpid()))
    import_all()
    _end_without_clearing()
    gc.collect()
    # Objects that the collector does not touch are on pages that children share.
    gc.freeze()

    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    children = dict[int, int]()
    while True:
        ready, _, _ = select.select([control.fileno(), *children], [], [])
        for each in [each for each in ready if each in children]:
            _reap(children.pop(each), each)
        if control.fileno() not in ready:
            continue
        if not (request := control.recv(LONGEST)):
            raise SystemExit(0)
        if child := _fork():
            control.send(b"1")
            children[os.pidfd_open(child)] = child
            continue
        for each in children:
            os.close(each)
        control.close()
        arguments: list[str] = json.loads(request)
        return arguments


def import_all() -> None:
    """Import what a task of any method needs: installed code only."""
    flower()
    for name in MODULES:
        importlib.import_module(name)
    for package in PACKAGES:
        folder = importlib.import_module(f"fedsurrogate.client_app.{package}")
        for found in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            importlib.import_module(found.name)


def _end_without_clearing() -> None:
    """Let the end of a child take no steps for objects of its parent: torch alone has thousands, which
    would copy their memory.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False


def _fork() -> int:
    """Process id of a new child; 0 in the child, in which signals that end it are blocked."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    own = os.getpid()
    if child := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return child
    own_account.end_with_parent(signal.SIGKILL, own)
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own_account.name_process(own_account.TASK_NAME)
    # When memory runs out, the kernel ends the process with the highest number first.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    renew_generators()
    return 0


def renew_generators() -> None:
    """Seed the generators of the process from the operating system. A fork copies their state, so
    all children would draw the same numbers.
    """
    import random

    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()


def _reap(child: int, descriptor: int) -> None:
    os.close(descriptor)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in list(signal.Signals) else str(number)
        print(f"the process of a task was ended by {name}", file=sys.stderr, flush=True)


COMMAND, PARENT = "site-app", "--parent-pid"
ENDED = "the site's app was stopped"


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
    runtime, node = own_account.own_socket(runtime), parse_node_config(parse_overrides([settings]))
    os.environ.update(without_proxy_here(os.environ) | {own_account.SETTINGS: settings})
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
        own_account.end_after(answer_task)
    own_account.take_arguments(1)
    own_account.name_process(own_account.TASK_NAME)
    if PARENT in sys.argv:
        own_account.end_with_parent(signal.SIGKILL, int(sys.argv[sys.argv.index(PARENT) + 1]))
    answer_task()


def answer_task() -> None:
    """Run the task that the arguments of this process name."""
    flower().client_task(_load_installed, AnswerOnTermination())


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
        own_account.end_with_parent(0)
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
        LOG.warning(
            "the run contains version %s of %s; this site uses its own, %s", packed, name, own
        )
    return app_at_site(os.environ[own_account.SETTINGS])
