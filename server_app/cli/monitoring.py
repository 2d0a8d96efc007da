"""The `coordinator log` and `sweep` commands."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsurrogate.common import command_line
from fedsurrogate.common.command_line import console, print_table
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.escapes import human_bytes

from .options import RunSettings, complete_runs

if TYPE_CHECKING:
    from fedsurrogate.common.metrics_page import Collector
    from fedsurrogate.common.settings.base import Scalar

    from ..monitoring.prometheus import LinkCollector


# Runs that Prometheus sees, newest first.
SHOWN_RUNS = 20


def log(
    what: Annotated[Path, typer.Argument(metavar="RUNS", autocompletion=complete_runs)],
    to: Annotated[Literal["mlflow", "prometheus"], typer.Option()],
    store: str = "file:mlruns",
    experiment: str = "fedsurrogate",
    listen: command_line.Listen = command_line.LISTEN,
    exposed: command_line.Exposed = False,
    superlink: Annotated[str, typer.Option(metavar="ADDRESS")] = "",
    certificate: command_line.WatchedCertificates = None,
) -> None:
    """Log runs to MLflow, or show them to Prometheus.

    MLflow gets settings, metrics and files of each run, and nothing that sites sent; earlier entries
    of the same run are replaced. Needs the extra `mlflow`. Prints the id of each run.

    Prometheus reads http://HOST:PORT/metrics: the newest runs, from their folders at each request.
    Needs the extra `monitor`. Of a SuperLink with TLS, and for names of sites, the command takes
    FEDSURROGATE_ROOT_CERTIFICATES and FEDSURROGATE_REGISTERED, as `coordinator sites list` does.

    Example: coordinator log runs/20261122T101500Z-fedpft-0bc876 --to mlflow

    Args:
        what: A run folder; for MLflow also the file that a sweep prints, for Prometheus also the
            folder of all runs.
        to: mlflow: log what there is, and end. prometheus: serve the state of runs until
            interrupted.
        store: Where MLflow keeps runs: file:FOLDER, sqlite:///FILE, or a server.
        experiment: Name of the experiment in MLflow.
        superlink: The SuperLink's Control API, for connected sites and waiting runs; empty: none.
    """
    if to == "mlflow":
        from ..monitoring.mlflow_runs import log_to_mlflow

        for run in log_to_mlflow(what, store, experiment):
            console.print(run)
        return
    from fedsurrogate.common.flower.environment import is_loopback
    from fedsurrogate.common.metrics_page import MachineCollector

    from ..monitoring.prometheus import serve

    more: list[Collector] = [MachineCollector(certificate or (), {"runs": what})]
    more += _of_superlink(superlink)
    host, port = command_line.host_and_port(listen)
    with serve(what, host, port, SHOWN_RUNS, exposed, more) as url:
        console.print(f"{url} reports the runs in {what}; Ctrl-C ends it")
        if not is_loopback(f"[{host}]:"):
            warning = (
                "other machines can read site names and run states: allow only your "
                "monitoring to reach this port"
            )
            command_line.stderr_console().print(f"warning: {warning}", style="yellow")
        command_line.wait_for_interrupt()


def _of_superlink(address: str) -> list[LinkCollector]:
    """The collector of a SuperLink; none without an address."""
    if not address:
        return []

    from ..deployment.supernodes import table_file
    from ..monitoring.prometheus import LinkCollector

    authority = os.environ.get("FEDSURROGATE_ROOT_CERTIFICATES")
    return [LinkCollector(address, Path(authority) if authority else None, table_file(Path()))]


def sweep(
    grid: Annotated[
        list[str] | None, typer.Option("--grid", "-g", metavar="'key=value,...'")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    sites: Annotated[int, typer.Option("--sites", "-n", min=1)] = 3,
    workers: Annotated[int, typer.Option(min=1)] = 1,
    resume: Path | None = None,
    run_config: RunSettings = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Simulate every combination of settings and seeds.

    Prints one table, and writes it with a plot. Ctrl-C keeps what is done, prints its table and how to go on.

    `coordinator report RUN` draws the report of one of the runs.

    Example: coordinator sweep --seeds 2 -g method=fedpft,average -g alpha=0.1,1.0

    Args:
        grid: Values of a setting; may be given several times.
        seeds: How many seeds: 0, 1, 2, and so on.
        sites: How many sites to simulate.
        workers: How many runs go side by side in processes of their own, as far as memory has room.
        resume: File of rows of a sweep that was interrupted; its runs without an error are kept.
        as_json: Print one JSON row for each run, no table.
    """
    from fedsurrogate.common.extras import is_installed, missing

    from ..deployment.local_engine import simulate_here
    from ..report.plots.sweep import draw_sweep
    from ..runs.presets import typed_settings
    from ..sweep import Varied, combinations, merged, run_sweep, summarise, sweep_file
    from ..trial_process import Start

    fixed = typed_settings(run_config)
    trials = combinations(parse_grid(grid or []), range(seeds))
    progress = command_line.stderr_console()
    nodes = [{"partition-id": index, "num-partitions": sites} for index in range(sites)]

    def flat(varied: Varied) -> dict[str, Scalar]:
        return merged(fixed, varied)

    def run(varied: Varied, start: Start | None) -> Path:
        if start is not None:
            return start(nodes, flat(varied))
        return simulate_here(sites, flat(varied), lambda event: None, report=False)

    def show(line: str) -> None:
        progress.print(line)

    output = Path(str(fixed.get("output-dir", "runs"))).expanduser().absolute()
    file = sweep_file(output) if resume is None else resume.absolute()
    again = resume is not None
    finished = run_sweep(trials, flat, run, show, file, resume=again, workers=workers)
    interrupted = len(finished) < len(trials)
    if interrupted and not finished:
        raise typer.Exit(130)
    summaries = summarise(finished)
    picture = file.with_suffix(".png")
    drawn = is_installed("matplotlib")
    if drawn:
        draw_sweep(summaries).savefig(picture, dpi=150)
    else:
        # The rows of runs that may have taken hours must not be lost for their picture.
        progress.print(f"warning: {missing('matplotlib', 'the plot')}", style="yellow")
    if as_json:
        typer.echo(json.dumps([trial.row() for trial in finished], indent=2))
    else:
        _print_summaries(summaries)
        console.print(f"rows {file}" + (f"\nplot {picture}" if drawn else ""))
    if interrupted:
        progress.print(f"interrupted; --resume '{file}' goes on", style="yellow")
        raise typer.Exit(130)
    if failed := sum(bool(trial.error) for trial in finished):
        progress.print(
            f"{failed} of {len(finished)} runs failed; the lines above say why", style="red"
        )
        raise typer.Exit(1)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Scalar]]:
    """Parse the values of a grid.

    Args:
        texts: such as 'fedpft.rank=4,16', or 'fedpft.rank=[4, 16]'.

    Returns:
        The values of each setting.

    Raises:
        ConfigError: for another form.

    Example:
        >>> parse_grid(["fedpft.rank=4,16"])
        {'fedpft.rank': [4, 16]}
    """
    from fedsurrogate.common.settings.base import parse_value

    grid: dict[str, list[Scalar]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        try:
            parsed: Any = (
                tomllib.loads(f"values = {values}")["values"]
                if values.lstrip().startswith("[")
                else [parse_value(key, each.strip()) for each in values.split(",")]
            )
        except (tomllib.TOMLDecodeError, ConfigError):
            parsed = None
        if not isinstance(parsed, list) or not all(
            isinstance(value, str | int | float) and value != "" for value in parsed
        ):
            raise ConfigError(
                f"cannot read --grid {text!r}; write a key and its values: epsilon=1.0,8.0, or "
                '\'classes=["a,b", "a,c"]\''
            )
        grid[key] = parsed
    return grid


def _print_summaries(summaries: Sequence[Any]) -> None:

    from ..runs.scores import MAJORITY, SCORES
    from ..sweep import leading_score

    first = leading_score(summaries)
    known = {name for name in SCORES if any(s.means[name] is not None for s in summaries)}
    scores = [name for name in dict.fromkeys((first, *SCORES)) if name in known - {MAJORITY}]
    columns = [f"{SCORES[name]}, %" for name in scores or [first]]
    alone = [share for each in summaries if (share := each.means[MAJORITY]) is not None]
    caption = f"the majority baseline: {100 * max(alone):.1f} %" if alone else None
    rows = []
    for each in summaries:
        sent = "" if each.bytes is None else human_bytes(each.bytes)
        cells = [_percent(*each.spreads[name][:2]) for name in scores or [first]]
        varied = map(str, each.varied.values())
        rows.append((*varied, *cells, str(each.runs), str(each.failed), sent))
    columns = [*summaries[0].varied, *columns, "runs", "failed", "uplink"]
    print_table(columns, rows, caption=caption)


def _percent(mean: float | None, deviation: float | None) -> str:
    spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return "" if mean is None else f"{100 * mean:.2f}{spread}"
