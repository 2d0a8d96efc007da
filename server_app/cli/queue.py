"""The `coordinator queue` command: runs that wait for their turn, their time, or signatures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsurrogate.common.command_line import Json, console, stderr_console
from fedsurrogate.server_app.cli.control import Authority, Control

if TYPE_CHECKING:
    from fedsurrogate.common.settings.flat import Scalar
    from fedsurrogate.server_app.deployment.run_queue import QueuedRun


def queue(
    output: Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="The folder of all runs.")
    ] = Path("runs"),
    serve: Annotated[
        bool, typer.Option("--serve", help="Start the runs, one at a time, and wait for more.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Start those that may start now, then end.")
    ] = False,
    remove: Annotated[
        str, typer.Option(metavar="ID", help="Take a run that has not started out of the queue.")
    ] = "",
    control: Control = "",
    root_certificates: Authority = None,
    as_json: Json = False,
) -> None:
    """Show the runs of the queue, or start them one after another: `coordinator run --queue` adds
    one.

    Each is queued, scheduled, waiting for approval, running or ended. The queue is a folder, and
    outlasts a restart: a run that was started before is followed to its end, and never started
    twice. `coordinator approve` signs the file that the table names.
    """
    from datetime import UTC, datetime

    from rich.table import Column, Table

    from fedsurrogate.server_app.deployment import run_queue
    from fedsurrogate.server_app.deployment.supernodes import table_file

    if remove:
        gone = run_queue.remove(output, remove)
        console.print(f"removed {gone.id}")
        return
    rules = None if root_certificates is None else table_file(root_certificates.parent).parent
    allowed = run_queue.may_start(output, rules)
    if serve or once:
        start, follow = _work(output, control, root_certificates)
        run_queue.serve(output, allowed, start, follow, forever=serve)
        return
    now, rows = datetime.now(UTC), list[dict[str, str]]()
    for each in run_queue.read(output):
        folder = run_queue.folder_of(output, each.id) if each.started else None
        state = each.state(allowed(each), now)
        waits = state == "waiting for approval"
        rows.append(
            {
                "id": each.id,
                "state": state,
                "added": each.added,
                "not_before": each.not_before,
                "purpose": _purpose(output, each),
                "run": folder.name if folder else "",
                "status": run_queue.why_not(output, rules, each) if waits else each.status,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("id", "state", "from", "purpose", Column("run or how it ended", overflow="fold"))
    for row in rows:
        end = "; ".join(filter(None, (row["run"], row["status"])))
        table.add_row(row["id"][:8], row["state"], row["not_before"][:16], row["purpose"], end)
    console.print(table)


def _purpose(output: Path, queued: QueuedRun) -> str:
    """In words; empty for a run whose proposal cannot be read, which the row says."""
    from fedsurrogate.common.errors import ConfigError
    from fedsurrogate.server_app.deployment.run_queue import proposal_of

    try:
        return proposal_of(output, queued).proposal.purpose
    except ConfigError:
        return ""


def _work(
    output: Path, control: str, authority: Path | None
) -> tuple[Callable[[Mapping[str, Scalar]], object], Callable[[Path], object]]:
    """What starts a run of the queue, and what follows one to its end."""
    from fedsurrogate.common.run import parse_run
    from fedsurrogate.server_app.deployment import control as runs
    from fedsurrogate.server_app.lifecycle.before_start import check_submission, own_folders
    from fedsurrogate.server_app.lifecycle.interruption import interruptible
    from fedsurrogate.server_app.monitoring.progress import Progress

    progress = Progress()

    def show(event: dict[str, Any]) -> None:
        stderr_console().print(progress.line(event), soft_wrap=True)

    def start(settings: Mapping[str, Scalar]) -> object:
        config = parse_run(settings)
        check_submission(config, control)
        folders = own_folders(str(output), config.settings.resume)
        with interruptible():
            return runs.run(
                {**settings, **folders}, output.expanduser().absolute(), control, authority, show
            )

    def follow(folder: Path) -> object:
        return runs.attach(str(folder), output, control, authority, show)

    return start, follow
