"""A sweep: one run for each combination of settings and seed, in one table. A failed run does not
end the others.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import ConfigError, FedSurrogateError
from fedsurrogate.common.settings.flat import Scalar

Varied = dict[str, Scalar]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        varied: its values of the settings that the sweep varies, the seed among them.
        seconds: duration of the run.
        accuracy: of the model, in [0, 1]; None where the run failed or trains none.
        bytes: sent by all sites.
        epsilon: spent; None without privacy.
        folder: its run folder; empty where the run failed.
        error: why it failed; empty where it did not.
    """

    varied: Varied
    seconds: float
    accuracy: float | None = None
    bytes: int | None = None
    epsilon: float | None = None
    folder: str = ""
    error: str = ""

    def row(self) -> dict[str, Any]:
        """The trial as one row of a table: the varied settings, then the results."""
        results = {"accuracy": self.accuracy, "bytes": self.bytes, "epsilon spent": self.epsilon}
        return (
            self.varied
            | results
            | {"seconds": round(self.seconds, 3), "folder": self.folder, "error": self.error}
        )

    def __str__(self) -> str:
        text = (
            f"failed: {self.error}"
            if self.error
            else "no accuracy"
            if self.accuracy is None
            else f"{self.accuracy:.2%}"
        )
        return f"{named(self.varied)}: {text}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class Summary:
    """Trials that differ in their seed only.

    Attributes:
        varied: their settings, without the seed.
        runs: number of those with an accuracy.
        failed: number of those that failed.
        accuracy: mean, in [0, 1]; None without one.
        deviation: standard deviation of the accuracy; None below two runs.
        bytes: mean.
    """

    varied: Varied
    runs: int
    failed: int
    accuracy: float | None
    deviation: float | None
    bytes: float | None


def named(varied: Mapping[str, Scalar]) -> str:
    """Settings as one short text.

    Example:
        >>> named({"epsilon": 1.0, "seed": 0})
        'epsilon=1.0, seed=0'
    """
    return ", ".join(f"{key}={value}" for key, value in varied.items())


def combinations(grid: Mapping[str, Iterable[Scalar]], seeds: Iterable[int]) -> list[Varied]:
    """Every combination of the values of a grid, with every seed.

    Args:
        grid: the values of each setting.
        seeds: of the runs.

    Returns:
        The settings of each run, the seed among them.

    Raises:
        ConfigError: for a list without values or with one twice, or for seeds in the grid.

    Example:
        >>> combinations({"epsilon": [1.0, 2.0]}, [0])
        [{'epsilon': 1.0, 'seed': 0}, {'epsilon': 2.0, 'seed': 0}]
    """
    if "seed" in grid:
        raise ConfigError("seed is not a part of the grid; give the seeds as seeds")
    values: dict[str, list[Scalar]] = {
        key: [each] if isinstance(each, str | int | float) else list(each)
        for key, each in grid.items()
    }
    values["seed"] = list(seeds)
    for key, listed in values.items():
        if not listed:
            raise ConfigError(f"{key} has no values; give at least one")
        if len(set(map(repr, listed))) < len(listed):
            raise ConfigError(
                f"{key} = {', '.join(map(str, listed))} names a value twice; remove one"
            )
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def merged(fixed: Mapping[str, Any], varied: Varied) -> dict[str, Any]:
    """Settings of a trial. An epsilon of 0 among the values means no privacy, so the common delta
    does not apply.

    Args:
        fixed: settings of all trials.
        varied: those of this trial.

    Returns:
        Both together.

    Example:
        >>> merged({"delta": 1e-5}, {"epsilon": 0})
        {'delta': 0.0, 'epsilon': 0}
    """
    return {**fixed, **varied} | (
        {"delta": 0.0} if not varied.get("epsilon", 1) and "delta" not in varied else {}
    )


def run_trials(
    trials: Sequence[Varied],
    check: Callable[[Varied], object],
    run: Callable[[Varied], Path],
    on_trial: Callable[[Trial], object],
    output: Path,
) -> tuple[list[Trial], Path]:
    """Do all trials, one after another.

    Args:
        trials: the settings of each.
        check: raises FedSurrogateError for settings that cannot run.
        run: does one trial and returns its run folder.
        on_trial: takes each trial that is done.
        output: folder for the file of rows.

    Returns:
        The trials, and the file of their rows in `output`, written after every trial.

    Raises:
        FedSurrogateError: no trial passes `check`; before any run.
    """
    refused = {
        number: error for number, varied in enumerate(trials) if (error := _refusal(check, varied))
    }
    if len(refused) == len(trials):
        raise next(iter(refused.values()))
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"sweep-{datetime.now(UTC):%Y%m%dT%H%M%S%f}Z.json"
    done: list[Trial] = []
    for number, varied in enumerate(trials):
        began = time.perf_counter()
        try:
            if number in refused:
                raise refused[number]
            folder = run(varied)
            trial = _finished(varied, time.perf_counter() - began, folder)
        except (
            Exception
        ) as error:  # Whatever it is, it is the failure of this run, not of the others.
            kind = "" if isinstance(error, FedSurrogateError) else f"{type(error).__name__}: "
            trial = Trial(
                varied, time.perf_counter() - began, error=f"{kind}{error}".split("\n")[0]
            )
        done.append(trial)
        file.write_text(json.dumps([each.row() for each in done], indent=2) + "\n")
        on_trial(trial)
    return done, file


def summarise(trials: Sequence[Trial]) -> list[Summary]:
    """One row for each combination of settings, over its seeds; in the order of the trials."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(repr(_settings(trial)), []).append(trial)
    return [_summary(group) for group in groups.values()]


def _summary(group: Sequence[Trial]) -> Summary:
    accuracies = [trial.accuracy for trial in group if trial.accuracy is not None]
    sent = [trial.bytes for trial in group if trial.bytes is not None]
    return Summary(
        _settings(group[0]),
        len(accuracies),
        sum(bool(trial.error) for trial in group),
        statistics.fmean(accuracies) if accuracies else None,
        statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        statistics.fmean(sent) if sent else None,
    )


def _settings(trial: Trial) -> Varied:
    return {key: value for key, value in trial.varied.items() if key != "seed"}


def _refusal(check: Callable[[Varied], object], varied: Varied) -> FedSurrogateError | None:
    try:
        check(varied)
    except FedSurrogateError as error:
        return error
    return None


def _finished(varied: Varied, seconds: float, folder: Path) -> Trial:
    metrics = json.loads((folder / "metrics.json").read_text())
    spent = (metrics.get("privacy") or {}).get("epsilon")
    return Trial(
        varied,
        seconds,
        metrics["accuracy"].get("model"),
        metrics["bytes"]["up"],
        spent,
        str(folder),
    )
