"""Run jobs in forks of this process, and pytest in them."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NOT_RUN = 99  # Exit code of a fork that could not do its work.
LIMITS = (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)


def in_forks(
    jobs: Sequence[Any],
    most: int,
    work: Callable[[Any, Path], int],
    done: Callable[[Any, str, str], None],
    until: float = float("inf"),
) -> None:
    """Run jobs, `most` at a time.

    Args:
        jobs: what `work` takes, in this order.
        most: forks at a time.
        work: runs in a fork, may write a file, and returns the exit code.
        done: runs here: the job, its outcome, and what its file holds.
        until: `time.monotonic()` after which no job begins.
    """
    # A collection of garbage in a fork would otherwise touch, and so copy, all that is loaded here.
    gc.freeze()
    running: dict[int, tuple[Any, Path]] = {}
    waiting = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        while running or (waiting and time.monotonic() < until):
            while waiting and len(running) < most and time.monotonic() < until:
                job, file = waiting.pop(0), Path(folder, str(len(waiting)))
                if not (child := os.fork()):
                    _quiet()
                    code = NOT_RUN
                    try:
                        code = work(job, file)
                    finally:
                        os._exit(code)
                running[child] = (job, file)
            child, status = os.wait()
            job, file = running.pop(child)
            done(job, outcome(status), file.read_text() if file.is_file() else "")


def _quiet() -> None:
    """Send what a fork prints nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def outcome(status: int) -> str:
    """What happened to a mutant, by how its fork ended: survived, killed, timeout or error."""
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in LIMITS else "killed"
    # Exit codes of pytest: 0, all tests passed; 5, no test was selected.
    return {0: "survived", 5: "survived", NOT_RUN: "error"}.get(os.WEXITSTATUS(status), "killed")


class Killer:
    """A pytest plugin that writes the names of failing tests to a file, one a line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(f"collection of {report.nodeid}")

    def _write(self, name: str) -> None:
        with self._file.open("a") as file:
            print(name, file=file)


def pytest_exit(arguments: Sequence[str], *plugins: object) -> int:
    """Exit code of pytest with these arguments, in this process."""
    import pytest

    # unraisableexception collects garbage at each end, for seconds where much is loaded.
    without = ("cacheprovider", "xdist", "unraisableexception", "threadexception")
    options = ["-q", "-x", *(word for name in without for word in ("-p", f"no:{name}"))]
    return int(pytest.main([*options, *arguments], plugins=plugins))
