"""What a model of a target answers: its scores, with the facts that it carries, as numbers for people."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..errors import SurrogateError
from ..identity import distinct_names
from ..models.classifiers import alone
from .registry import TARGETS
from .target import Facts

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
    """The facts that a model carries about its target; empty for a model of classes."""
    found: Facts = json.loads(target) if target else {}
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
        _check(json.loads(target), outputs)
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
