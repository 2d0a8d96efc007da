"""A sweep: one run for each combination of settings and seed, in one table. A failed run does not
end the others, and an interrupted sweep goes on where it was.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedsurrogate.common.errors import ConfigError, FedSurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar, short

from .runs.scores import AUROC, OF_CLASSES, SCORES, in_words, leading, scores_of
from .trial_process import Processes, Start

Varied = dict[str, Scalar]


class Spread(NamedTuple):
    """A score of several runs.

    Attributes:
        mean: None where no run has it.
        deviation: standard deviation; None below two runs.
        runs: that have it.
    """

    mean: float | None = None
    deviation: float | None = None
    runs: int = 0


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        varied: its values of the settings that the sweep varies, the seed among them.
        seconds: duration of the run.
        bytes: sent by all sites.
        epsilon: spent; None without privacy.
        folder: its run folder; empty where the run failed.
        error: why it failed; empty where it did not.
        scores: of the model, by the names of `SCORES`; empty where the run failed.
    """

    varied: Varied
    seconds: float
    bytes: int | None = None
    epsilon: float | None = None
    folder: str = ""
    error: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The trial as one row of a table: the varied settings, then the results."""
        scores = self.scores or dict.fromkeys(OF_CLASSES)
        results = {"bytes": self.bytes, "epsilon spent": self.epsilon}
        return (
            self.varied
            | dict(scores)
            | results
            | {"seconds": round(self.seconds, 3), "folder": self.folder, "error": self.error}
        )

    def __str__(self) -> str:
        text = f"failed: {self.error}" if self.error else in_words(self.scores) or "no score"
        return f"{named(self.varied)}: {text}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class Summary:
    """Trials that differ in their seed only.

    Attributes:
        varied: their settings, without the seed.
        runs: number of those that did not fail.
        failed: number of those that failed.
        bytes: mean.
        spreads: of the scores, by the names of `SCORES`.
    """

    varied: Varied
    runs: int
    failed: int
    bytes: float | None
    spreads: Mapping[str, Spread]

    @property
    def means(self) -> dict[str, float | None]:
        """Mean of each score of `SCORES`."""
        return {name: each.mean for name, each in self.spreads.items()}


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


def run_sweep(
    trials: Sequence[Varied],
    flat: Callable[[Varied], Mapping[str, Scalar]],
    run: Callable[[Varied, Start | None], Path],
    show: Callable[[str], object],
    file: Path,
    *,
    resume: bool = False,
    workers: int = 1,
) -> list[Trial]:
    """Do all trials, one after another or side by side.

    Args:
        trials: the settings of each.
        flat: settings of the run of a trial.
        run: does one trial in this process, or in another where it is given what starts one, and
            returns its run folder.
        show: takes a line about each trial that is done.
        file: of rows, written after every trial.
        resume: whether the trials that `file` has without an error are kept, and do not run again.
        workers: how many trials run side by side in processes of their own, as far as memory has
            room; 1 for this process.

    Returns:
        The trials that are done, in their order: fewer than all of them after Ctrl-C.

    Raises:
        ConfigError: `file` cannot be resumed.
        FedSurrogateError: no trial has settings that can run; before any run.
    """
    done = _done_before(file, trials, flat) if resume else {}
    processes = Processes(workers) if workers > 1 else None
    refused = {
        number: error for number, varied in enumerate(trials) if (error := _refusal(flat, varied))
    }
    if len(refused) == len(trials):
        raise next(iter(refused.values()))
    file.parent.mkdir(parents=True, exist_ok=True)

    def one(number: int) -> Trial:
        began = time.perf_counter()
        try:
            if number in refused:
                raise refused[number]
            folder = run(trials[number], processes.run if processes else None)
            return _finished(trials[number], time.perf_counter() - began, folder)
        except (
            Exception
        ) as error:  # Whatever it is, it is the failure of this run, not of the others.
            kind = "" if isinstance(error, FedSurrogateError) else f"{type(error).__name__}: "
            text = f"{kind}{error}".split("\n")[0]
            return Trial(trials[number], time.perf_counter() - began, error=text)

    left = [number for number in range(len(trials)) if number not in done]
    try:
        for number, trial in _side_by_side(one, left, processes):
            done[number] = trial
            rows = [done[each].row() for each in sorted(done)]
            replace_file(file, json.dumps(rows, indent=2) + "\n", mode=0o644, durable=False)
            show(f"{len(done)} of {len(trials)}: {trial}")
    except KeyboardInterrupt:
        # What is done is kept; the caller sees that some are missing.
        pass
    return [done[number] for number in sorted(done)]


def _side_by_side(
    one: Callable[[int], Trial], numbers: Sequence[int], processes: Processes | None
) -> Iterator[tuple[int, Trial]]:
    """Trials as they end, each with its number."""
    if processes is None:
        for number in numbers:
            yield number, one(number)
        return
    waiting, running = list(numbers), dict[Future[Trial], int]()
    with ThreadPoolExecutor(processes.most) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < processes.room():
                    number = waiting.pop(0)
                    running[pool.submit(one, number)] = number
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(ended), ended.result()
        finally:
            processes.end()


def sweep_file(output: Path) -> Path:
    """A name for the file of rows of a sweep that begins now."""
    return output / f"sweep-{datetime.now(UTC):%Y%m%dT%H%M%S%f}Z.json"


def _done_before(
    file: Path, trials: Sequence[Varied], flat: Callable[[Varied], Mapping[str, Scalar]]
) -> dict[int, Trial]:
    """Trials that an earlier sweep has done without an error, by their place in `trials`. Raises
    ConfigError for a file that holds no rows, or runs with other settings.
    """
    try:
        rows = json.loads(file.read_text())
        if not all(isinstance(row, dict) and {"folder", "error"} <= row.keys() for row in rows):
            raise ValueError("no rows of a sweep")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"resume = '{file}': cannot be read ({error}); name the sweep-....json that the sweep "
            "printed"
        ) from None
    kept = {}
    for number, varied in enumerate(trials):
        for row in rows:
            same = all(key in row and row[key] == value for key, value in varied.items())
            if same and not row["error"] and (Path(row["folder"]) / "metrics.json").is_file():
                _check_same(Path(row["folder"]), flat(varied))
                kept[number] = _finished(varied, float(row["seconds"]), Path(row["folder"]))
                break
    return kept


def _check_same(folder: Path, flat: Mapping[str, Scalar]) -> None:
    ran = json.loads((folder / "manifest.json").read_text())["config"]
    for key, value in flat.items():
        # A run replaces "auto", and the folders are those of each sweep.
        if key != "output-dir" and value != "auto" and ran.get(key, value) != value:
            raise ConfigError(
                f"resume: the run in '{folder}' had {key} = {short(ran[key])}, and this sweep has "
                f"{short(value)}; give the settings that it had, or begin anew"
            )


def summarise(trials: Sequence[Trial]) -> list[Summary]:
    """One row for each combination of settings, over its seeds; in the order of the trials."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(repr(_settings(trial)), []).append(trial)
    return [_summary(group) for group in groups.values()]


