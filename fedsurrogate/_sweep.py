"""Many simulations over seeds and settings, in one table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedsurrogate._arrays import data_frame, shown
from fedsurrogate._images import Images
from fedsurrogate._inputs import check, flat_settings, is_whole, writing
from fedsurrogate._simulation import OF_BACKBONE, STATED, Pair, Simulation, check_sites, gather
from fedsurrogate._targets import with_target_columns
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.server_app import sweep as sweeps
from fedsurrogate.server_app.report.plots.sweep import draw_sweep
from fedsurrogate.server_app.runs.scores import SCORES
from fedsurrogate.server_app.trial_process import Start

# Of a trial, what `simulate` takes as an argument.
NO_SETTINGS = {"method", "backbone", "sites"}


@dataclass(frozen=True, repr=False)
class Sweep:
    """The results of a sweep.

    Attributes:
        trials: its runs, those that failed too.
        file: their rows as JSON.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> with TemporaryDirectory() as runs:
        ...     table = sweep([(x[::2], y[::2]), (x[1::2], y[1::2])], grid={"shrinkage": [0.1, 0.5]},
        ...         seeds=1, output_dir=runs, progress=False)
        >>> len(table.rows), len(table.failed)
        (2, 0)
    """

    trials: tuple[sweeps.Trial, ...]
    file: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One table row for each run: the varied settings, AUROC, balanced accuracy, accuracy and that of
        the majority baseline, or the score of another target, bytes, epsilon spent, seconds, folder,
        error.
        """
        return [trial.row() for trial in self.trials]

    @property
    def failed(self) -> list[sweeps.Trial]:
        """Runs that failed; `error` says why."""
        return [trial for trial in self.trials if trial.error]

    def summary(self) -> list[sweeps.Summary]:
        """One row for each combination of settings: in `spreads` the mean and standard deviation of each
        score over the seeds.
        """
        return sweeps.summarise(self.trials)

    def to_frame(self) -> Any:
        """A tidy pandas data frame of `rows`: one run a row, one variable a column, and names that
        Python can use, such as `epsilon_spent` and `fedpft__rank`.

        Raises:
            PackageError: without pandas; `rows` needs none.
        """
        return data_frame([{_tidy(key): row[key] for key in row} for row in self.rows])

    def plot(self, path: str | Path | None = None, *, over: str = "", score: str = "") -> Any:
        """A matplotlib figure of a mean score: a line for each combination of other settings, with
        its 95 % interval over the seeds.

        Args:
            path: of a file that the figure is written to; None for no file.
            over: the horizontal axis: a setting with numbers, such as "epsilon", "sites" or
                "rounds", or "bytes" for those that all sites sent; "" for the setting with the most
                values.
            score: "auroc", "balanced accuracy", "accuracy", "majority", "r2" or "concordance"; "" for AUROC
                where one class is so large that accuracy misleads, else for accuracy or that of another
                target.

        Raises:
            ConfigError: for an axis that the sweep does not vary, another score, or a file that cannot be written.
        """
        figure = draw_sweep(self.summary(), over, score)
        if path is not None:
            with writing(path) as file:
                figure.savefig(file, dpi=150)
        return figure

    def __repr__(self) -> str:
        score = sweeps.leading_score(summaries := self.summary())
        found = [(mean, each) for each in summaries if (mean := each.means[score]) is not None]
        shown = ""
        if found:
            mean, best = max(found, key=lambda pair: pair[0])
            shown = f", best mean {SCORES[score]} {mean:.4f} at {best.varied}"
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
        grid: values by setting, such as {"fedpft.rank": [16, 64], "epsilon": [1.0, 8.0]}; also
            of "sites", numbers of sites that share `data`, and of "backbone".
        seeds: of the runs; a number means so many: 0, 1, 2, and so on.
        data: as in `simulate`.
        backbone: as in `simulate`.
        test: as in `simulate`.
        progress: print a line a run.
        settings: those that all runs share, `output_dir` among them. Two are the sweep's own:
            `workers`, how many runs go side by side in processes of their own, as far as memory has
            room ("auto" for one a processor; 1 by default, in this process); and `resume`, the file
            of a sweep that was interrupted, whose runs without an error are kept. Their settings
            are compared with those of this sweep; that the data are the same is up to you.

    Ctrl-C prints the table of the runs that are done, and their file.

    Returns:
        All runs.

    Raises:
        ConfigError: if no run could start.
        DataError: if no run could start.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> with TemporaryDirectory() as runs:
        ...     table = sweep([(x[::2], y[::2]), (x[1::2], y[1::2])], grid={"method": ["fedpft", "average"]},
        ...         seeds=1, output_dir=runs, progress=False)
        >>> [row["accuracy"] > 0.8 for row in table.rows]
        [True, True]
    """
    check_sites(sites)
    entries = [data] if isinstance(sites, int) else sites
    fixed = {"method": "fedpft"} | with_target_columns(settings, entries)
    output = Path(str(fixed.pop("output_dir", "runs"))).expanduser().absolute()
    resume, workers = fixed.pop("resume", None), _workers(fixed.pop("workers", 1))
    trials = sweeps.combinations(_values(grid), _listed(seeds))
    _check_grid(grid or {}, trials, sites)
    varies = bool(set(grid or {}) & {"backbone", *OF_BACKBONE, *STATED})

    def flat(varied: sweeps.Varied) -> dict[str, Scalar]:
        given = sweeps.merged(fixed, varied)
        return flat_settings(
            str(given["method"]), {key: given[key] for key in given.keys() - NO_SETTINGS}
        )

    def gathered(varied: sweeps.Varied) -> Simulation:
        named = str(varied["backbone"]) if "backbone" in varied else backbone
        return gather(sites, data, named, test, fixed | varied)

    if resume is not None:
        check("path", resume)
    again = resume is not None
    file = Path(resume).expanduser().absolute() if again else sweeps.sweep_file(output)
    shared = None if varies else gathered({})

    def run(varied: sweeps.Varied, start: Start | None) -> Path:
        federation = shared or gathered(varied)
        federation = replace(federation, count=int(varied.get("sites", federation.count)))
        return federation.run(flat(varied), output, lambda event: None, start)

    def show(line: str) -> None:
        if progress:
            print(line, flush=True)

    finished = sweeps.run_sweep(trials, flat, run, show, file, resume=again, workers=workers)
    if len(finished) == len(trials):
        return Sweep(tuple(finished), file)
    print(
        sweeps.text_of(finished), f"\ninterrupted; sweep(..., resume='{file}') goes on", flush=True
    )
    raise KeyboardInterrupt


def _workers(workers: object) -> int:
    """The number of workers. Raises ConfigError for another one."""
    if workers == "auto":
        workers = os.cpu_count() or 1
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(
            f"workers = {shown(workers)}: must be how many runs go side by side, at least 1, or "
            "'auto'"
        )
    return workers


def _check_grid(grid: Mapping[str, Any], trials: Sequence[sweeps.Varied], sites: object) -> None:
    """Raise ConfigError for what a sweep cannot vary."""
    if unfit := set(grid) & {"data", "test", "output_dir"}:
        raise ConfigError(f"{min(unfit)} cannot be part of a grid; make one sweep for each")
    if "sites" not in grid:
        return
    if not isinstance(sites, int):
        raise ConfigError(
            "sites in a grid are numbers of sites that share data; give data, and no list of sites"
        )
    for each in (trial["sites"] for trial in trials):
        if not is_whole(each) or int(each) < 1:
            raise ConfigError(f"grid: sites = {shown(each)}: must be a whole number of at least 1")


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


def _tidy(key: str) -> str:
    return key.replace(".", "__").replace("-", "_").replace(" ", "_")
