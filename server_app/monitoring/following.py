"""Wait for a run to begin, and follow it to its end, also if it is killed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.lifecycle.ends import complete_killed
from fedsurrogate.server_app.runs.json_values import Json
from fedsurrogate.server_app.runs.reader import POLL_SECONDS, LiveRun, find_run


def look(run: LiveRun) -> list[Json]:
    """The new events of a run, the end of a killed run included.

    Args:
        run: the run folder.

    Returns:
        The events.

    Raises:
        RunError: the folder is gone.
    """
    complete_killed(run.folder)
    return run.refresh()


def follow(run: LiveRun, timeout: float = 0.0) -> Iterator[list[Json]]:
    """Yield the new events of a run as a list (often empty) at every look, until the run has ended.

    Args:
        run: a run folder, which need not exist in full yet.
        timeout: the longest time without an event in seconds; 0 waits for ever.

    Raises:
        RunError: the folder is gone, or the time has passed.
    """
    heard = time.monotonic()
    while True:
        events = look(run)
        heard = time.monotonic() if events else heard
        yield events
        if run.state.ended:
            return
        if timeout and time.monotonic() - heard > timeout:
            raise RunError(
                f"no event for {timeout:g} s in {run.folder}; its coordinator may have stopped"
            )
        time.sleep(POLL_SECONDS)


def await_run(path: Path, known: Collection[Path] = (), timeout: float = 0.0) -> Path:
    """Wait until there is a run folder.

    Args:
        path: a run folder, or the folder of all runs.
        known: run folders that do not count.
        timeout: the longest time to wait in seconds; 0 waits for ever.

    Returns:
        The folder `path`, or the newest run folder in it.

    Raises:
        RunError: `path` is a file, or the time has passed.
    """
    end = time.monotonic() + timeout
    while (folder := find_run(path, known)) is None:
        if timeout and time.monotonic() > end:
            raise RunError(f"no run has begun in {str(path)!r} for {timeout:g} s")
        time.sleep(POLL_SECONDS)
    return folder
