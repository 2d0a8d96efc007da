"""Answers to questions about a target, and sums of metrics over test records, as messages have
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SurrogateError
from ..identity import distinct_names
from ..models.classifiers import alone
from ..renamed import VALUES
from .registry import TARGETS
from .target import Facts, Kind

# Of the JSON text, in characters.
LONGEST = 2**16
# What facts of another shape, or with other numbers, raise.
UNFIT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


def facts_of(target: str) -> Facts:
    """The facts that a model carries about its target; empty for a model of classes. Models of 0.2.0
    have other names of the kinds.
    """
    found: Facts = json.loads(target) if target else {}
    if isinstance(found, dict) and isinstance(name := found.get("name"), str):
        found["name"] = VALUES["task"].get(name, name)
    return found


def answers_together(target: str, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """`answers_of` for all records in one step, whose last digits may depend on each other: for a
    graph that is exported.
    """
    facts = facts_of(target)
    return TARGETS[facts["name"]].answers(facts, outputs, scores.double())


def answers_of(target: str, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """What a model says of each record. The answers for a record depend on the scores of no other
    one, to the last digit: one of them may be a threshold.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
        scores: (n, o).

    Returns:
        Columns by name, (n,) each, float64.
    """
    rows = [answers_together(target, outputs, row) for row in alone(scores)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def answer_columns(target: str, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the columns that a model answers; its classes if it is one of classes.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
    """
    return tuple(answers_of(target, outputs, torch.zeros(0, len(outputs)))) if target else outputs


def checked_target(target: str, outputs: tuple[str, ...]) -> str:
    """The text, if a model with it can answer.

    Args:
        target: of a model that was received; empty for classes.
        outputs: names of the model's scores.

    Raises:
        SurrogateError: for another text.
    """
    if not target:
        return ""
    try:
        if len(target) > LONGEST:
            raise ValueError(f"{len(target)} characters, {LONGEST} at most")
        _check(facts_of(target), outputs)
    except UNFIT as error:
        raise SurrogateError(f"a model whose target cannot be read ({str(error)[:100]})") from None
    return target


def _check(facts: Any, outputs: tuple[str, ...]) -> None:
    """Raise one of UNFIT for facts that no model has: it answers for a record whose scores are zero."""
    if not isinstance(facts, dict) or facts["name"] not in TARGETS:
        raise ValueError("no known kind of target")
    distinct_names(facts["columns"], "column")
    zeros = torch.zeros(1, len(outputs), dtype=torch.float64)
    answers = TARGETS[facts["name"]].answers(facts, outputs, zeros)
    if not all(column.isfinite().all() for column in answers.values()):
        raise ValueError("numbers that are not finite")


# Name of the sums among the values of a message, and most characters of their text.
METRIC_VALUES, LONGEST_METRICS = "metric_values", 2**16
# "regression.0.age.absolute": of the first output.
NAME = re.compile(r"([a-z]+)\.(\d+)\.(.{1,200})\.([a-z]+)", re.DOTALL)
IN_WORDS = {
    "auroc": "AUROC",
    "brier": "Brier score",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "icc": "ICC",
    "concordance_ipcw": "concordance (IPCW)",
    "dynamic_auc": "dynamic AUC",
    "integrated_brier": "integrated Brier score",
    "sensitivity_at_specificity": "sensitivity at specificity 0.9",
}
# Metrics that are numbers of records, and those in the unit of a number.
COUNTS = ("records", "positive", "events")
QUARTILES = {"lower quartile": 0.25, "median": 0.5, "upper quartile": 0.75}
IN_UNIT = ("mae", "rmse", "bias", "agreement_low", "agreement_high", *QUARTILES)
Sums = dict[str, float]


def is_metric(name: object) -> bool:
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
        By kind of target, place of an output, its name and the metric.
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
        >>> metrics_of({f"regression.0.age.{name}": value for name, value in sums.items()})
        {'age': {'records': 2.0, 'mae': 1.0, 'rmse': 1.0, 'r2': 0.75}}
    """
    by_output: dict[tuple[int, str, str, str], Sums] = {}
    for name, value in sums.items():
        match = NAME.fullmatch(name)
        if match is not None and match[1] in TARGETS:
            key = (len(match[2]), match[2], match[1], match[3])
            by_output.setdefault(key, {})[match[4]] = value
    # Messages sort their names, by which the eleventh output stands after the second.
    return {
        output: _metrics(TARGETS[kind], own)
        for (*_, kind, output), own in sorted(by_output.items())
    }


def metric_text(name: str, value: float | None) -> str:
    """A metric as people read it: counts as whole numbers, others with three or four digits.

    Args:
        name: of the metric.
        value: None where the test records do not determine it.

    Example:
        >>> metric_text("records", 12345.0), metric_text("auroc", 1.0), metric_text("mae", 1e-4 / 3)
        ('12,345', '1.000', '3.333e-05')
        >>> metric_text("mae", 31415.9), metric_text("r2", None)
        ('31,416', '-')
    """
    if value is None:
        return "-"
    if name in COUNTS or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if name in IN_UNIT else f"{value:.3f}"


# Metrics that compare pairs of records.
OF_RANKS = ("auroc", "concordance")


def score_in_words(score: str, values: Sequence[float], within: bool = False) -> str:
    """The score of a model for a heading; empty where no output has one.

    Args:
        score: the metric of the kind of target.
        values: of its outputs.
        within: whether only records of one site were compared with each other.

    Example:
        >>> score_in_words("auroc", [0.5, 1.0]), score_in_words("r2", [0.25], within=True)
        ('a mean AUROC of 0.750 over 2 answers', 'R² 0.250')
        >>> score_in_words("auroc", [0.5], within=True)
        'AUROC within sites 0.500'
    """
    if not values:
        return ""
    mean, words = sum(values) / len(values), IN_WORDS.get(score, score)
    words += " within sites" * (within and score in OF_RANKS)
    if len(values) == 1:
        return f"{words} {mean:.3f}"
    return f"a mean {words} of {mean:.3f} over {len(values)} answers"


def _metrics(kind: Kind, own: Mapping[str, float]) -> dict[str, float]:
    records = own.get("records", 0.0)
    if not records > 0:
        return {"records": 0.0}
    try:
        return {"records": records, **kind.metrics(own)}
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):
        return {"records": records}
