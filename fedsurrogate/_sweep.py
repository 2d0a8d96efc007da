"""Many simulations over seeds and settings, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedsurrogate._arguments import is_whole, shown, writing
from fedsurrogate._data import Images
from fedsurrogate._frames import data_frame
from fedsurrogate._inputs import flat_settings
from fedsurrogate._simulation import OF_BACKBONE, Pair, Simulation, gather
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.report.plots.sweep import draw_sweep
from fedsurrogate.server_app.sweep import (
    Summary,
    Trial,
    Varied,
    combinations,
    merged,
    run_trials,
    summarise,
)


@dataclass(frozen=True, repr=False)
class Sweep:
    """The results of a sweep.

    Attributes:
        trials: its runs, those that failed too.
        file: their rows as JSON.
    """

    trials: tuple[Trial, ...]
    file: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One table row for each run: the varied settings, accuracy, bytes, epsilon spent, seconds,
        folder, error.
        """
        return [trial.row() for trial in self.trials]

    @property
    def failed(self) -> list[Trial]:
        """Runs that failed; `error` says why."""
        return [trial for trial in self.trials if trial.error]

    def summary(self) -> list[Summary]:
        """One row for each combination of settings: mean and standard deviation of the accuracy
        over the seeds.
        """
        return summarise(self.trials)

    def to_frame(self) -> Any:
        """A pandas data frame of `rows`.

        Raises:
            PackageError: without pandas; `rows` needs none.
        """
        return data_frame(self.rows)

    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure of mean accuracy by setting, with one standard deviation.

        Args:
            path: of a file that the figure is written to; None for no file.
        """
        figure = draw_sweep(self.summary())
        if path is not None:
            with writing(path) as file:
                figure.savefig(file, dpi=150)
        return figure

    def __repr__(self) -> str:
        best = max(
            (each for each in self.summary() if each.accuracy is not None),
            key=_accuracy,
            default=None,
        )
        shown = "" if best is None else f", best mean accuracy {best.accuracy:.4f} at {best.varied}"
        return f"Sweep({len(self.trials)} runs, {len(self.failed)} failed{shown})"


def sweep(
    sites: Sequence[Pair | Images] | int = 3,
    *,
    grid: Mapping[str, Iterable[Scalar]] | None = None,
    seeds: Iterable[int] | int = (0, 1, 2),
    data: Images | str | None = None,
    backbone: str | nn.Module | None = None,
    test: Pair | Images | None = None,
    progress: bool = True,
    **settings: Any,
) -> Sweep:
    """Simulate every combination of the values in `grid` with every seed, as `simulate` does.

    A run that fails is a row with an error, and the others go on. Features are computed once unless
    the grid varies the backbone.

    Args:
        sites: as in `simulate`.
        grid: values by setting, such as {"method": ["fedpft", "afl"], "epsilon": [1.0, 8.0]}.
        seeds: of the runs; a number means so many: 0, 1, 2, and so on.
        data: as in `simulate`.
        backbone: as in `simulate`.
        test: as in `simulate`.
        progress: print a line a run.
        settings: those that all runs share, `output_dir` among them.

    Returns:
        All runs.

    Raises:
        ConfigError: if no run could start.
        DataError: if no run could start.
    """
    fixed = {"method": "fedpft"} | settings
    output = Path(str(fixed.pop("output_dir", "runs"))).expanduser().absolute()
    trials, done = combinations(_values(grid), _listed(seeds)), list[Trial]()
    if unfit := set(grid or {}) & {"sites", "data", "test", "output_dir"}:
        raise ConfigError(f"{min(unfit)} cannot be part of a grid; make one sweep for each")
    varies = bool(set(grid or {}) & {"backbone", *OF_BACKBONE})

    def flat(varied: Varied) -> dict[str, Scalar]:
        given = merged(fixed, varied)
        return flat_settings(
            str(given["method"]), {key: given[key] for key in given.keys() - {"method", "backbone"}}
        )

    def named_backbone(varied: Varied) -> str | nn.Module | None:
        return str(varied["backbone"]) if "backbone" in varied else backbone

    def gathered(varied: Varied) -> Simulation:
        return gather(sites, data, named_backbone(varied), test, fixed | varied)

    shared = None if varies else gathered({})

    def run(varied: Varied) -> Path:
        return (shared or gathered(varied)).run(flat(varied), output, lambda event: None)

    def show(trial: Trial) -> None:
        done.append(trial)
        if progress:
            print(f"{len(done)} of {len(trials)}: {trial}", flush=True)

    finished, file = run_trials(trials, lambda varied: parse_run(flat(varied)), run, show, output)
    return Sweep(tuple(finished), file)


def _values(grid: object) -> dict[str, Any]:
    """The grid as lists by name. Raises ConfigError for another form."""
    if grid is None:
        return {}
    if not isinstance(grid, Mapping) or not all(isinstance(key, str) for key in grid):
        raise ConfigError(
            f"grid = {shown(grid)}: must be lists by setting, such as {{'epsilon': [1.0, 8.0]}}"
        )
    for key, values in grid.items():
        if not isinstance(values, Iterable):
            raise ConfigError(f"grid: {key} = {shown(values)}: must be a list of values")
    return {key: values if isinstance(values, str) else [*values] for key, values in grid.items()}


def _listed(seeds: object) -> list[int]:
    """Seeds, or those of a number of them. Raises ConfigError for anything else."""
    given = range(seeds) if isinstance(seeds, int) and is_whole(seeds) else seeds
    listed: list[Any] = [*given] if isinstance(given, Iterable) else [None]
    if not all(map(is_whole, listed)):
        raise ConfigError(
            f"seeds = {shown(seeds)}: must be how many, such as 3, or a list of whole numbers"
        )
    return list(map(int, listed))


def _accuracy(summary: Summary) -> float:
    return summary.accuracy or 0.0
