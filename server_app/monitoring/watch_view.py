"""The state of a run in lines, as `coordinator watch` shows it."""

from __future__ import annotations

from datetime import UTC, datetime

from fedsurrogate.common.number_format import human_bytes, human_seconds, percent
from fedsurrogate.server_app.lifecycle.resume import can_continue, continuation
from fedsurrogate.server_app.monitoring.progress import progress_line
from fedsurrogate.server_app.runs.json_values import natural_order
from fedsurrogate.server_app.runs.reader import LiveRun
from fedsurrogate.server_app.runs.state import RunState, SiteState

# A run without an event for this time is shown as silent. This is no error: a site may work longer
# in one round.
SILENT_SECONDS = 30.0


def summary(run: LiveRun) -> list[str]:
    """The run in a few lines: status, progress, sites, accuracy, costs."""
    state, lines = run.state, []
    heading = f"{state.method or 'a run'}: {state.status}"
    if (seconds := elapsed(state)) is not None:
        heading += f" {'after' if state.ended else 'for'} {human_seconds(seconds)}"
    lines.append(heading)
    lines.append(progress_line(state, datetime.now(UTC)))
    fates = ", ".join(f"{count} {fate}" for fate, count in state.fates.items() if count)
    lines.append(f"sites: {fates or 'none yet'}")
    facts = [] if state.accuracy is None else [f"accuracy {percent(state.accuracy)}"]
    facts.append(f"up {human_bytes(state.bytes_up)}")
    if state.bytes_down is not None:
        facts.append(f"down {human_bytes(state.bytes_down)}")
    if state.epsilon is not None:
        facts.append(
            f"epsilon spent {state.epsilon:.3g}" + (f" of {run.budget:g}" if run.budget else "")
        )
    elif run.budget:
        facts.append(f"epsilon {run.budget:g} at most")
    lines.append("; ".join(facts))
    if (silence := silent_for(state)) is not None and silence >= SILENT_SECONDS:
        lines.append(f"no event for {human_seconds(silence)}")
    if state.stopped:
        lines.append(f"stopped early: {state.stopped}")
    if state.failure:
        lines.append(state.failure if state.status == "interrupted" else f"failed: {state.failure}")
    unfinished = state.status == "failed" and can_continue(run.folder)
    if (state.status == "interrupted" or unfinished) and (how := continuation(run.folder)):
        lines.append(how)
    return lines


def elapsed(state: RunState) -> float | None:
    """Seconds the run has taken so far; None if unknown."""
    if state.ended or state.first is None:
        return state.seconds
    return max(0.0, (datetime.now(UTC) - state.first).total_seconds())


def silent_for(state: RunState) -> float | None:
    """Seconds since the last event of an active run; None if the run has ended or has no event."""
    return (
        None
        if state.ended or state.last is None
        else max(0.0, (datetime.now(UTC) - state.last).total_seconds())
    )


def site_lines(state: RunState) -> list[str]:
    """Each site in a line: what it does or why it is left out, bytes, seconds, accuracy, epsilon."""
    sites = sorted(state.sites.values(), key=lambda site: natural_order(site.name))
    waiting = state.invited - len(sites)
    more = [f"{waiting} invited, no reply yet"] if waiting > 0 and not state.ended else []
    return [*(f"{site.name}: {_doing(site, state.step)}" for site in sites), *more]


def _doing(site: SiteState, step: str) -> str:
    doing = f"replied, {step} {site.step}" if site.doing == "replied" and site.step else site.doing
    words = doing.replace("-", " ") + (f": {site.reason}" if site.reason else "")
    numbers = (
        ("up {}", site.bytes, human_bytes),
        ("worked {}", site.seconds, human_seconds),
        ("accuracy {}", site.accuracy, percent),
        ("epsilon {}", site.epsilon, "{:.3g}".format),
    )
    known = (text.format(shown(value)) for text, value, shown in numbers if value is not None)
    return ", ".join((words, *known))
