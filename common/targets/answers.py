"""What a model of a target answers: its scores, with the facts that it carries, as numbers for people."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from common.errors import SurrogateError
from common.targets import TARGETS
from common.targets.target import Facts

# Of the JSON text, in characters.
LONGEST = 2**16


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
    return TARGETS[facts["name"]].answers(facts, outputs, scores.double())


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
    if not isinstance(facts, dict) or facts["name"] not in TARGETS:
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
