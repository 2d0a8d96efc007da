"""The view of a run in `coordinator watch`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedsurrogate.common.number_format import human_bytes, human_seconds, percent
from fedsurrogate.server_app.lifecycle.resume import can_continue, continuation
from fedsurrogate.server_app.monitoring.progress import progress_line
from fedsurrogate.server_app.runs.json_values import natural_order
from fedsurrogate.server_app.runs.reader import LiveRun
from fedsurrogate.server_app.runs.state import RunState, SiteState, event_line

STYLES = {
    "running": "bold cyan",
    "ok": "bold green",
    "failed": "bold red",
    "interrupted": "bold yellow",
}
FATE_STYLES = {"used": "green", "rejected": "red", "dropped": "yellow"}
NUMBERS: dict[str, Callable[[float], str]] = {
    "up": human_bytes,
    "worked": human_seconds,
    "accuracy": percent,
    "epsilon": "{:.3g}".format,
}
BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH, SPARKS = 30, 40
# A run without an event for this time is shown as silent. This is no error: a site may work longer
# in one round.
SILENT_SECONDS = 30.0
# Lines of the view above and below the table of sites.
OTHER_LINES = 19


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
    if state.stopped:
        lines.append(f"stopped early: {state.stopped}")
    if state.failure:
        lines.append(state.failure if state.status == "interrupted" else f"failed: {state.failure}")
    unfinished = state.status == "failed" and can_continue(run.folder)
    if (state.status == "interrupted" or unfinished) and (how := continuation(run.folder)):
        lines.append(how)
    return lines


def view(run: LiveRun, height: int = 0) -> RenderableType:
    """The current state of a run, for a terminal.

    Args:
        run: the run folder.
        height: lines of the terminal; 0: show all sites.

    Returns:
        What `rich` draws.
    """
    state = run.state
    heading, progress, sites, facts, *ends = summary(run)
    parts: list[RenderableType] = [
        Text(heading, STYLES.get(state.status, "bold")),
        _bar(state, progress),
    ]
    parts.append(Text(sites))
    parts.append(Text.assemble(facts, "  ", (sparkline(state.accuracies), "cyan")))
    parts += [Text(line, "yellow") for line in ends]
    if (silence := silent_for(state)) is not None and silence >= SILENT_SECONDS:
        parts.append(Text(f"no event for {human_seconds(silence)}", "yellow"))
    if state.sites:
        parts += _sites(state, max(5, height - OTHER_LINES) if height else len(state.sites))
    parts += [
        Text(event_line(event), "dim", no_wrap=True, overflow="ellipsis") for event in state.recent
    ]
    parts.append(Text(str(run.folder), "dim", overflow="fold"))
    return Group(*parts)


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


def sparkline(values: Sequence[float]) -> str:
    """The newest values as bars, scaled from their minimum to their maximum; "" for fewer than two.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▄█'
    """
    shown = values[-SPARKS:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    return "".join(
        BARS[int((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0]
        for value in shown
    )


def _bar(state: RunState, progress: str) -> RenderableType:
    """Progress of the run; within a step, by the number of sites that have replied."""
    begun = min(1.0, state.replied / state.invited) if state.invited and not state.ended else 0.0
    row = Table.grid(padding=(0, 1))
    replies = (
        f"{state.step} {state.done + 1}: {state.replied} of {state.invited} replied"
        if begun
        else ""
    )
    completed = min(state.planned, state.done + begun)
    row.add_row(
        ProgressBar(state.planned, completed, BAR_WIDTH), Text(progress), Text(replies, "dim")
    )
    return row


def _sites(state: RunState, most: int) -> list[RenderableType]:
    """Table with a row per site. Without room for all, sites with problems are kept first."""
    sites = sorted(state.sites.values(), key=lambda site: natural_order(site.name))
    if len(sites) > most:
        sites.sort(key=lambda site: site.fate in ("used", "waiting"))
    shown, hidden = sorted(sites[:most], key=lambda site: natural_order(site.name)), sites[most:]
    rows = [_numbers(site) for site in shown]
    known = [name for name in NUMBERS if any(row[name] for row in rows)]
    columns = [Column("site", overflow="fold"), Column("state", overflow="fold")]
    columns += [Column(name, justify="right", no_wrap=True) for name in known]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for site, row in zip(shown, rows, strict=True):
        doing = Text(_doing(site, state.step), FATE_STYLES.get(site.fate, ""))
        table.add_row(Text(site.name), doing, *(Text(row[name]) for name in known))
    nameless = state.invited - len(state.sites)
    more = [f"{count} more {fate}" for fate, count in Counter(site.fate for site in hidden).items()]
    if nameless > 0 and not state.ended:
        more.append(f"{nameless} invited, no reply yet")
    return [table, *([Text(", ".join(more), "dim")] if more else [])]


def _doing(site: SiteState, step: str) -> str:
    """The state of a site, and its reason."""
    if site.doing == "replied" and site.step:
        return f"replied, {step} {site.step}"
    return site.doing.replace("-", " ") + (f": {site.reason}" if site.reason else "")


def _numbers(site: SiteState) -> dict[str, str]:
    """A site's numbers by column; "" for unknown numbers."""
    values = (site.bytes, site.seconds, site.accuracy, site.epsilon)
    return {
        name: "" if value is None else show(value)
        for (name, show), value in zip(NUMBERS.items(), values, strict=True)
    }
