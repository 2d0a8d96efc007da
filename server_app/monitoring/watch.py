"""Watch a run until it ends: as lines, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.monitoring.following import await_run, follow, look
from fedsurrogate.server_app.monitoring.progress import Progress
from fedsurrogate.server_app.monitoring.watch_view import elapsed, site_lines, summary
from fedsurrogate.server_app.runs.json_values import Json
from fedsurrogate.server_app.runs.reader import LiveRun, find_run
from fedsurrogate.server_app.runs.state import RunState


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
