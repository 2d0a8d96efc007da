"""The end of a run that did not record it itself: its status, its metrics from its events, and its
report. Reading a run folder changes nothing, so commands and monitors call this before they read.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.files import READABLE, replace_file

from ..runs.reader import POLL_SECONDS, current_metrics, interrupted_metrics, why_killed
from ..runs.state import EVENTS, METRICS, Json, read_object
from ..runs.writer_lock import forget_writer, writer_is_gone


def complete_killed(*folders: Path) -> None:
    """Record the ends of runs whose writers were killed, and draw their reports. Other runs stay as
    they are.

    Several processes may do this at the same time: one of them records the end of a run, and draws.

    Args:
        folders: run folders; one that cannot be read or written stays as it is, and who can read it
            sees the run as interrupted.
    """
    for folder in folders:
        with suppress(OSError, RunError):
            if why_killed(folder) and _record(folder, ""):
                _draw(folder)


def complete_interrupted(folder: Path, why: str, wait_seconds: float = 0.0) -> None:
    """Record that a run was interrupted, and draw its report; nothing for a run that has succeeded.

    Args:
        folder: a run folder, whose processes have ended.
        why: the reason, for people.
        wait_seconds: how long to wait for the run's own last words, if another machine's or user's
            process writes them.

    Raises:
        OSError: the folder cannot be written.
    """
    if await_end(folder, wait_seconds).get("status") not in ("ok", "interrupted"):
        _record(folder, why)
        _draw(folder)


def final_metrics(folder: Path) -> Json:
    """The metrics of a run, after the end of a killed one is recorded; empty if they may not be
    read.
    """
    complete_killed(folder)
    with suppress(OSError):
        return current_metrics(folder)[0]
    return {}


def await_end(folder: Path, seconds: float) -> Json:
    """Wait until a run has recorded its end: Flower may report an end first.

    Args:
        folder: a run folder.
        seconds: how long to wait at most. A writer that is gone is not waited for.

    Returns:
        Its metrics, as far as they can be read.
    """
    end = time.monotonic() + seconds
    while (metrics := read_object(folder / METRICS)[0]).get("status") == "running":
        if writer_is_gone(folder) or time.monotonic() >= end:
            break
        time.sleep(POLL_SECONDS)
    return metrics


def _record(folder: Path, why: str) -> bool:
    """Write the event and the metrics of an interrupted run, and whether it was done; without a
    reason, only of a killed run that no other process has recorded. Raises OSError.
    """
    with _alone(folder):
        if not (why := why or why_killed(folder)):
            return False
        # Its space on a full disk is for this.
        (folder / ".reserve").unlink(missing_ok=True)
        metrics = interrupted_metrics(folder, read_object(folder / METRICS)[0], why)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        _append(folder / EVENTS, json.dumps({"time": now, "event": "interrupted", "reason": why}))
        replace_file(folder / METRICS, json.dumps(metrics, indent=2) + "\n", mode=READABLE)
        forget_writer(folder)
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time record a run's end."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _append(file: Path, line: str) -> None:
    """Append a line. A process that was killed may have left an incomplete last line, which then
    ends first.
    """
    with file.open("ab+") as events:
        if events.tell():
            events.seek(-1, os.SEEK_END)
            line = line if events.read(1) == b"\n" else f"\n{line}"
        events.write(f"{line}\n".encode())


def _draw(folder: Path) -> None:
    # Imports torch and matplotlib, and most runs need no report from here.
    from ..report.build import write_report

    with suppress(OSError, FedSurrogateError):
        write_report(folder)
