"""The end of a run that did not record it itself: its true metrics from its events, its status, its report."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import FedSurrogateError
from common.files import READABLE, replace_file
from common.run import Run, parse_run
from server_app.lifecycle.writer import forget_writer, last_sign, writer_is_gone
from server_app.runs.event_tail import POLL_SECONDS, EventFile
from server_app.runs.json_values import Json, as_number, as_table
from server_app.runs.state import RunState, SiteState, state_of

VANISHED = "the process that wrote this run has ended without recording why: killed, out of memory, or a power cut"
UNFINISHED = "no reply before the run ended"


def settled(folder: Path, metrics: Json | None = None) -> Json:
    """The metrics of a run, true even if its writer was killed: the run is then recorded as interrupted.

    metrics: the content of metrics.json, if it has been read. If the folder cannot be written, it stays as it is.
    """
    found = _metrics(folder) if metrics is None else metrics
    if found.get("status", "running") != "running" or not writer_is_gone(folder):
        return found
    with _alone(folder):
        found = _metrics(folder)
        if found.get("status", "running") != "running":
            return found
        sign = last_sign(folder)
        why = VANISHED + (f"; last sign of life {sign:%Y-%m-%d %H:%M:%S} UTC" if sign else "")
        try:
            found = _record(folder, found, why)
        except OSError:
            return found | _from_events(folder, found, why) | {"status": "interrupted", "failure": why}
    _draw(folder)
    return found


def mark_interrupted(folder: Path, why: str, wait_seconds: float = 0.0) -> None:
    """Record in a run folder that the run was interrupted, unless it has succeeded. Called when its processes have ended.

    wait_seconds: how long to wait for the run's own last words, if another machine's or user's process writes them.
    """
    end = time.monotonic() + wait_seconds
    while (metrics := _metrics(folder)).get("status") == "running" and time.monotonic() < end:
        if writer_is_gone(folder):
            break
        time.sleep(POLL_SECONDS)
    if metrics.get("status") in ("ok", "interrupted"):
        return
    with _alone(folder):
        _record(folder, metrics, why)
    _draw(folder)


def _record(folder: Path, metrics: Json, why: str) -> Json:
    """Write the event and the metrics of an interrupted run; return the metrics. Raises OSError."""
    # Its space on a full disk is for this.
    (folder / ".reserve").unlink(missing_ok=True)
    if metrics.get("status", "running") == "running":
        metrics = metrics | _from_events(folder, metrics, why)
    metrics = metrics | {"status": "interrupted", "failure": why}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    _append(folder / "events.jsonl", json.dumps({"time": now, "event": "interrupted", "reason": why}))
    replace_file(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n", mode=READABLE)
    forget_writer(folder)
    return metrics


def _from_events(folder: Path, metrics: Mapping[str, Any], why: str) -> Json:
    """What the events say of a run whose app was ended before it could write its metrics."""
    events = EventFile(folder / "events.jsonl").read(to_the_end=True)
    state = state_of(events)
    seconds = 0.0 if state.first is None or state.last is None else (state.last - state.first).total_seconds()
    try:
        config = parse_run(as_table(json.loads((folder / "manifest.json").read_text()).get("config")))
    except (OSError, ValueError, TypeError, AttributeError, FedSurrogateError):
        return _bare(metrics, state, _rounds(events), seconds)
    from server_app.runs.metrics import End, make_metrics

    known = make_metrics(config, _outcome(folder, state, events), End("interrupted", why, seconds))
    known["accuracy"]["per_site"] = {site.name: site.accuracy for site in state.sites.values() if site.accuracy is not None}
    if known["privacy"] is None and state.epsilon and config.settings.epsilon:
        known["privacy"] = _spent(config, state.epsilon)
    return known


def _bare(metrics: Mapping[str, Any], state: RunState, rounds: Sequence[Json], seconds: float) -> Json:
    """The same without a readable manifest."""
    up = {site.name: int(site.bytes) for site in state.sites.values() if site.bytes}
    return {
        "bytes": {**as_table(metrics.get("bytes")), "up": sum(up.values()), "up_per_site": up},
        "rounds": list(rounds),
        "seconds": {**as_table(metrics.get("seconds")), "total": seconds},
    }


def _rounds(events: Sequence[Json]) -> list[Json]:
    """The rounds that were done, as metrics.json lists them."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "event")}
        for event in events
        if event.get("event") == "round"
    ]


def _outcome(folder: Path, state: RunState, events: Sequence[Json]) -> Any:
    from strategies.base.outcome import Outcome

    here = [site for site in state.sites.values() if site.doing != "absent"]
    sites = [_site(each) for each in here]
    # Sites choose their names unless keys are registered: before its first reply such a site has none.
    sites += [_site(SiteState(f"unnamed {number}")) for number in range(1, state.invited - len(here) + 1)]
    registered = any(event.get("names") == "registered" for event in events if event.get("event") == "invited")
    hops: list[dict[str, str | float]] = [
        {"site": str(event["site"]), "accuracy": as_number(event.get("accuracy")) or 0.0}
        for event in events
        if event.get("event") == "replied" and "hop" in event and as_number(event.get("accuracy")) is not None
    ]
    return Outcome(
        dict(enumerate(sites)),
        surrogates=_surrogates(folder),
        rounds=_rounds(events),
        hops=hops,
        stopped=state.stopped,
        names="registered" if registered else "claimed" if state.invited else "",
        absent=sorted(site.name for site in state.sites.values() if site.doing == "absent"),
    )


def _site(state: SiteState) -> Any:
    from strategies.base.outcome import Site

    site = Site(state.name, bytes_up=int(state.bytes or 0), records=int(sum(state.counts.values())))
    site.reason, site.late = state.reason or UNFINISHED, state.doing == "late"
    if state.fate == "used":
        site.fate, site.reason = "used", ""
    elif state.fate == "rejected":
        site.fate = "rejected"
    return site


def _surrogates(folder: Path) -> list[Any]:
    """The stored surrogates that can be read; those of sites that were rejected are not stored."""
    from common.wire.records import unpack_surrogate

    found = []
    for file in sorted((folder / "surrogates").glob("*.pb")):
        with suppress(OSError, FedSurrogateError):
            found.append(unpack_surrogate(file.read_bytes()))
    return found


def _spent(config: Run, epsilon: float) -> Json:
    """The privacy card of a run in rounds: what its rounds have spent. Its sites' claims are in their replies only."""
    return {
        "mechanism": config.plan.mechanism_name,
        "epsilon": epsilon,
        "delta": config.settings.delta,
        "per_site": {},
        "not_covered": [],
    }


def _draw(folder: Path) -> None:
    from server_app.report.build import write_report

    with suppress(OSError, FedSurrogateError):
        write_report(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one reader at a time record a run's end."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _append(file: Path, line: str) -> None:
    """Append a line. A process that was killed may have left an incomplete last line, which then ends first."""
    with file.open("ab+") as events:
        if events.tell():
            events.seek(-1, os.SEEK_END)
            line = line if events.read(1) == b"\n" else f"\n{line}"
        events.write(f"{line}\n".encode())


def _metrics(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "metrics.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
