"""The `coordinator runs`, `attach`, `stop` and `sites` commands: what a SuperLink runs, and which
sites it knows.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsurrogate.common.command_line import Json, console, stderr_console
from fedsurrogate.server_app.cli.control import Authority, Control, show_result
from fedsurrogate.server_app.cli.options import MetricsAsJson, complete_runs

if TYPE_CHECKING:
    from fedsurrogate.server_app.control_api.sites import KnownSite

Handle = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run folder or its name, Flower's number of a run, or 'latest'.",
        autocompletion=complete_runs,
    ),
]
Output = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of all runs.")]


def runs(
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
    newest: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of runs to list, newest first.")
    ] = 20,
    as_json: Json = False,
) -> None:
    """List runs, newest first: state, progress, sites, age. Takes run folders, and the SuperLink's
    runs if it answers.
    """
    from rich.table import Column, Table

    from fedsurrogate.common.number_format import human_seconds
    from fedsurrogate.server_app.control_api.overview import overview
    from fedsurrogate.server_app.lifecycle.ends import complete_killed
    from fedsurrogate.server_app.runs.reader import run_folders

    complete_killed(*run_folders(output)[:newest])
    rows, problem = overview(output, control, root_certificates, newest)
    if problem:
        stderr_console().print(
            f"only run folders are listed: {problem}", style="yellow", soft_wrap=True
        )
    if as_json:
        print(json.dumps([row.facts() for row in rows], indent=2))
        return
    table = Table(
        Column("run", overflow="fold"),
        Column("Flower's number", overflow="fold"),
        "state",
        "done",
        "sites",
        "began",
    )
    for row in rows:
        began = "" if row.age is None else f"{human_seconds(row.age)} ago"
        table.add_row(row.name, row.id, row.state, row.progress, row.sites, began)
    console.print(table)


def attach(
    run: Handle = "latest",
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Watch a run again that was started before, as `coordinator run` does. Exits with 0 only when
    it finished.

    Ctrl-C ends only this command; the run continues.
    """
    from fedsurrogate.server_app.deployment.control import attach as follow
    from fedsurrogate.server_app.monitoring.progress import Progress

    output_console, progress = stderr_console(), Progress()

    def show(event: dict[str, Any]) -> None:
        output_console.print(progress.line(event), soft_wrap=True)

    try:
        folder = follow(run, output, control, root_certificates, show)
    except KeyboardInterrupt:
        output_console.print(
            "the run continues; `coordinator attach` watches it again, `coordinator stop` ends it"
        )
        raise typer.Exit(130) from None
    show_result(folder, output, as_json, root_certificates is not None)


def stop(
    run: Handle,
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
) -> None:
    """Stop a run at its SuperLink. Its folder records that it was interrupted; runs in rounds can
    be continued.
    """
    from fedsurrogate.server_app.deployment.control import stop as end
    from fedsurrogate.server_app.lifecycle.resume import continuation

    handle = end(run, output, control, root_certificates)
    console.print(f"stopped {handle.folder or handle.id}", soft_wrap=True)
    if handle.folder is not None and (how := continuation(handle.folder)):
        console.print(how, soft_wrap=True)


def sites(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="The folder that `coordinator certs` has made, for the names of the keys."
        ),
    ] = None,
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
    as_json: Json = False,
) -> None:
    """List the sites: name, key, connection, last sign of life, and version and part in the newest
    run.

    The names come from the table of `coordinator register`; other keys are shown by their first
    digits. The version is that of a site's last run. Exits with 1 if a registered site is not
    connected.
    """
    from rich.table import Column, Table

    from fedsurrogate.server_app.control_api.sites import NEWEST, known_sites
    from fedsurrogate.server_app.lifecycle.ends import complete_killed
    from fedsurrogate.server_app.runs.reader import run_folders

    complete_killed(*run_folders(output)[:NEWEST])
    rows = known_sites(folder, output, control, root_certificates)
    if as_json:
        print(json.dumps([row.facts() for row in rows], indent=2))
    else:
        table = Table(
            "site",
            "key",
            "state",
            "since",
            "last seen",
            "version",
            Column("last run", overflow="fold"),
        )
        for row in rows:
            table.add_row(*_cells(row))
        console.print(table)
    if folder is None and any(row.key and row.nameless for row in rows):
        stderr_console().print(
            "a key without a name: `coordinator sites FOLDER` with the folder of `coordinator certs` "
            "shows the names",
            style="yellow",
            soft_wrap=True,
        )
    if any(row.health not in ("connected", "key revoked") for row in rows):
        raise typer.Exit(1)


def _cells(site: KnownSite) -> tuple[str, ...]:
    from fedsurrogate.common.number_format import human_seconds

    now = datetime.now(UTC)
    since, seen = (
        "" if moment is None else human_seconds((now - moment).total_seconds())
        for moment in (site.since, site.seen)
    )
    return (
        site.name,
        site.key[:8],
        site.health,
        since,
        f"{seen} ago" if seen else "",
        site.version,
        site.last_run,
    )
