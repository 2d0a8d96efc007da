"""Watch a run from its beginning to its end, also if it is killed: its state and progress as lines,
or as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import human_bytes, human_seconds, percent

from ..lifecycle.before_start import can_continue, continuation
from ..lifecycle.ends import complete_killed
from ..runs.reader import POLL_SECONDS, LiveRun, find_run
from ..runs.state import Json, RunState, SiteState, event_line, natural_order


def look(run: LiveRun) -> list[Json]:
    """The new events of a run, the end of a killed run included.

    Args:
        run: the run folder.

    Returns:
        The events.

    Raises:
        RunError: the folder is gone.
    """
    complete_killed(run.folder)
    return run.refresh()


def follow(run: LiveRun, timeout: float = 0.0) -> Iterator[list[Json]]:
    """Yield the new events of a run as a list (often empty) at every look, until the run has ended.

    Args:
        run: a run folder, which need not exist in full yet.
        timeout: the longest time without an event in seconds; 0 waits for ever.

    Raises:
        RunError: the folder is gone, or the time has passed.
    """
    heard = time.monotonic()
    while True:
        events = look(run)
        heard = time.monotonic() if events else heard
        yield events
        if run.state.ended:
            return
        if timeout and time.monotonic() - heard > timeout:
            raise RunError(
                f"no event for {timeout:g} s in {run.folder}; its coordinator may have stopped"
            )
        time.sleep(POLL_SECONDS)


def await_run(path: Path, known: Collection[Path] = (), timeout: float = 0.0) -> Path:
    """Wait until there is a run folder.

    Args:
        path: a run folder, or the folder of all runs.
        known: run folders that do not count.
        timeout: the longest time to wait in seconds; 0 waits for ever.

    Returns:
        The folder `path`, or the newest run folder in it.

    Raises:
        RunError: `path` is a file, or the time has passed.
    """
    end = time.monotonic() + timeout
    while (folder := find_run(path, known)) is None:
        if timeout and time.monotonic() > end:
            raise RunError(f"no run has begun in {str(path)!r} for {timeout:g} s")
        time.sleep(POLL_SECONDS)
    return folder


# Characters of a reason that is not repeated.
LONG = 40


def progress_line(state: RunState, now: datetime | None = None) -> str:
    """The completed steps, an estimate of the time left, and the bytes that all sites together send
    in a step.

    The estimate takes the mean time of the steps so far.

    Args:
        state: of the run.
        now: the present time; with it, the time since the last step is subtracted.

    Returns:
        One line.

    Example:
        >>> progress_line(RunState(done=3, planned=30))
        'round 3 of 30 done'
    """
    line = f"{state.step} {min(state.done, state.planned)} of {state.planned} done"
    if (left := state.seconds_left(now)) is not None:
        line += f", {f'{left:.0f} s' if left < 59.5 else human_seconds(left)} left"
    if (each := state.bytes_per_step) is not None:
        line += f"; {human_bytes(each)} a {state.step}"
    return line


# What a run does after an event, where that is known; the name of the event elsewhere.
DOING = {
    "": "loading the libraries and the data",
    "configured": "looking for sites",
    "invited": "sites compute features and surrogates",
    "joined": "sites compute features and surrogates",
    "replied": "sites compute features and surrogates",
    "shared": "sites compute their masked sums",
    "masked": "sites compute their masked sums",
    "effects": "training the model",
    "learned": "sites evaluate the model",
    "evaluated": "comparing, and drawing the report",
    "compared": "drawing the report",
}


class Progress:
    """Turns the events of one run into lines, the ends of rounds with the progress of the run. A
    reason that several sites have stands in the line of the first one.
    """

    def __init__(self) -> None:
        self.state = RunState()
        self._first: dict[str, str] = {}

    def line(self, event: Json) -> str:
        """The next event as one line."""
        done = self.state.done
        self.state.take(event)
        line = event_line(event | {"reason": self._once(event)} if "reason" in event else event)
        return (
            f"{line}; {self.status}" if self.state.done > done and self.state.planned > 1 else line
        )

    def _once(self, event: Json) -> str:
        """The reason of an event, where the site that had a long reason first stands for it."""
        short = reason = str(event["reason"])
        if "site" not in event:
            return reason  # The end of a run names no site to look at.
        for known, site in self._first.items():
            short = short.replace(known, f"as site {site}")
        if len(reason) > LONG:
            self._first.setdefault(reason, str(event["site"]))
        return short

    @property
    def status(self) -> str:
        """The run in a phrase, for a line that is replaced: its progress, or its present work."""
        if self.state.planned > 1 and self.state.done:
            return progress_line(self.state)
        return f"{DOING.get(self.state.newest, self.state.newest)} ..."


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


def watch(
    path: Path,
    console: Console,
    timeout: float = 0.0,
    known: Collection[Path] = (),
    as_json: bool = False,
) -> bool:
    """Show a run until it ends: each of its events, then its state.

    Args:
        path: as for `await_run`.
        console: where it is shown.
        timeout: as for `await_run`.
        known: as for `await_run`.
        as_json: whether each event is printed as a JSON object on its own line, and then the metrics,
            in place of lines for people.

    Returns:
        Whether the run succeeded.

    Raises:
        RunError: there is no run.
    """
    run, progress = LiveRun(await_run(path, known, timeout)), Progress()
    for event in (event for events in follow(run, timeout) for event in events):
        _print(console, json.dumps(event) if as_json else progress.line(event))
        sys.stdout.flush()
    _print(console, *([json.dumps(run.metrics)] if as_json else [*summary(run), str(run.folder)]))
    return run.state.status == "ok"


def show_once(path: Path, console: Console, as_json: bool) -> bool:
    """Show the current state of a run.

    Args:
        path: a run folder, or the folder of all runs.
        console: where it is shown.
        as_json: whether a JSON object is printed instead.

    Returns:
        False if the run failed.

    Raises:
        RunError: there is no run yet.
    """
    if (folder := find_run(path)) is None:
        raise RunError(
            f"there is no run in {str(path)!r} yet; without --once, `coordinator watch` waits for "
            "one"
        )
    run = LiveRun(folder)
    look(run)
    if as_json:
        print(json.dumps(_facts(run.state) | {"folder": str(folder)}))
    else:
        _print(console, *summary(run), *site_lines(run.state), str(run.folder))
    return run.state.status in ("ok", "running")


def _facts(state: RunState) -> Json:
    """A run's state as a JSON object."""
    keys = [
        "status",
        "method",
        "step",
        "done",
        "planned",
        "invited",
        "accuracy",
        "epsilon",
        "bytes_up",
        "bytes_down",
    ]
    site_keys = ("doing", "fate", "reason", "step", "bytes", "seconds", "accuracy", "epsilon")
    sites = {
        name: {key: getattr(site, key) for key in site_keys} for name, site in state.sites.items()
    }
    ends = {"stopped": state.stopped, "failure": state.failure, "seconds": elapsed(state)}
    return {key: getattr(state, key) for key in keys} | ends | {"sites": sites}


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)
