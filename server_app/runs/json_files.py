"""The JSON files of a run folder, read in whatever state they are, also while the run writes them."""

from __future__ import annotations

import json
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.runs.json_values import Json, clean

METRICS = "metrics.json"
MANIFEST = "manifest.json"
EVENTS = "events.jsonl"
PARTS = (METRICS, MANIFEST, EVENTS)


def read_object(file: Path) -> tuple[Json, str]:
    """Read a JSON object that may be missing or damaged. Its texts are as they stand in the file.

    Args:
        file: one of a run's JSON files.

    Returns:
        The object, and an empty text; or an empty object, and why it could not be read.

    Raises:
        OSError: the file is there, and this process may not read it.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return {}, f"{file.name} is missing"
    except (ValueError, RecursionError) as error:
        return {}, f"{file.name} cannot be read ({error})"
    return (value, "") if isinstance(value, dict) else ({}, f"{file.name} is not a JSON object")


def read_json(folder: Path, name: str) -> Json:
    """Read one of a run's JSON files.

    Args:
        folder: a run folder.
        name: of the file.

    Returns:
        The JSON object in the file. Its texts are as they stand in the file.

    Raises:
        RunError: the file is missing, cannot be read or is not a JSON object.
    """
    try:
        content = json.loads((folder / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = f"{name} cannot be read ({type(error).__name__})"
        raise RunError(f"{folder} is not a run folder: {why}") from None
    if not isinstance(content, dict):
        raise RunError(f"{folder / name} is not a JSON object")
    return content


class EventFile:
    """An events.jsonl that may grow, or not exist yet.

    Args:
        path: the file.

    Attributes:
        path: the file.
        broken: number of lines that could not be read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = 0
        self._offset = 0

    def read(self, to_the_end: bool = False) -> list[Json]:
        """Events written since the last call, in order, without characters that control a terminal.

        Args:
            to_the_end: whether an incomplete last line is read as it is. Else it waits for the next
                call.

        Returns:
            The new events; none for a file that does not exist yet.

        Raises:
            RunError: the file cannot be read.
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
        lines = (line for line in whole.split(b"\n") if line.strip())
        return [event for line in lines if (event := self._event(line)) is not None]

    def _event(self, line: bytes) -> Json | None:
        try:
            event = clean(json.loads(line.decode("utf-8", "replace")))
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            return event
        self.broken += 1
        return None
