"""What a model of a target answers: its scores, with the facts that it carries, as numbers for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from common.errors import SurrogateError

Facts = Mapping[str, Any]
# Of the JSON text, in characters.
LONGEST = 2**16
# 95 % of a normal distribution lie within so many deviations.
WITHIN = 1.959963984540054


def facts_of(target: str) -> Facts:
    """The facts that a model carries about its target; empty for a model of classes."""
    found: Facts = json.loads(target) if target else {}
    return found


def answers_of(target: str, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """What a model says of each record.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
        scores: (n, o).

    Returns:
        Columns by name, (n,) each, float64.
    """
    facts = facts_of(target)
    return ANSWERS[facts["name"]](facts, outputs, scores.double())


def _number(facts: Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """Each number, and the interval that holds 95 % of new records."""
    found: dict[str, Tensor] = {}
    for at, name in enumerate(outputs):
        width = WITHIN * float(facts["deviation"][at])
        found |= {name: scores[:, at]}
        found |= {f"{name} low": scores[:, at] - width, f"{name} high": scores[:, at] + width}
    return found


def _labels(facts: Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """The probability of each label."""
    return dict(zip(outputs, scores.sigmoid().unbind(1), strict=True))


def _time(facts: Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """The risk, as a log hazard relative to a mean record, and survival at the end of each bin."""
    risk = scores[:, 0]
    hazard = torch.tensor(facts["hazard"], dtype=torch.float64).cumsum(0)
    survival = (-hazard * risk.exp()[:, None]).exp()
    named = {f"survival {edge:g}": survival[:, at] for at, edge in enumerate(facts["edges"][1:])}
    return {"risk": risk, **named}


ANSWERS: dict[str, Callable[[Facts, tuple[str, ...], Tensor], dict[str, Tensor]]] = {
    "number": _number,
    "labels": _labels,
    "time": _time,
}


def checked_target(target: str) -> str:
    """The text, if it holds what the answers of its kind of target need.

    Args:
        target: of a model that was received; empty for classes.

    Raises:
        SurrogateError: for another text.
    """
    if not target:
        return ""
    try:
        if len(target) > LONGEST:
            raise ValueError(f"{len(target)} characters, {LONGEST} at most")
        facts = json.loads(target)
        _check(facts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SurrogateError(f"a model whose target cannot be read ({str(error)[:100]})") from None
    return target


def _check(facts: Any) -> None:
    """Raise ValueError, KeyError or TypeError for facts that no model has."""
    if not isinstance(facts, dict) or facts["name"] not in ANSWERS:
        raise ValueError("no known kind of target")
    for key in ("deviation", "prevalence", "hazard", "edges"):
        numbers = facts.get(key, [])
        if (
            not isinstance(numbers, list)
            or not torch.tensor(numbers, dtype=torch.float64).isfinite().all()
        ):
            raise ValueError(f"{key} is no list of numbers")
    if facts["name"] == "time" and len(facts["hazard"]) + 1 != len(facts["edges"]):
        raise ValueError("other numbers of bins and hazards")
    if facts["name"] == "number" and not isinstance(facts["deviation"], list):
        raise ValueError("no deviations")
