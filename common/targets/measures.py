"""How well a model answers, as sums over test records that add up over sites: pairs of an output's
place and a measure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from common.targets.answers import facts_of

# Name of the sums among the values of a message, and most characters of their text.
MEASURES, LONGEST = "measures", 2**16
# "0.age.absolute": of the first output.
NAME = re.compile(r"(\d+)\.(.{1,200})\.([a-z]+)", re.DOTALL)
Sums = dict[str, float]


def is_measure(name: object) -> bool:
    """Whether a text names a sum."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def measured(target: str, outputs: tuple[str, ...], scores: Tensor, values: Tensor) -> Sums:
    """Sums over test records.

    Args:
        target: facts of the model about it, as JSON.
        outputs: of the model.
        scores: of the records, (n, o).
        values: of the records, (n, k), in the order of the run's columns; NaN where missing.

    Returns:
        By place of an output, its name and the measure.
    """
    facts = facts_of(target)
    columns: list[str] = facts["columns"]
    found: Sums = {}
    for at, output in enumerate(outputs):
        place = columns.index(output) if output in columns else 0
        true = values[:, place] if output in columns else values
        own = MEASURED[facts["name"]](scores[:, at].double(), true.double())
        found |= {f"{at}.{output}.{name}": value for name, value in own.items()}
    return found


def packed(sums: Sums) -> str:
    """Sums as text for a message."""
    return json.dumps(sums, sort_keys=True)


def added(rows: Iterable[Mapping[str, float]]) -> Sums:
    """The sums of all sites."""
    total: Sums = {}
    for row in rows:
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value
    return total


def metrics_of(sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What people read, by output.

    Args:
        sums: of one site, or of several.

    Returns:
        Numbers: records, mae, rmse and r2. Labels: records, positive, brier and auroc. Times:
        records, events and concordance. Without those that the records do not determine.

    Example:
        >>> sums = {"0.age.records": 2.0, "0.age.absolute": 2.0, "0.age.squared": 2.0}
        >>> metrics_of(sums | {"0.age.value": 0.0, "0.age.energy": 8.0})
        {'age': {'records': 2.0, 'mae': 1.0, 'rmse': 1.0, 'r2': 0.75}}
    """
    by_output: dict[str, Sums] = {}
    for name, value in sums.items():
        if match := NAME.fullmatch(name):
            by_output.setdefault(match[2], {})[match[3]] = value
    return {output: _metrics(own) for output, own in by_output.items()}


def _metrics(own: Mapping[str, float]) -> dict[str, float]:
    records = own.get("records", 0.0)
    if not records > 0:
        return {"records": 0.0}
    found = {"records": records}
    for name in ("positive", "events"):
        if name in own:
            found[name] = own[name]
    if "absolute" in own:
        found["mae"] = own["absolute"] / records
        found["rmse"] = (own["squared"] / records) ** 0.5
        spread = own["energy"] - own["value"] ** 2 / records
        if spread > 0:
            found["r2"] = 1 - own["squared"] / spread
    if "brier" in own:
        found["brier"] = own["brier"] / records
    if own.get("pairs", 0.0) > 0:
        ranked = "auroc" if "brier" in own else "concordance"
        found[ranked] = own["concordant"] / own["pairs"]
    return found


def _number(scores: Tensor, true: Tensor) -> Sums:
    error = scores - true
    return {
        "records": float(len(true)),
        "absolute": float(error.abs().sum()),
        "squared": float(error.square().sum()),
        "value": float(true.sum()),
        "energy": float(true.square().sum()),
    }


def _labels(scores: Tensor, true: Tensor) -> Sums:
    known = ~true.isnan()
    scores, true = scores[known], true[known]
    ranks = _ranks(scores)
    positive = true == 1
    count, others = float(positive.sum()), float((~positive).sum())
    return {
        "records": float(len(true)),
        "positive": count,
        "brier": float((scores.sigmoid() - true).square().sum()),
        "pairs": count * others,
        "concordant": float(ranks[positive].sum()) - count * (count + 1) / 2,
    }


def _time(scores: Tensor, true: Tensor) -> Sums:
    """Pairs of which the first had the event while the second was still without it (Harrell)."""
    time, event = true[:, 0], true[:, 1] == 1
    pairs = concordant = 0.0
    for row in event.nonzero().flatten().tolist():
        later = time > time[row]
        later |= (time == time[row]) & ~event
        pairs += float(later.sum())
        lower = scores[later] < scores[row]
        concordant += float(lower.sum()) + 0.5 * float((scores[later] == scores[row]).sum())
    return {
        "records": float(len(time)),
        "events": float(event.sum()),
        "pairs": pairs,
        "concordant": concordant,
    }


def _ranks(scores: Tensor) -> Tensor:
    """Ranks from one; equal scores have their mean rank."""
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    ranks: Tensor = (last - (sizes.double() - 1) / 2)[group]
    return ranks


MEASURED: dict[str, Callable[[Tensor, Tensor], Sums]] = {
    "number": _number,
    "labels": _labels,
    "time": _time,
}
