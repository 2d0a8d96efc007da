"""Results of evaluations and surveys from the counts of all sites together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from common.counting.counts import Counts
from common.rules.counting import scored_classes
from strategies.counting.intervals import Interval, auroc, rate, total

Json = dict[str, Any]


@dataclass(frozen=True)
class PooledCounts:
    """Tables of counts by name (float64), and the variance of the noise in each of their cells."""

    tables: Mapping[str, Tensor]
    variances: Mapping[str, float]


def pooled(counts: Sequence[Counts]) -> PooledCounts:
    """The sum over sites. The noise of different sites is independent."""
    names = counts[0].tables
    return PooledCounts(
        {name: torch.stack([each.tables[name] for each in counts]).double().sum(0) for name in names},
        {name: sum(each.variance(name) for each in counts) for name in names},
    )


def evaluation_result(found: PooledCounts, classes: Sequence[str]) -> Json:
    """Records, accuracy, and by class records, sensitivity, specificity and AUROC, each with its interval."""
    decisions, noise = found.tables["decisions"], found.variances["decisions"]
    right = torch.eye(len(classes), dtype=torch.bool)
    return {
        "records": asdict(total(decisions, noise)),
        "accuracy": asdict(rate(decisions[right], decisions[~right], noise)),
        "classes": {name: _of_class(found, index, len(classes)) for index, name in enumerate(classes)},
        "decisions": decisions.long().tolist(),
        "noise": {name: variance**0.5 for name, variance in found.variances.items()},
    }


def _of_class(found: PooledCounts, index: int, classes: int) -> Json:
    decisions, noise = found.tables["decisions"], found.variances["decisions"]
    own = torch.arange(classes) == index
    others = decisions[~own]
    area = _area(found, index, classes)
    return {
        "records": asdict(total(decisions[index], noise)),
        "sensitivity": asdict(rate(decisions[index][own], decisions[index][~own], noise)),
        "specificity": asdict(rate(others[:, ~own].flatten(), others[:, own].flatten(), noise)),
        "auroc": asdict(area),
    }


def _area(found: PooledCounts, index: int, classes: int) -> Interval:
    scores, noise = found.tables["scores"], found.variances["scores"]
    scored = scored_classes(classes)
    # Of two classes only the last is scored. The other has the same AUROC, because the two probabilities sum to one.
    return auroc(scores[max(0, index - (classes - scored))], noise)


def survey_result(counts: Sequence[Counts], found: PooledCounts, classes: Sequence[str]) -> Json:
    """Records of each class: all sites together with intervals, and each site's counts."""
    records, noise = found.tables["records"], found.variances["records"]
    return {
        "records": asdict(total(records, noise)),
        "classes": {name: asdict(total(records[index], noise)) for index, name in enumerate(classes)},
        "per_site": {each.header.site: each.tables["records"].tolist() for each in counts},
        "noise": {each.header.site: each.variance("records") ** 0.5 for each in counts},
    }
