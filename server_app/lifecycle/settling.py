"""Write the end of a run that did not record it itself: its status, its metrics from its events.
Nothing is drawn.
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

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.files import READABLE, replace_file
from fedsurrogate.server_app.runs.json_files import EVENTS, METRICS, read_object
from fedsurrogate.server_app.runs.json_values import Json
from fedsurrogate.server_app.runs.killed import interrupted_metrics, why_killed
from fedsurrogate.server_app.runs.reader import POLL_SECONDS
from fedsurrogate.server_app.runs.writer_lock import forget_writer, writer_is_gone


def settle(folder: Path) -> bool:
    """Record a killed run as interrupted. A run whose writer exists, or that has recorded its end,
    stays as it is.

    Several processes may settle one run at the same time: one of them records its end. A folder
    that cannot be read or written stays as it is; who can read it sees the run as interrupted.

    Args:
        folder: a run folder.

    Returns:
        Whether this call has recorded the end.
    """
    with suppress(OSError, RunError):
        if why_killed(folder):
            with _alone(folder):
                if why := why_killed(folder):
                    _record(folder, read_object(folder / METRICS)[0], why)
                    return True
    return False


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


def mark_interrupted(folder: Path, why: str, wait_seconds: float = 0.0) -> bool:
    """Record that a run was interrupted, unless it has succeeded. Called when its processes have
    ended.

    Args:
        folder: a run folder.
        why: the reason, for people.
        wait_seconds: how long to wait for the run's own last words, if another machine's or user's
            process writes them.

    Returns:
        Whether this call has recorded it.

    Raises:
        OSError: the folder cannot be written.
    """
    metrics = await_end(folder, wait_seconds)
    if metrics.get("status") in ("ok", "interrupted"):
        return False
    with _alone(folder):
        _record(folder, metrics, why)
    return True


def _record(folder: Path, metrics: Json, why: str) -> None:
    """Write the event and the metrics of an interrupted run. Raises OSError."""
    # Its space on a full disk is for this.
    (folder / ".reserve").unlink(missing_ok=True)
    metrics = interrupted_metrics(folder, metrics, why)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    _append(folder / EVENTS, json.dumps({"time": now, "event": "interrupted", "reason": why}))
    replace_file(folder / METRICS, json.dumps(metrics, indent=2) + "\n", mode=READABLE)
    forget_writer(folder)


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
