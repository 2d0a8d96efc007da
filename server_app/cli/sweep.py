"""The `coordinator sweep` command."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsurrogate.common.command_line import RunSettings, console, stderr_console
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.server_app.cli.options import Preset

if TYPE_CHECKING:
    from rich.table import Table

    from fedsurrogate.common.settings.flat import Scalar


def sweep(
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            "-g",
            metavar="'key=[value, ...]'",
            help="Values of a setting; may be given several times.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, 2, and so on.")] = 3,
    sites: Annotated[
        int, typer.Option("--sites", "-n", min=1, help="How many sites to simulate.")
    ] = 3,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many runs go side by side in processes of their own, as far as memory has "
            "room.",
        ),
    ] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="File of rows of a sweep that was interrupted; its runs without an error are kept.",
        ),
    ] = None,
    preset: Preset = "",
    run_config: RunSettings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON row for each run, no table.")
    ] = False,
) -> None:
    """Simulate every combination of settings and seeds; print one table, and write it with a plot.

    Ctrl-C keeps what is done, prints its table and how to go on.

    `coordinator report RUN` draws the report of one of the runs.

    Example: coordinator sweep --seeds 2 -g 'method=["fedpft", "average"]' -g 'alpha=[0.1, 1.0]'
    """
    from fedsurrogate.common.extras.packages import is_installed, missing
    from fedsurrogate.common.settings.flat import parse_overrides
    from fedsurrogate.server_app.deployment.local_engine import simulate_here
    from fedsurrogate.server_app.report.plots.sweep import draw_sweep
    from fedsurrogate.server_app.runs.presets import preset_settings
    from fedsurrogate.server_app.sweep import (
        Varied,
        combinations,
        merged,
        run_sweep,
        summarise,
        sweep_file,
    )
    from fedsurrogate.server_app.trial_process import Start

    fixed = preset_settings(preset) | parse_overrides(run_config or [])
    trials = combinations(parse_grid(grid or []), range(seeds))
    progress = stderr_console()
    nodes = [{"partition-id": index, "num-partitions": sites} for index in range(sites)]

    def flat(varied: Varied) -> dict[str, Scalar]:
        return merged(fixed, varied)

    def run(varied: Varied, start: Start | None) -> Path:
        if start is not None:
            return start(nodes, flat(varied))
        return simulate_here(sites, flat(varied), lambda event: None, report=False)

    def show(line: str) -> None:
        progress.print(line, soft_wrap=True)

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
        progress.print(
            f"warning: {missing('matplotlib', 'the plot')}", style="yellow", soft_wrap=True
        )
    if as_json:
        typer.echo(json.dumps([trial.row() for trial in finished], indent=2))
    else:
        console.print(_table(summaries))
        console.print(f"rows {file}" + (f"\nplot {picture}" if drawn else ""), soft_wrap=True)
    if interrupted:
        progress.print(f"interrupted; --resume '{file}' goes on", style="yellow", soft_wrap=True)
        raise typer.Exit(130)
    if failed := sum(bool(trial.error) for trial in finished):
        progress.print(
            f"{failed} of {len(finished)} runs failed; the lines above say why",
            style="red",
            soft_wrap=True,
        )
        raise typer.Exit(1)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Scalar]]:
    """Parse the values of a grid.

    Args:
        texts: such as 'fedpft.rank=[4, 16]'.

    Returns:
        The values of each setting.

    Raises:
        ConfigError: for another form.

    Example:
        >>> parse_grid(["fedpft.rank=[4, 16]"])
        {'fedpft.rank': [4, 16]}
    """
    grid: dict[str, list[Scalar]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        try:
            parsed: Any = tomllib.loads(f"values = {values}")["values"]
        except tomllib.TOMLDecodeError:
            parsed = None
        if not isinstance(parsed, list) or not all(
            isinstance(value, str | int | float) for value in parsed
        ):
            raise ConfigError(
                f"cannot read --grid {text!r}; write a key and a list of values: 'epsilon=[1.0, "
                "8.0]'"
            )
        grid[key.strip()] = parsed
    return grid


def _table(summaries: Sequence[Any]) -> Table:
    from rich.table import Table

    from fedsurrogate.common.number_format import human_bytes
    from fedsurrogate.server_app.runs.scores import MAJORITY, SCORES
    from fedsurrogate.server_app.sweep import leading_score

    first = leading_score(summaries)
    known = {name for name in SCORES if any(s.means[name] is not None for s in summaries)}
    scores = [name for name in dict.fromkeys((first, *SCORES)) if name in known - {MAJORITY}]
    columns = [f"{SCORES[name]}, %" for name in scores or [first]]
    alone = [share for each in summaries if (share := each.means[MAJORITY]) is not None]
    caption = f"always giving the largest class: {100 * max(alone):.1f} %" if alone else None
    table = Table(*summaries[0].varied, *columns, "runs", "failed", "uplink", caption=caption)
    for each in summaries:
        sent = "" if each.bytes is None else human_bytes(each.bytes)
        cells = [_percent(*each.spread(name)) for name in scores or [first]]
        table.add_row(
            *map(str, each.varied.values()), *cells, str(each.runs), str(each.failed), sent
        )
    return table


def _percent(mean: float | None, deviation: float | None) -> str:
    spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return "" if mean is None else f"{100 * mean:.2f}{spread}"
