"""Run jobs in forks of this process, each within limits of time and memory, and pytest in them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

NOT_RUN = 99  # Exit code of a fork that could not do its work.
LIMITS = (signal.SIGXCPU, signal.SIGKILL)
# Bytes that a fork may hold, what it shares with this process included. Seconds between two looks.
MOST_MEMORY, EVERY = 6 * 2**30, 0.05
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Running:
    """A job in a fork: its file, and `time.monotonic()` when it is stopped."""

    job: Any
    file: Path
    until: float


def in_forks(
    jobs: Sequence[Any],
    most: int,
    work: Callable[[Any, Path], int],
    done: Callable[[Any, str, str], None],
    until: float = float("inf"),
    longest: float = float("inf"),
) -> None:
    """Run jobs, `most` at a time.

    A fork has a process group of its own, which ends with it, and nothing in it reaches this
    process: not a signal to its group, an endless loop in C, or memory without end, where the
    kernel stops the fork first.

    Args:
        jobs: what `work` takes, in this order.
        most: forks at a time.
        work: runs in a fork, may write a file, and returns the exit code.
        done: runs here: the job, its outcome, and what its file holds.
        until: `time.monotonic()` after which no job begins.
        longest: wall-clock seconds for a job.
    """
    # A collection of garbage in a fork would otherwise touch, and so copy, all that is loaded here.
    gc.freeze()
    running: dict[int, Running] = {}
    waiting = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while running or (waiting and time.monotonic() < until):
                while waiting and len(running) < most and time.monotonic() < until:
                    job, file = waiting.pop(0), Path(folder, str(len(waiting)))
                    if not (child := os.fork()):
                        _work(work, job, file)
                    running[child] = Running(job, file, time.monotonic() + longest)
                for child, each in list(running.items()):
                    if time.monotonic() > each.until or _memory(child) > MOST_MEMORY:
                        os.kill(child, signal.SIGKILL)
                    if (status := os.waitpid(child, os.WNOHANG)) != (0, 0):
                        _end(child)
                        del running[child]
                        content = each.file.read_text() if each.file.is_file() else ""
                        done(each.job, outcome(status[1]), content)
                time.sleep(EVERY)
        finally:
            for child in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM)
            # A moment in which a fork ends its own forks.
            time.sleep(1.0 if running else 0.0)
            for child in running:
                _end(child)


def end_forks_when_ended() -> None:
    """Let a process that is asked to end take its forks, and theirs, with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def _work(work: Callable[[Any, Path], int], job: Any, file: Path) -> NoReturn:
    """Do a job in a fork, out of reach of its parent; what it prints goes nowhere."""
    code = NOT_RUN
    try:
        os.setpgid(0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        code = work(job, file)
    finally:
        os._exit(code)


def _end(child: int) -> None:
    """Stop what is left of a fork's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _memory(process: int) -> int:
    """Bytes that a process holds; 0 if it has ended."""
    try:
        return PAGE * int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def outcome(status: int) -> str:
    """What happened to a mutant, by how its fork ended: survived, killed, timeout or error."""
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in LIMITS else "killed"
    # Exit codes of pytest: 0, all tests passed; 4, a test does not exist; 5, no test was selected.
    return {0: "survived", 4: "error", 5: "survived", NOT_RUN: "error"}.get(
        os.WEXITSTATUS(status), "killed"
    )


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


class FirstExample:
    """A pytest plugin: the first example that fails ends a test of Hypothesis. It looks for no
    smaller one.
    """

    def pytest_collection(self) -> None:
        if "hypothesis" in sys.modules:
            from hypothesis import Phase, settings

            phases = (Phase.explicit, Phase.generate)
            settings.register_profile("first example", settings(), phases=phases)
            settings.load_profile("first example")


def pytest_exit(arguments: Sequence[str], *plugins: object) -> int:
    """Exit code of pytest with these arguments, in this process."""
    import pytest

    # unraisableexception collects garbage at each end, for seconds where much is loaded.
    without = ("cacheprovider", "xdist", "unraisableexception", "threadexception")
    options = ["-q", "-x", "--tb=no", *(word for name in without for word in ("-p", f"no:{name}"))]
    return int(pytest.main([*options, *arguments], plugins=[*plugins, FirstExample()]))