def text_of(trials: Sequence[Trial]) -> str:
    """The summary of trials as lines, for a plain terminal."""
    lines = []
    for each in summarise(trials):
        name = leading(each.means)
        deviation = each.spreads[name].deviation
        spread = "" if deviation is None else f" ({SCORES[name]} ± {deviation:.4f})"
        scores = in_words(each.means) + spread or "no score"
        failed = f", {each.failed} failed" if each.failed else ""
        runs = f"{each.runs} run{'' if each.runs == 1 else 's'}"
        lines.append(f"{named(each.varied) or 'all'}: {scores}, {runs}{failed}")
    return "\n".join(lines) or "no run is done"


def _summary(group: Sequence[Trial]) -> Summary:
    sent = [trial.bytes for trial in group if trial.bytes is not None]
    failed = sum(bool(trial.error) for trial in group)
    spreads = {
        name: _spread([value for trial in group if (value := trial.scores.get(name)) is not None])
        for name in SCORES
    }
    mean = statistics.fmean(sent) if sent else None
    return Summary(_settings(group[0]), len(group) - failed, failed, mean, spreads)


def leading_score(summaries: Sequence[Summary]) -> str:
    """The score by which combinations are compared: AUROC where all have one, and in some runs one class
    is so large that accuracy misleads.
    """
    found = [each.means for each in summaries if in_words(each.means)]
    first = list(dict.fromkeys(map(leading, found)))
    known = AUROC in first and all(each[AUROC] is not None for each in found)
    return AUROC if known else next((name for name in first if name != AUROC), leading({}))


def _spread(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values) if values else None, deviation, len(values))


def _settings(trial: Trial) -> Varied:
    return {key: value for key, value in trial.varied.items() if key != "seed"}


def _refusal(
    flat: Callable[[Varied], Mapping[str, Scalar]], varied: Varied
) -> FedSurrogateError | None:
    try:
        parse_run(flat(varied))
    except FedSurrogateError as error:
        return error
    return None


def _finished(varied: Varied, seconds: float, folder: Path) -> Trial:
    metrics = json.loads((folder / "metrics.json").read_text())
    spent = (metrics.get("privacy") or {}).get("epsilon")
    return Trial(
        varied,
        seconds,
        metrics["bytes"]["up"],
        spent,
        str(folder),
        scores=scores_of(metrics),
    )
