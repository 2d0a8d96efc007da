"""A process that is restarted when it ends: it has its own group, its output is read by lines, its
children end with it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import psutil

from fedsurrogate.client_app.processes.kernel import end_with_parent
from fedsurrogate.common.escapes import for_terminal

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between the end of a process and its next start; doubled each time it ends soon after its start."""
STEADY = 60.0
"""A process that ends within these seconds has ended soon after its start."""
LONGEST_LINE, LAST_LINES = 2**16, 5
# Colours and the like, which Flower writes into its log.
_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Child:
    """Runs a process again and again, with a growing pause between ends and starts.

    Not for use by several threads.

    Args:
        name: is printed before its lines.

    Attributes:
        last: the last few lines.
        soon_ended: number of the last processes in a row that ended within `STEADY` seconds.
    """

    def __init__(self, name: str) -> None:
        self.name, self.soon_ended = name, 0
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._orphans: list[psutil.Process] = []
        self._started = self._next_start = 0.0
        self._pause, self._unfinished = FIRST_PAUSE, b""
        # One pipe for all processes: an orphan may still write when the next process has started.
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        """File descriptor that becomes readable when the process has written something."""
        return self._read

    @property
    def running(self) -> bool:
        """Whether a process was started whose end has not been reported yet."""
        return self._process is not None

    @property
    def due(self) -> bool:
        """Whether it is time to start the next process."""
        return self._process is None and time.monotonic() >= self._next_start

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process.

        Args:
            command: program and arguments.
            environment: its variables.

        Raises:
            OSError: if the program does not exist.
        """
        self._started = time.monotonic()
        self.last.clear()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._write,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in a terminal then reaches only this process, which ends the others in order.
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def ended(self) -> int | None:
        """The exit code if the process has ended since the last call, otherwise None."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._orphans += _group(self._process.pid)
        self._process = None
        soon = time.monotonic() - self._started < STEADY
        self.soon_ended = self.soon_ended + 1 if soon else 0
        if not soon:
            self._pause = FIRST_PAUSE
        self.postpone()
        return code

    def postpone(self, seconds: float = 0.0) -> float:
        """Postpone the next start by so long, or longer each time; return the pause in seconds."""
        pause, self._pause = seconds or self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._next_start = time.monotonic() + pause
        return pause

    def lines(self) -> list[str]:
        """Complete lines written since the last call, safe to print, without empty ones."""
        text = self._unfinished
        with suppress(BlockingIOError):
            while len(text) < LONGEST_LINE and (piece := os.read(self._read, LONGEST_LINE)):
                text += piece
        *whole, self._unfinished = text.split(b"\n")
        if len(self._unfinished) >= LONGEST_LINE:
            whole, self._unfinished = [*whole, self._unfinished], b""
        # A line may quote text that arrived with a run.
        texts = (_SEQUENCE.sub("", line.decode(errors="replace")) for line in whole)
        printable = (for_terminal(text).rstrip() for text in texts)
        complete = [line for line in printable if line]
        self.last.extend(complete)
        return complete

    def family(self) -> list[psutil.Process]:
        """All processes that still run: this one, its children, and orphans of earlier ones."""
        self._orphans = [orphan for orphan in self._orphans if _alive(orphan)]
        return self._orphans + (_group(self._process.pid) if self._process is not None else [])

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the whole family, process by process."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _group(leader: int) -> list[psutil.Process]:
    """Running processes of the group whose leader is `leader`."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == leader and _alive(process):
                processes.append(process)
    return processes


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
