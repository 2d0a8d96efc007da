"""A process that has imported everything once, and forks a child for each task.

A new Python needs seconds for Flower, torch and scikit-learn; a child of such a process needs
hundredths. It opens no connection, initialises no GPU and computes nothing, so that a child starts as
a new process would, but for its memory, which it shares until it writes. What ends a child leaves the
process and later children as they are.
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
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fedsurrogate.common.flower import flower

from .own_account import end_first_without_memory, end_with_parent, installed, name_process, unseen

FLAG = "--warm"
SWITCH = "FEDSURROGATE_WARM"
"""Variable of the environment; "0": each task is a new process, which needs less memory at rest."""
LONGEST = 2**16
PAUSE = 60.0
"""Seconds between two starts of such a process at least; tasks meanwhile are new processes."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
READY_NAME, TASK_NAME = "site-warm", "site-task"
MODULES = (
    "numpy",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.special",
    "scipy.stats",
    "sklearn.mixture",
    "sklearn.linear_model",
    "flwr.supernode.cli.flwr_clientapp",
    "fedsurrogate.client_app.secure_sum",
    "fedsurrogate.client_app.clientapp",
    "fedsurrogate.client_app.requests",
)
PACKAGES = ("methods", "governance", "features")
"""Of a site; all their modules are imported."""


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
        if self._version and self._version != installed() and not self._pending:
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
        self._begun, self._version = time.monotonic(), installed()
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
        if self._version != installed():
            self._begun = -math.inf
        self._link = self._process = None
        while self._pending:
            self._start_new(self._pending.popleft())

    def _start_new(self, arguments: Sequence[str]) -> None:
        self._former.append(subprocess.Popen([self._command], env=os.environ | unseen(arguments)))


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
    end_with_parent(signal.SIGTERM, parent)
    name_process(READY_NAME)
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
    end_with_parent(signal.SIGKILL, own)
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name_process(TASK_NAME)
    end_first_without_memory()
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
