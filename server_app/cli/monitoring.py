"""The `coordinator watch`, `metrics` and `mlflow` commands: they monitor and log runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import (
    Exposed,
    ListenHost,
    ListenPort,
    WatchedCertificates,
    console,
    stderr_console,
    wait_for_interrupt,
)
from fedsurrogate.server_app.cli.options import complete_runs

if TYPE_CHECKING:
    from fedsurrogate.common.metrics_page import Collector
    from fedsurrogate.server_app.monitoring.superlink_metrics import LinkCollector

RUN_HELP = "A run folder; or the folder of all runs, which selects the newest run."
Run = Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_runs)]
Timeout = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Stop after this time without a run, or without an event of the run; 0: never.",
    ),
]
Next = Annotated[
    bool,
    typer.Option("--next", help="Wait for the next run, and ignore the runs that exist already."),
]


def watch(
    run: Run = Path("runs"),
    timeout: Timeout = 0.0,
    wait_for_next: Next = False,
    once: Annotated[
        bool, typer.Option("--once", help="Show the current state of the run, and exit.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each event as a JSON object on its own line, then metrics.json; with "
            "--once the state.",
        ),
    ] = False,
) -> None:
    """Watch a run until it ends: rounds, accuracy, the state of every site.

    Waits until a run begins if there is none yet. Reads files only, so it can be started and
    stopped at any time. Prints a line for every event, then the state. Exits with 0 when the run
    succeeded (with --once: has not failed), with 1 when it failed or --timeout has passed.
    """
    from fedsurrogate.server_app.monitoring.watch import show_once
    from fedsurrogate.server_app.monitoring.watch import watch as show
    from fedsurrogate.server_app.runs.reader import run_folders

    known = run_folders(run) if wait_for_next else []
    shown = show_once(run, console, as_json) if once else None
    if not (show(run, console, timeout, known, as_json) if shown is None else shown):
        raise typer.Exit(1)


def metrics(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="The folder of all runs, or one run folder.")
    ],
    port: ListenPort = 9464,
    host: ListenHost = "127.0.0.1",
    exposed: Exposed = False,
    newest: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of runs to report, newest first.")
    ] = 20,
    superlink: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The SuperLink's Control API, for connected sites and waiting runs; empty: none.",
        ),
    ] = "",
    certificate: WatchedCertificates = None,
) -> None:
    """Serve the state of runs to Prometheus, at http://HOST:PORT/metrics, until interrupted.

    Reads the run folders at each request. Needs the extra `monitor`. Of a
    SuperLink with TLS, and for names of sites, it takes FEDSURROGATE_ROOT_CERTIFICATES and
    FEDSURROGATE_REGISTERED, as `coordinator sites` does.
    """
    from fedsurrogate.common.metrics_page import MachineCollector, is_loopback
    from fedsurrogate.server_app.monitoring.prometheus import serve

    more: list[Collector] = [MachineCollector(certificate or (), {"runs": runs})]
    more += _of_superlink(superlink)
    with serve(runs, host, port, newest, exposed, more) as url:
        console.print(f"{url} reports the runs in {runs}; Ctrl-C ends it", soft_wrap=True)
        if not is_loopback(host):
            warning = (
                "other machines can read site names and run states: allow only your "
                "monitoring to reach this port"
            )
            stderr_console().print(f"warning: {warning}", style="yellow", soft_wrap=True)
        wait_for_interrupt()


def mlflow(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_SWEEP",
            help="A run folder, or the file that a sweep prints.",
            exists=True,
            autocompletion=complete_runs,
        ),
    ],
    store: Annotated[
        str,
        typer.Option(help="Where MLflow keeps runs: file:FOLDER, sqlite:///FILE, or a server."),
    ] = "file:mlruns",
    experiment: Annotated[str, typer.Option(help="Name of the experiment.")] = "fedsurrogate",
) -> None:
    """Log a run, or all runs of a sweep, in MLflow: settings, metrics, and the files of its folder.

    What sites sent is not logged. Replaces earlier entries of the same run. Needs the extra
    `mlflow`. Prints the id of each run.

    Example: coordinator mlflow runs/20261122T101500Z-fedpft-0bc876 --store file:mlruns
    """
    from fedsurrogate.server_app.monitoring.mlflow_runs import Place, log_to_mlflow

    for run in log_to_mlflow(what, Place(store, experiment)):
        console.print(run, soft_wrap=True)


def _of_superlink(address: str) -> list[LinkCollector]:
    """The collector of a SuperLink; none without an address."""
    if not address:
        return []
    import os

    from fedsurrogate.server_app.deployment.supernodes import table_file
    from fedsurrogate.server_app.monitoring.superlink_metrics import LinkCollector

    authority = os.environ.get("FEDSURROGATE_ROOT_CERTIFICATES")
    return [LinkCollector(address, Path(authority) if authority else None, table_file(Path()))]
