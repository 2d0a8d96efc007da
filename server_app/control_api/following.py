"""Find a run by its name or number, and follow it to its end, with and without its SuperLink."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.interface import UnreachableError
from fedsurrogate.server_app.control_api.runs import list_runs
from fedsurrogate.server_app.lifecycle.ends import complete_killed
from fedsurrogate.server_app.runs.json_files import PARTS
from fedsurrogate.server_app.runs.reader import POLL_SECONDS, LiveRun, run_folders

LATEST = "latest"
PENDING = "pending"
LOOK_SECONDS, REMIND_SECONDS = 2.0, 60.0
NOT_STARTED = (
    "the SuperLink has not started the run; check that it starts apps itself, or that `coordinator app` runs, and "
    "that no other run is active"
)
# How long a run that its SuperLink has ended may take to complete its folder.
END_SECONDS = 60.0
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Handle:
    """A run.

    Attributes:
        id: Flower's number, "" if unknown.
        folder: its run folder, None if it has none here.
    """

    id: str
    folder: Path | None


def find_handle(run: str, output: Path) -> Handle:
    """The run that a person names.

    Args:
        run: Flower's number, a run folder, the name of one in `output`, or "latest".
        output: folder of all runs.

    Returns:
        The run.

    Raises:
        RunError: there is none.
    """
    if run.isdecimal():
        return Handle(run, find_folder(output, run))
    if run == LATEST:
        newest = next(iter(run_folders(output)), None)
        if newest is None:
            raise RunError(
                f"there is no run in {str(output)!r}; `coordinator runs` lists those of the "
                "SuperLink"
            )
        return Handle(flower_id(newest), newest)
    for folder in (Path(run).expanduser(), output / run):
        if any((folder / part).is_file() for part in PARTS):
            return Handle(flower_id(folder), folder)
    raise RunError(
        f"{run!r} is no run: give a run folder, its name in {str(output)!r}, Flower's number of a "
        f"run, or {LATEST!r}; `coordinator runs` lists them"
    )


def find_folder(output: Path, run_id: str) -> Path | None:
    """The run folder in `output` of Flower's run of this number; None if there is none yet."""
    return next((folder for folder in run_folders(output) if flower_id(folder) == run_id), None)


def flower_id(folder: Path) -> str:
    """Flower's number of the run of this folder; "" if unknown."""
    try:
        number = json.loads((folder / PARTS[1]).read_text()).get("flower_run_id")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(number or "")


def follow_run(
    handle: Handle, output: Path, address: str, authority: Path | None, on_event: OnEvent
) -> Path | None:
    """Pass the events of a run on until it ends.

    A SuperLink that does not answer, or is started again, ends nothing as long as there is a
    folder.

    Args:
        handle: the run.
        output: folder of all runs.
        address: of the Control API, unix:/path or host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        on_event: takes each event of the run.

    Returns:
        The run folder; None if the SuperLink reports an end, and there is none here: the
        coordinator's app writes it on another machine, or has begun none.

    Raises:
        RunError: the SuperLink does not know the run and there is no folder, or its folder records no
            end.
    """
    live = None if handle.folder is None else LiveRun(handle.folder)
    link = _Link(handle.id, address, authority, on_event)
    while True:
        if live is None and (folder := find_handle(handle.id, output).folder) is not None:
            live = LiveRun(folder)
        if live is not None:
            complete_killed(live.folder)
            for event in live.refresh():
                on_event(event)
            if live.state.ended:
                return live.folder
        if handle.id and link.is_over(live):
            return None
        time.sleep(POLL_SECONDS)


def event_now(event: str, reason: str = "") -> dict[str, Any]:
    """An event of this command, in the form of those of a run."""
    made = {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}", "event": event}
    return made | ({"reason": reason} if reason else {})


class _Link:
    """Asks the SuperLink about a run now and then."""

    def __init__(
        self, run_id: str, address: str, authority: Path | None, on_event: OnEvent
    ) -> None:
        self._run_id, self._address, self._authority = run_id, address, authority
        self._on_event, self._problem = on_event, ""
        self._next = self._over = 0.0
        self._remind = time.monotonic() + REMIND_SECONDS

    def is_over(self, live: LiveRun | None) -> bool:
        """Whether the run has ended, and has no folder here. Raises RunError."""
        if (now := time.monotonic()) < self._next:
            return False
        self._next, before = now + LOOK_SECONDS, self._problem
        try:
            runs = list_runs(self._address, self._authority)
            run = next((run for run in runs if run.id == self._run_id), None)
            unknown = f"the SuperLink at {self._address} does not know run {self._run_id}"
            self._problem = "" if run else unknown
        except UnreachableError as error:
            run, self._problem = None, str(error)
        if self._problem and live is None:
            raise RunError(self._problem)
        if self._problem and not before:
            self._on_event(event_now("remark", self._problem))
        if live is None and run is not None and run.status == PENDING and now > self._remind:
            self._remind = now + REMIND_SECONDS
            self._on_event(event_now("waiting", NOT_STARTED))
        if run is not None and run.is_over:
            self._over = self._over or now
        if live is not None and self._over and now - self._over > END_SECONDS:
            raise RunError(f"the run has ended, but {live.folder} records no end")
        # A folder that was begun meanwhile is found before the next look.
        return live is None and 0 < self._over < now
