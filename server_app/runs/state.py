"""Untrusted JSON files of a run folder, read without failing, and the state of a run, computed from
its events.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import for_terminal, human_bytes, human_seconds, percent
from fedsurrogate.common.methods import METHODS

Json = dict[str, Any]


def clean(value: Any) -> Any:
    """Replace characters that are unsafe to show in all strings: control, text direction, lone
    surrogates.

    Args:
        value: any value from JSON.

    Returns:
        The same value with safe strings, also in keys of tables.

    Example:
        >>> clean({"two\\nlines": [1.5, "a\\tb"]})
        {'two lines': [1.5, 'a b']}
    """
    if isinstance(value, str):
        return for_terminal(value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    return (
        {clean(key): clean(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def at(value: Any, *keys: str) -> Any:
    """Return the value at `keys` in nested tables, or None.

    Args:
        value: any value from JSON.
        keys: from the outermost table to the innermost.

    Returns:
        The value; None where a key is missing or a value on the way is not a table.

    Example:
        >>> at({"seconds": {"total": 2.5}}, "seconds", "total")
        2.5
        >>> at({"seconds": 3}, "seconds", "total") is None
        True
    """
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_table(value: Any) -> Json:
    """Return a table unchanged, and an empty table for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and an empty list for anything else."""
    return value if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else.

    Example:
        >>> as_number(3), as_number(True), as_number("3"), as_number(float("nan"))
        (3.0, None, None, None)
    """
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def as_numbers(value: Any) -> dict[str, float]:
    """Return the entries of a table that are finite numbers."""
    return {
        str(key): number
        for key, item in as_table(value).items()
        if (number := as_number(item)) is not None
    }


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which "site 10" follows "site 9".

    Example:
        >>> sorted(["site 10", "site 9", "north"], key=natural_order)
        ['north', 'site 9', 'site 10']
    """
    return [
        (0, int(part)) if part.isdecimal() else (1, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


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


Fate = Literal["waiting", "used", "rejected", "dropped"]
FATES: tuple[Fate, ...] = ("waiting", "used", "rejected", "dropped")
# The fate that an event gives to its site. A late reply is stored, but nothing is learned from it.
FATE_OF: dict[str, Fate] = {
    "invited": "waiting",
    "identified": "waiting",
    "joined": "waiting",
    "absent": "waiting",
    "replied": "used",
    "evaluated": "used",
    "late": "dropped",
    "rejected": "rejected",
    "dropped": "dropped",
    "left-out": "dropped",
}
# Events that show the outcome of a request to a site, for the report.
OUTCOMES = ("absent", "invited", "replied", "rejected", "dropped", "late")
# Fields of an event that are too long for a line, or shown elsewhere in it.
NOT_SHOWN = ("time", "event", "counts", "parts", "radii")
# Fields of an event that are shown with a unit. In a comparison every number is an accuracy.
UNITS: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(("bytes", "bytes_up", "payload"), human_bytes),
    "seconds": human_seconds,
    "accuracy": percent,
}


@dataclass
class SiteState:
    """State of one site.

    Attributes:
        name: of the site.
        doing: its newest event of those in `FATE_OF`, or "evaluation-failed".
        fate: "waiting", "used", "rejected" or "dropped".
        reason: of that event, "" without one.
        step: the round or chain step of its last reply.
        version: of its software, known after the end.
        bytes: sent up so far.
        seconds: working time, over all rounds.
        accuracy: on its own test records, in [0, 1].
        epsilon: of its releases, known after the end.
        counts: records by class, as in its last reply that has them.
        outcomes: every event of `OUTCOMES` with its reason, "" without one.
        status: where the run folder is read: "used", "replied", "no reply" or another of its outcomes.
        troubles: likewise, what went wrong and why, in order, each once.
        tested: likewise, number of its own test records.
        counted: likewise, records that its surrogate represents, where it has no classes.
    """

    name: str
    doing: str = "invited"
    fate: Fate = "waiting"
    reason: str = ""
    step: int = 0
    version: str = ""
    bytes: float | None = None
    seconds: float | None = None
    accuracy: float | None = None
    epsilon: float | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    status: str = ""
    troubles: tuple[tuple[str, str], ...] = ()
    tested: float | None = None
    counted: float | None = None

    @property
    def label(self) -> str:
        """Return the name for use in a sentence."""
        return f"site {self.name}" if self.name.isdecimal() else self.name

    @property
    def records(self) -> float | None:
        """Return the number of records that the site's surrogate represents."""
        return sum(self.counts.values()) if self.counts else self.counted

    def take(self, kind: str, event: Json) -> None:
        """Update the state with one event of this site.

        Args:
            kind: name of the event.
            event: the whole event.
        """
        if kind in FATE_OF or kind == "evaluation-failed":
            self.doing, self.reason = kind, str(event.get("reason") or "")
        self.fate = FATE_OF.get(kind, self.fate)
        if kind in OUTCOMES:
            self.outcomes.append((kind, self.reason))
        if (sent := as_number(event.get("bytes"))) is not None:
            self.bytes = max(sent, self.bytes or 0.0)
        if kind == "evaluated":
            self.accuracy = as_number(event.get("accuracy"))
        if kind == "replied":
            self.step = int(as_number(event.get("round")) or as_number(event.get("hop")) or 0)
            self.counts = as_numbers(event.get("counts")) or self.counts
            if (took := as_number(event.get("seconds"))) is not None:
                self.seconds = (self.seconds or 0.0) + took


