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
from fedsurrogate.common.flower.interface import FlowerRun, UnreachableError
from fedsurrogate.server_app.control_api.runs import list_runs
from fedsurrogate.server_app.lifecycle.ends import complete_killed
from fedsurrogate.server_app.runs.json_files import PARTS
from fedsurrogate.server_app.runs.reader import POLL_SECONDS, LiveRun, run_folders

LATEST = "latest"
LOOK_SECONDS = 5.0
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
        return Handle(
            run, next((folder for folder in run_folders(output) if flower_id(folder) == run), None)
        )
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


def flower_id(folder: Path) -> str:
    """Flower's number of the run of this folder; "" if unknown."""
    try:
        number = json.loads((folder / PARTS[1]).read_text()).get("flower_run_id")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(number or "")


def follow_run(
    handle: Handle,
    output: Path,
    address: str,
    authority: Path | None,
    on_event: OnEvent,
    shown: int = 0,
) -> Path | None:
    """Pass the events of a run on until it ends.

    A SuperLink that does not answer, or is started again, ends nothing as long as there is a
    folder.

    Args:
        handle: the run.
        output: folder of all runs.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        on_event: takes each event of the run.
        shown: number of events at the start that are not passed on.

    Returns:
        The run folder; None if the coordinator's app writes it on another machine.

    Raises:
        RunError: the run ended without a folder here and was not successful, the SuperLink does not
            know it and there is no folder, or its folder records no end.
    """
    followed = _Followed(handle, output, on_event, shown)
    link = _Link(handle.id, address, authority)
    while not followed.read():
        if handle.id and link.due:
            link.ask()
            if followed.live is None and link.run is None:
                raise RunError(link.problem)
            if link.news:
                on_event(
                    {
                        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}",
                        "event": "remark",
                        "reason": link.problem,
                    }
                )
            if link.run is not None and link.run.is_over:
                if followed.live is None:
                    _check_end(link.run)
                    return None
                if link.over_for > END_SECONDS:
                    raise RunError(
                        f"the SuperLink reports {link.run.status}, but {followed.live.folder} "
                        "records no end"
                    )
        time.sleep(POLL_SECONDS)
    return None if followed.live is None else followed.live.folder


class _Followed:
    """The run folder of a run, once there is one, and the number of its events so far."""

    def __init__(self, handle: Handle, output: Path, on_event: OnEvent, shown: int) -> None:
        self.live: LiveRun | None = None
        self._handle, self._output, self._on_event = handle, output, on_event
        self._shown, self._seen = shown, 0

    def read(self) -> bool:
        """Pass new events on; return whether the run has ended."""
        if self.live is None:
            folder = self._handle.folder or find_handle(self._handle.id, self._output).folder
            self.live = None if folder is None else LiveRun(folder)
        if self.live is None:
            return False
        complete_killed(self.live.folder)
        for event in self.live.refresh():
            self._seen += 1
            if self._seen > self._shown:
                self._on_event(event)
        return self.live.state.ended


class _Link:
    """What the SuperLink last reported of a run. problem: why it is not known there; news: whether
    that is new.
    """

    def __init__(self, run_id: str, address: str, authority: Path | None) -> None:
        self._run_id, self._address, self._authority = run_id, address, authority
        self.run: FlowerRun | None = None
        self.problem, self.news = "", False
        self._next = self._over = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time to ask."""
        return time.monotonic() >= self._next

    @property
    def over_for(self) -> float:
        """Seconds since the SuperLink first reported that the run is over."""
        return time.monotonic() - self._over if self._over else 0.0

    def ask(self) -> None:
        """Ask the SuperLink."""
        before, self._next = self.problem, time.monotonic() + LOOK_SECONDS
        try:
            self.run = next(
                (
                    run
                    for run in list_runs(self._address, self._authority)
                    if run.id == self._run_id
                ),
                None,
            )
            self.problem = (
                ""
                if self.run
                else f"the SuperLink at {self._address} does not know run {self._run_id}"
            )
        except UnreachableError as error:
            self.run, self.problem = None, str(error)
        self.news = bool(self.problem) and not before
        if self.run is not None and self.run.is_over:
            self._over = self._over or time.monotonic()


def _check_end(run: FlowerRun) -> None:
    if run.status != "finished:completed":
        raise RunError(
            f"run {run.id} ended as {run.status}; its folder is on the machine of the "
            "coordinator's app"
        )
