"""The `coordinator watch`, `coordinator metrics` and `coordinator tensorboard` commands: for who looks after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.command_line import console, stderr_console

RUN_HELP = "A run folder, or the folder that runs are written to: then the newest run in it."
Run = Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)]
Timeout = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="Give up after so long without a run, or without an event of it; 0 never does."
    ),
]
Next = Annotated[bool, typer.Option("--next", help="Wait for a run that begins after now, whatever is there already.")]


def watch(
    run: Run = Path("runs"),
    timeout: Timeout = 0.0,
    wait_for_next: Next = False,
    once: Annotated[bool, typer.Option("--once", help="Show the run as it stands, and end.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print events as they come, one JSON object a line, and metrics.json last; with --once the state."
        ),
    ] = False,
) -> None:
    """Watch a run until it ends: rounds, accuracy, what every site does.

    Waits for a run to begin where there is none yet. Reads files only, so it can be started and stopped at any time. Where
    the output is no terminal it prints a line for every event. Exits with 0 when the run went well (with --once: has not
    failed), with 1 when it failed or --timeout is over.
    """
    from server_app.monitoring.watch import show_once, watch_json
    from server_app.monitoring.watch import watch as show
    from server_app.runs.event_tail import run_folders

    known = run_folders(run) if wait_for_next else []
    if once:
        well = show_once(run, console, as_json)
    elif as_json:
        well = watch_json(run, timeout, known)
    else:
        well = show(run, console, timeout, known)
    if not well:
        raise typer.Exit(1)


def metrics(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder that runs are written to, or one run folder.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = 9464,
    host: Annotated[
        str, typer.Option(help="The address to listen on; of this machine alone, unless --exposed.")
    ] = "127.0.0.1",
    exposed: Annotated[
        bool, typer.Option("--exposed", help="Allow an address that others reach. Nobody is asked for a password there.")
    ] = False,
    newest: Annotated[int, typer.Option(min=1, max=1000, help="How many runs to tell of, the newest ones.")] = 20,
) -> None:
    """Serve the state of runs to Prometheus, at http://HOST:PORT/metrics, until interrupted.

    Reads run folders each time it is asked, those that begin later included. Needs the extra `monitor`.
    """
    from server_app.monitoring.prometheus import is_loopback, serve

    with serve(runs, host, port, newest, exposed) as url:
        console.print(f"{url} tells of the runs in {runs}; Ctrl-C ends it", soft_wrap=True)
        if not is_loopback(host):
            warning = "others can read names of sites and how runs go: let only your monitoring through to this port"
            stderr_console().print(f"warning: {warning}", style="yellow", soft_wrap=True)
        wait_for_interrupt()


def tensorboard(
    run: Run,
    logdir: Annotated[
        Path | None, typer.Option(help="Write into a folder named like the run in this one; else into RUN/tensorboard.")
    ] = None,
    timeout: Timeout = 0.0,
) -> None:
    """Write a run's scalars for TensorBoard: accuracy, bytes and epsilon by round, seconds of every site.

    Follows a run that still goes on to its end, and replaces what it wrote for the run before. Needs the extra
    `tensorboard`. Prints the folder to give to `tensorboard --logdir`.
    """
    from server_app.monitoring.tensorboard import write_scalars

    console.print(str(write_scalars(run, logdir, timeout)), soft_wrap=True)


def wait_for_interrupt() -> None:
    """Return when the person, or who stops services, has had enough."""
    import signal
    import threading

    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    over.wait()
