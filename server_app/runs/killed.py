"""The result of a run that was killed or interrupted before it could write it: from its events.
Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.runs.json_files import (
    EVENTS,
    MANIFEST,
    METRICS,
    EventFile,
    read_object,
)
from fedsurrogate.server_app.runs.json_values import Json, as_number, as_table
from fedsurrogate.server_app.runs.state import RunState, SiteState, state_of
from fedsurrogate.server_app.runs.writer_lock import last_sign, writer_is_gone

VANISHED = (
    "the process that wrote this run has ended without recording why: killed, out of "
    "memory, or a power cut"
)
UNFINISHED = "no reply before the run ended"


def why_killed(folder: Path) -> str:
    """Why a run has ended that has recorded no end.

    The writer's existence is looked up between two looks at the metrics: it may have recorded the
    end since the first.

    Args:
        folder: a run folder.

    Returns:
        The reason, with the time of the last sign of life if there is one; empty for other runs.

    Raises:
        OSError: metrics.json may not be read.
    """
    if not (_is_unfinished(folder) and writer_is_gone(folder) and _is_unfinished(folder)):
        return ""
    sign = last_sign(folder)
    return VANISHED + (f"; last sign of life {sign:%Y-%m-%d %H:%M:%S} UTC" if sign else "")


def _is_unfinished(folder: Path) -> bool:
    return bool(read_object(folder / METRICS)[0].get("status", "running") == "running")


def interrupted_metrics(folder: Path, metrics: Json, why: str) -> Json:
    """What metrics.json holds after an interruption.

    Args:
        folder: the run folder.
        metrics: content of metrics.json so far; empty if there is none.
        why: the reason of the interruption.

    Returns:
        For a run that has written a result, its metrics with another status; else what the events
        record of sites, rounds and bytes.

    Raises:
        RunError: the events may not be read.
    """
    if metrics.get("status", "running") == "running":
        metrics = metrics | _from_events(folder, why)
    return metrics | {"status": "interrupted", "failure": why}


def _from_events(folder: Path, why: str) -> Json:
    """What the events say of a run whose app was ended before it could write its metrics; empty for
    a run whose manifest cannot be read.
    """
    events = EventFile(folder / EVENTS).read(to_the_end=True)
    state = state_of(events)
    seconds = (
        0.0
        if state.first is None or state.last is None
        else (state.last - state.first).total_seconds()
    )
    try:
        config = parse_run(as_table(read_object(folder / MANIFEST)[0]["config"]))
    except (OSError, ValueError, TypeError, LookupError, FedSurrogateError):
        return {}
    from fedsurrogate.server_app.runs.metrics import End, make_metrics

    known = make_metrics(config, _outcome(folder, state, events), End("interrupted", why, seconds))
    known["accuracy"]["per_site"] = {
        site.name: site.accuracy for site in state.sites.values() if site.accuracy is not None
    }
    if known["privacy"] is None and state.epsilon and config.settings.epsilon:
        known["privacy"] = _spent(config.plan.mechanism_name, state.epsilon, config.settings.delta)
    return known


def _rounds(events: Sequence[Json]) -> list[Json]:
    """The rounds that were done, as metrics.json lists them."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "event")}
        for event in events
        if event.get("event") == "round"
    ]


def _outcome(folder: Path, state: RunState, events: Sequence[Json]) -> Any:
    from fedsurrogate.strategies.base.outcome import Outcome

    here = [site for site in state.sites.values() if site.doing != "absent"]
    sites = [_site(each) for each in here]
    # Sites choose their names unless keys are registered: before its first reply such a site has
    # none.
    sites += [
        _site(SiteState(f"unnamed {number}")) for number in range(1, state.invited - len(here) + 1)
    ]
    registered = any(
        event.get("names") == "registered" for event in events if event.get("event") == "invited"
    )
    hops: list[dict[str, str | float]] = [
        {"site": str(event["site"]), "accuracy": as_number(event.get("accuracy")) or 0.0}
        for event in events
        if event.get("event") == "replied"
        and "hop" in event
        and as_number(event.get("accuracy")) is not None
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
    from fedsurrogate.strategies.base.outcome import Site

    site = Site(state.name, bytes_up=int(state.bytes or 0), records=int(sum(state.counts.values())))
    site.reason, site.late = state.reason or UNFINISHED, state.doing == "late"
    if state.fate == "used":
        site.fate, site.reason = "used", ""
    elif state.fate == "rejected":
        site.fate = "rejected"
    return site


def _surrogates(folder: Path) -> list[Any]:
    """The stored surrogates that can be read; those of sites that were rejected are not stored."""
    from fedsurrogate.common.wire.records import unpack_surrogate

    surrogates = []
    for file in sorted((folder / "surrogates").glob("*.pb")):
        with suppress(OSError, FedSurrogateError):
            surrogates.append(unpack_surrogate(file.read_bytes()))
    return surrogates


def _spent(mechanism: str, epsilon: float, delta: float) -> Json:
    """The privacy card of a run in rounds: what its rounds have spent. Its sites' claims are in
    their replies only.
    """
    return {
        "mechanism": mechanism,
        "epsilon": epsilon,
        "delta": delta,
        "per_site": {},
        "not_covered": [],
    }
