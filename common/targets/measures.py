"""How well a model answers, as sums over test records that add up over sites: pairs of an output's
place and a measure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from .answers import facts_of
from .registry import TARGETS
from .target import Kind

# Name of the sums among the values of a message, and most characters of their text.
MEASURES, LONGEST = "measures", 2**16
# "number.0.age.absolute": of the first output.
NAME = re.compile(r"([a-z]+)\.(\d+)\.(.{1,200})\.([a-z]+)", re.DOTALL)
IN_WORDS = {
    "auroc": "AUROC",
    "brier": "Brier score",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
}
Sums = dict[str, float]


def is_measure(name: object) -> bool:
    """Whether a text names a sum."""
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    return match is not None and match[1] in TARGETS


def measured(target: str, outputs: tuple[str, ...], scores: Tensor, values: Tensor) -> Sums:
    """Sums over test records.

    Args:
        target: facts of the model about it, as JSON.
        outputs: of the model.
        scores: of the records, (n, o).
        values: of the records, (n, k), in the order of the run's columns; NaN where missing.

    Returns:
        By kind of target, place of an output, its name and the measure.
    """
    facts = facts_of(target)
    kind, columns = str(facts["name"]), list(facts["columns"])
    found: Sums = {}
    for at, output in enumerate(outputs):
        place = columns.index(output) if output in columns else 0
        true = values[:, place] if output in columns else values
        own = TARGETS[kind].measured(scores[:, at].double(), true.double())
        found |= {f"{kind}.{at}.{output}.{name}": value for name, value in own.items()}
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
        The number of records, and the metrics of the kind of target that the records determine.

    Example:
        >>> sums = {"records": 2.0, "absolute": 2.0, "squared": 2.0, "value": 0.0, "energy": 8.0}
        >>> metrics_of({f"number.0.age.{name}": value for name, value in sums.items()})
        {'age': {'records': 2.0, 'mae': 1.0, 'rmse': 1.0, 'r2': 0.75}}
    """
    by_output: dict[tuple[str, str], Sums] = {}
    for name, value in sums.items():
        match = NAME.fullmatch(name)
        if match is not None and match[1] in TARGETS:
            by_output.setdefault((match[1], match[3]), {})[match[4]] = value
    return {output: _metrics(TARGETS[kind], own) for (kind, output), own in by_output.items()}


def _metrics(kind: Kind, own: Mapping[str, float]) -> dict[str, float]:
    records = own.get("records", 0.0)
    if not records > 0:
        return {"records": 0.0}
    try:
        return {"records": records, **kind.metrics(own)}
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):
        return {"records": records}