@dataclass
class RunState:
    """State of a run: `take` its events in order, then `conclude` with metrics.json.

    Attributes:
        status: "running", "ok", "failed" or "interrupted".
        method: name of the method.
        step: the unit of progress, "round", or "chain step".
        done: number of completed steps.
        planned: number of steps of the whole run.
        invited: number of invited sites.
        sites: by name.
        accuracy: of the newest model, in [0, 1], on all test data or, without those, the mean over the sites.
        epsilon: spent so far.
        bytes_down: known after the end.
        seconds: total of the run, known after the end.
        stopped: why the run stopped early; empty if it did not.
        failure: why the run failed or was interrupted; empty if it was not.
        first: time of its first event.
        last: time of its last event.
        begun: time at which the steps began (again, after `resumed` of them).
        stepped: time at which the newest step was done.
        resumed: number of steps that an earlier run had done.
        newest: the name of the newest event; empty before the first.

    Example:
        >>> state = RunState()
        >>> for event in (
        ...     {"event": "configured", "method": "fedavg", "rounds": 3},
        ...     {"event": "invited", "sites": 2},
        ...     {"event": "replied", "site": "north", "round": 1, "bytes": 2000},
        ...     {"event": "round", "round": 1, "accuracy": 0.5},
        ... ):
        ...     state.take(event)
        >>> state.done, state.planned, state.accuracy, state.bytes_up, state.fates["waiting"]
        (1, 3, 0.5, 2000.0, 1)
    """

    status: str = "running"
    method: str = ""
    step: str = "round"
    done: int = 0
    planned: int = 1
    invited: int = 0
    sites: dict[str, SiteState] = field(default_factory=dict)
    accuracy: float | None = None
    epsilon: float | None = None
    bytes_down: float | None = None
    seconds: float | None = None
    stopped: str = ""
    failure: str = ""
    first: datetime | None = None
    last: datetime | None = None
    begun: datetime | None = None
    stepped: datetime | None = None
    resumed: int = 0
    newest: str = ""
    _ended: Json = field(default_factory=dict, repr=False)

    def take(self, event: Json) -> None:
        """Update the state with the next event."""
        kind = str(event.get("event"))
        self.newest = kind
        done = self.done
        if (at_ := when(event)) is not None:
            self.first, self.last = self.first or at_, at_
            self.begun = (
                at_ if kind == "resumed" else self.begun or (at_ if kind == "invited" else None)
            )
        if "site" in event:
            self._site(str(event["site"]), str(event.get("before", ""))).take(kind, event)
        match kind:
            case "configured":
                self.method = str(event.get("method") or self.method)
                self.planned = int(as_number(event.get("rounds")) or 1)
                spec = METHODS.get(self.method)
                self.step = (
                    "chain step"
                    if (spec and spec.usual.kind == "chain") or event.get("topology") == "chain"
                    else "round"
                )
            case "invited":
                self.invited = int(as_number(event.get("sites")) or 0) or len(self.sites)
                self.planned = self.invited if self.step == "chain step" else self.planned
            case "failed" | "interrupted":
                self.failure = str(event.get("reason") or "")
            case "stopped":
                self.stopped = str(event.get("reason") or "")
            case _:
                self._go_on(kind, event)
        if kind == "resumed":
            self.resumed = self.done
        elif self.done > done:
            self.stepped = at_

    def _site(self, name: str, before: str) -> SiteState:
        """The site of this name. A site may be dropped under another name (`before`), then reply
        late with its own name.
        """
        if before in self.sites:
            self.sites[name] = self.sites.pop(before)
            self.sites[name].name = name
        return self.sites.setdefault(name, SiteState(name))

    def _go_on(self, kind: str, event: Json) -> None:
        """Update progress or accuracy with an event."""
        accuracy = as_number(event.get("model" if kind == "compared" else "accuracy"))
        if kind == "resumed":
            self.done = int(as_number(event.get("round")) or as_number(event.get("hops")) or 0)
        elif kind == "round":
            self.done = int(as_number(event.get("round")) or self.done)
            self.epsilon = as_number(event.get("epsilon")) or self.epsilon
        elif kind == "replied" and self.step == "chain step":
            self.done += 1
        elif kind == "learned":
            self.done = self.planned
        if kind in ("round", "replied", "compared") and accuracy is not None:
            self.accuracy = accuracy

    def conclude(self, metrics: Json) -> None:
        """Update the state with metrics.json, which is complete after the run has ended."""
        self.method = str(metrics.get("method") or self.method)
        self.status = str(metrics.get("status") or self.status)
        if not self.ended:
            return
        self._ended = metrics
        self.failure = str(metrics.get("failure") or self.failure)
        self.stopped = str(metrics.get("stopped") or self.stopped)
        self.seconds = as_number(at(metrics, "seconds", "total"))
        self.bytes_down = as_number(at(metrics, "bytes", "down"))
        per_site = as_numbers(at(metrics, "accuracy", "per_site"))
        model = as_number(at(metrics, "accuracy", "model"))
        self.accuracy = (
            model
            if model is not None
            else sum(per_site.values()) / len(per_site)
            if per_site
            else self.accuracy
        )
        self.epsilon = as_number(at(metrics, "privacy", "epsilon")) or self.epsilon
        if self.status == "ok" and not self.stopped:
            self.done = self.planned
        for name, sent in as_numbers(at(metrics, "bytes", "up_per_site")).items():
            site = self.sites.setdefault(name, SiteState(name))
            site.bytes, site.accuracy = sent, per_site.get(name)
            site.version = str(at(metrics, "versions", name) or "")
            site.epsilon = as_number(at(metrics, "privacy", "per_site", name, "epsilon"))

    @property
    def ended(self) -> bool:
        """Return whether the run has ended, with success or not."""
        return self.status != "running"

    @property
    def bytes_up(self) -> float:
        """Return the bytes that all sites have sent so far."""
        total = as_number(at(self._ended, "bytes", "up"))
        return sum(site.bytes or 0.0 for site in self.sites.values()) if total is None else total

    @property
    def bytes_per_step(self) -> float | None:
        """Return the mean of the bytes that all sites together send in a step; None for a run with
        one step.

        A resumed run has the bytes of its own steps alone.
        """
        steps = self.done - self.resumed
        return self.bytes_up / steps if self.planned > 1 and steps > 0 and self.bytes_up else None

    def seconds_left(self, now: datetime | None = None) -> float | None:
        """Estimate the time until the last step is done, at the mean pace so far.

        Args:
            now: the present time; without it, the time of the newest step.

        Returns:
            Seconds; None without a completed step, and after the end.
        """
        steps = self.done - self.resumed
        if (
            self.ended
            or self.begun is None
            or self.stepped is None
            or steps < 1
            or self.done >= self.planned
        ):
            return None
        pace = (self.stepped - self.begun).total_seconds() / steps
        waited = (now - self.stepped).total_seconds() if now else 0.0
        return max(0.0, pace * (self.planned - self.done) - waited)

    @property
    def fates(self) -> dict[Fate, int]:
        """Return the number of sites by fate. During a run, invited sites without a reply are
        waiting.
        """
        by_fate = Counter(site.fate for site in self.sites.values())
        by_fate["waiting"] += max(0, self.invited - len(self.sites))
        counted = as_table(self._ended.get("sites"))
        return {
            fate: int(as_number(counted.get(fate)) or 0) if counted else by_fate[fate]
            for fate in FATES
        }


