"""Complete the folder of a run that did not record its own end: first its end is written, then its
report is drawn.

Reading a run folder changes nothing, so commands and monitors call this before they read.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.server_app.lifecycle.settling import mark_interrupted, settle
from fedsurrogate.server_app.runs.json_values import Json
from fedsurrogate.server_app.runs.reader import current_metrics


def complete_killed(*folders: Path) -> None:
    """Record the ends of runs whose writers were killed, and draw their reports. Other runs stay as
    they are.

    Args:
        folders: run folders; one that cannot be read or written stays as it is.
    """
    for folder in filter(settle, folders):
        _draw(folder)


def final_metrics(folder: Path) -> Json:
    """The metrics of a run, after the end of a killed one is recorded; empty if they may not be
    read.
    """
    complete_killed(folder)
    with suppress(OSError):
        return current_metrics(folder)[0]
    return {}


def complete_interrupted(folder: Path, why: str, wait_seconds: float = 0.0) -> None:
    """Record that a run was interrupted, and draw its report; nothing for a run that has succeeded.

    Args:
        folder: a run folder, whose processes have ended.
        why: the reason, for people.
        wait_seconds: how long to wait for the run's own last words.

    Raises:
        OSError: the folder cannot be written.
    """
    if mark_interrupted(folder, why, wait_seconds):
        _draw(folder)


def _draw(folder: Path) -> None:
    # Imports torch and matplotlib, and most runs need no report from here.
    from fedsurrogate.server_app.report.build import write_report

    with suppress(OSError, FedSurrogateError):
        write_report(folder)
