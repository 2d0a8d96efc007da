"""Results of evaluations and surveys from the counts of all sites together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.counting.counts import Counts
from fedsurrogate.common.counting.counts_proto import check_tables
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.counting import scored_classes
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import CountingSettings, Settings
from fedsurrogate.common.targets.counted import STEPS, counted
from fedsurrogate.common.targets.target import Target
from fedsurrogate.strategies.base.collection import Recorder
from fedsurrogate.strategies.counting.intervals import Interval, auroc, mean_of, rate, total
from fedsurrogate.strategies.counting.target_results import evaluation_of_target, survey_of_target
from fedsurrogate.strategies.pooling.total import Total

Json = dict[str, Any]


@dataclass(frozen=True)
class PooledCounts:
    """Counts of all sites together.

    Attributes:
        tables: of counts by name, float64.
        variances: of the noise in each cell of a table, by name.
    """

    tables: Mapping[str, Tensor]
    variances: Mapping[str, float]


def pooled(counts: Sequence[Counts]) -> PooledCounts:
    """The sum over sites. The noise of different sites is independent, so its variances add up.

    Args:
        counts: of the sites, with the same tables.
    """
    names = counts[0].tables
    return PooledCounts(
        {
            name: torch.stack([each.tables[name] for each in counts]).double().sum(0)
            for name in names
        },
        {name: sum(each.variance(name) for each in counts) for name in names},
    )


def summed_result(summed: Total, config: Run) -> Json:
    """The result from a secure sum.

    Args:
        summed: tables of counts over all sites.
        config: of the run.

    Raises:
        RunError: when no records and honest noise can give this sum.
    """
    tables = PooledCounts(
        summed.tensors, {name: summed.sigmas.get(name, 0.0) ** 2 for name in summed.tensors}
    )
    try:
        check_tables(tables.tables, tables.variances)
    except SurrogateError as error:
        raise RunError(
            f"{error}, so some site has added false numbers; nothing shows which one: run again "
            "with other sites, or without secure-sum"
        ) from None
    own = config.settings
    result = result_of(tables, own.counting, own.classes, config.target)
    return result | {"secure_sum": True}


def keep_result(recorder: Recorder, settings: Settings, sites: int, result: Json) -> None:
    """Write a result into the run folder.

    Args:
        recorder: of the run folder.
        settings: of the run.
        sites: number of sites that were counted.
        result: as from `result_of`.
    """
    whole: Json = {"schema": 1, "kind": settings.counting.kind, "sites": sites} | result
    if settings.epsilon:
        whole["privacy"] = {"epsilon": settings.epsilon, "delta": settings.delta}
    recorder.keep(f"{settings.counting.kind}.json", (json.dumps(whole, indent=2) + "\n").encode())


def result_of(
    counts: PooledCounts,
    counting: CountingSettings,
    classes: Sequence[str],
    target: Target | None = None,
) -> Json:
    """The result of a run that counts, as far as it follows from the counts of all sites together.

    Args:
        counts: of all sites together.
        counting: settings, whose kind says what was counted.
        classes: of the run.
        target: of the run; None for classes.
    """
    if target is not None:
        return _result_of_target(counts, counting, target)
    if counting.kind == "survey":
        return _survey_result(counts, classes)
    return evaluation_result(counts, classes) | {"model": counting.digest}


def _result_of_target(counts: PooledCounts, counting: CountingSettings, target: Target) -> Json:
    how, ((name, table),) = counted(target, counting), counts.tables.items()
    facts: Json = {"target": target.name, "noise": _deviations(counts)}
    if counting.kind == "survey":
        return survey_of_target(how, table, counts.variances[name]) | facts
    found = evaluation_of_target(how, table, counts.variances[name])
    return found | facts | {"model": counting.digest}


def records_counted(
    tables: Mapping[str, Tensor], counting: CountingSettings, target: Target
) -> int:
    """The number of records of one site that a run with a target counts, noisy under privacy: the
    most of any of its labels or numbers.

    Args:
        tables: of the site.
        counting: settings of what was counted.
        target: of the run.
    """
    how, ((name, table),) = counted(target, counting), tables.items()
    if name == "records":
        parts = torch.split(table, [len(each.cells) for each in how.questions])
        return max(0, *(int(part.sum()) for part in parts))
    if name == "errors":
        return max(0, round(float(table[:, 0].max()) / STEPS))
    return max(0, int(table.flatten(1).sum(1).max()))


def survey_of_sites(counts: Sequence[Counts]) -> Json:
    """Each site's counts of a survey, and the standard deviation of the noise in them.

    Args:
        counts: of the sites.
    """
    return {
        "per_site": {each.header.site: each.tables["records"].tolist() for each in counts},
        "noise": {each.header.site: each.variance("records") ** 0.5 for each in counts},
    }


def evaluation_result(counts: PooledCounts, classes: Sequence[str]) -> Json:
    """The result of an evaluation.

    Args:
        counts: with the tables "decisions" (C, C), true class by predicted class, and "scores".
        classes: of the run, C.

    Returns:
        Records, accuracy, balanced accuracy over the classes that have a record (undefined where noise
        hides one), those without, and by class records, sensitivity, specificity and AUROC, each with its
        interval.
    """
    decisions, noise = counts.tables["decisions"], counts.variances["decisions"]
    right = torch.eye(len(classes), dtype=torch.bool)
    rates = {
        name: rate(decisions[at][right[at]], decisions[at][~right[at]], noise)
        for at, name in enumerate(classes)
    }
    # Without noise, a class that nobody has counted is known to have no record.
    absent = [name for name, each in rates.items() if each.value is None and not noise]
    balanced = mean_of([each for name, each in rates.items() if name not in absent])
    return {
        "records": asdict(total(decisions, noise)),
        "accuracy": asdict(rate(decisions[right], decisions[~right], noise)),
        "balanced_accuracy": asdict(balanced),
        "without_records": absent,
        "classes": {
            name: _of_class(counts, index, len(classes)) for index, name in enumerate(classes)
        },
        "decisions": _whole(decisions),
        "noise": _deviations(counts),
    }


def _of_class(counts: PooledCounts, index: int, classes: int) -> Json:
    decisions, noise = counts.tables["decisions"], counts.variances["decisions"]
    own = torch.arange(classes) == index
    others = decisions[~own]
    area = _area(counts, index, classes)
    return {
        "records": asdict(total(decisions[index], noise)),
        "sensitivity": asdict(rate(decisions[index][own], decisions[index][~own], noise)),
        "specificity": asdict(rate(others[:, ~own].flatten(), others[:, own].flatten(), noise)),
        "auroc": asdict(area),
    }


def _area(counts: PooledCounts, index: int, classes: int) -> Interval:
    scores, noise = counts.tables["scores"], counts.variances["scores"]
    scored = scored_classes(classes)
    # Of two classes only the last is scored. The other has the same AUROC, because the two
    # probabilities sum to one.
    return auroc(scores[max(0, index - (classes - scored))], noise)


def _survey_result(counts: PooledCounts, classes: Sequence[str]) -> Json:
    records, noise = counts.tables["records"], counts.variances["records"]
    return {
        "records": asdict(total(records, noise)),
        "classes": {
            name: asdict(total(records[index], noise)) for index, name in enumerate(classes)
        },
        "noise": _deviations(counts),
    }


def _deviations(counts: PooledCounts) -> dict[str, float]:
    return {name: variance**0.5 for name, variance in counts.variances.items()}


def _whole(table: Tensor) -> Any:
    return table.round().long().tolist()
