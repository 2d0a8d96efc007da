"""Read a run folder while the run writes it: new events, and the folder of the newest run."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from common.errors import RunError
from server_app.runs.json_values import Json, as_table, clean
from server_app.runs.state import RunState

POLL_SECONDS = 0.3
PARTS = ("metrics.json", "manifest.json", "events.jsonl")


class EventFile:
    """An events.jsonl that may grow, or not exist yet. `broken` counts lines that could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = 0
        self._offset = 0

    def read(self, to_the_end: bool = False) -> list[Json]:
        """Events written since the last call, in order, without characters that control a terminal.

        An incomplete last line waits for the next call; `to_the_end` reads it as it is. Raises RunError for an unreadable
        file.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}") from None
        whole = added if to_the_end else added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.split(b"\n") if line.strip() and (event := self._event(line)) is not None]

    def _event(self, line: bytes) -> Json | None:
        try:
            event = clean(json.loads(line.decode("utf-8", "replace")))
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            return event
        self.broken += 1
        return None


class LiveRun:
    """A run folder that may still grow. `state` is the state at the last `refresh`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = RunState()
        self.metrics: Json = {}
        self.manifest: Json = {}
        self._events = EventFile(folder / "events.jsonl")

    def refresh(self) -> list[Json]:
        """Read new files and lines, and return the new events. Raises RunError when the folder is gone."""
        from server_app.lifecycle.ending import settled

        # Read metrics before events: after metrics report the end there are no more events, so none is missed.
        self.metrics = clean(settled(self.folder, _object(self.folder / "metrics.json")))
        self.manifest = self.manifest or _object(self.folder / "manifest.json")
        events = self._events.read()
        if not self.folder.is_dir():
            raise RunError(f"the run folder {self.folder} is gone")
        for event in events:
            self.state.take(event)
        self.state.conclude(self.metrics)
        return events

    @property
    def budget(self) -> float | None:
        """Return the epsilon in the run's settings, None without one."""
        epsilon = as_table(self.manifest.get("config")).get("epsilon")
        return float(epsilon) if isinstance(epsilon, int | float) and epsilon else None


def follow(run: LiveRun, timeout: float = 0.0) -> Iterator[list[Json]]:
    """Yield the new events of a run as a list (often empty) at every refresh, until the run has ended.

    Raises RunError when the folder is gone, or after `timeout` seconds without an event (0: wait for ever).
    """
    heard = time.monotonic()
    while True:
        events = run.refresh()
        heard = time.monotonic() if events else heard
        yield events
        if run.state.ended:
            return
        if timeout and time.monotonic() - heard > timeout:
            raise RunError(f"no event for {timeout:g} s in {run.folder}; its coordinator may have stopped")
        time.sleep(POLL_SECONDS)


def run_folders(output: Path) -> list[Path]:
    """The run folders in an output folder, newest first: their names begin with their creation time."""
    return sorted((manifest.parent for manifest in output.glob("*/manifest.json")), key=lambda folder: folder.name)[::-1]


def find_run(path: Path, known: Collection[Path] = ()) -> Path | None:
    """The run folder `path`, or the newest in the output folder `path` that is not `known`; None when there is none yet.

    Raises RunError when `path` is not a folder.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{str(path)!r} is a file; give a run folder, or the folder of all runs")
    if any((path / part).is_file() for part in PARTS):
        return path
    return next((folder for folder in run_folders(path) if folder not in known), None)


def await_run(path: Path, known: Collection[Path] = (), timeout: float = 0.0) -> Path:
    """Wait until `find_run` finds a run folder. Raises RunError after `timeout` seconds (0: wait for ever)."""
    end = time.monotonic() + timeout
    while (folder := find_run(path, known)) is None:
        if timeout and time.monotonic() > end:
            raise RunError(f"no run has begun in {str(path)!r} for {timeout:g} s")
        time.sleep(POLL_SECONDS)
    return folder


def _object(path: Path) -> Json:
    """The JSON object in a file; an empty one if there is none."""
    try:
        return as_table(clean(json.loads(path.read_text(encoding="utf-8", errors="replace"))))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