def state_of(events: Iterable[Json]) -> RunState:
    """State of a run after these events, in order."""
    state = RunState()
    for event in events:
        state.take(event)
    return state


def when(event: Json) -> datetime | None:
    """The time of an event; None without one."""
    try:
        moment = datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
    return moment if moment.tzinfo else None


def event_line(event: Json) -> str:
    """An event as one line: its time of day (UTC), its name and its fields.

    Example:
        >>> time = "2026-01-02T03:04:05.678+00:00"
        >>> event_line({"time": time, "event": "round", "round": 1, "accuracy": 0.5})
        '03:04:05 round round=1 accuracy=50.0%'
        >>> event_line({"time": time, "event": "e", "values": {"records": 12345.0, "auroc": 2 / 3}})
        '03:04:05 e values=records:12345 auroc:0.667'
    """
    shares = event.get("event") == "compared"
    details = " ".join(
        f"{key}={_short(value, percent if shares else UNITS.get(key))}"
        for key, value in event.items()
        if key not in NOT_SHOWN
    )
    return f"{str(event.get('time'))[11:19]} {event.get('event')} {details}".rstrip()


def _short(value: object, unit: Callable[[float], str] | None = None) -> str:
    if unit is not None and (number := as_number(value)) is not None:
        return unit(number)
    if isinstance(value, dict):
        return " ".join(f"{key}:{_short(each)}" for key, each in value.items())
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.3g}"
