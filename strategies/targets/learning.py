"""A model of a target from coded sums: one function a kind of target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.targets.time import Time
from fedsurrogate.strategies.targets.checks import (
    check_capped,
    check_cells,
    check_finite,
    check_labels,
    check_numbers,
)
from fedsurrogate.strategies.targets.labels import Annotated, label_heads
from fedsurrogate.strategies.targets.number import number_head
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.survival import Cells, kaplan_meier
from fedsurrogate.strategies.targets.time import RiskHead, cells_of, risk_head


@dataclass(frozen=True)
class Answering:
    """A linear model of a target.

    Attributes:
        outputs: names of what it answers, o.
        weight: (o, d).
        bias: (o,).
        public: what a model says of it besides the target's own facts, as values of JSON.
        facts: for the run's result.
    """

    outputs: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    public: Mapping[str, object]
    facts: Mapping[str, str | float]


# A column whose deviation is this share of the largest one is constant but for rounding.
CONSTANT = 1e-6
Fit = Callable[[CodedSums, Target], Answering]


def learned(sums: CodedSums, header: Header, target: Target) -> tuple[Head, dict[str, str | float]]:
    """The model whose strength is found from the sums.

    Args:
        sums: of all records.
        header: of the coordinator.
        target: of the run.

    Returns:
        The head, and facts for the run's result.

    Raises:
        RunError: where nothing can be learned.
    """
    fit = FITS[target.name]
    if not header.frame or sums.noise is not None:
        return head_of(fit(sums, target), header, target)
    factor = column_factors(sums)
    made = fit(sums.rescaled(factor), target)
    return head_of(replace(made, weight=made.weight * factor), header, target)


def column_factors(sums: CodedSums) -> Tensor:
    """What makes the columns of a table alike, for exact sums in a frame: public ranges say how far
    values can lie, not how far they do, and a ridge takes weight from narrow columns.

    Args:
        sums: without noise.

    Returns:
        One over the deviation of each column, (d,); one for a constant one.
    """
    deviation = sums.covariance.diagonal().clamp_min(0).sqrt()
    varies = deviation > CONSTANT * deviation.max()
    return torch.where(varies, 1 / deviation.clamp_min(1e-300), 1.0)


def head_of(made: Answering, header: Header, target: Target) -> tuple[Head, dict[str, str | float]]:
    """The model of a target, and facts for the run's result.

    Args:
        made: what it answers.
        header: of the coordinator.
        target: of the run.

    Raises:
        RunError: for numbers that are not finite.
    """
    if not (made.weight.isfinite().all() and made.bias.isfinite().all()):
        raise RunError("the sums of this run give no finite model; leave out sites with --without")
    public = json.dumps({**target.public, **made.public}, sort_keys=True)
    named = replace(header, classes=made.outputs)
    head = Head(named, made.weight.float(), made.bias.float(), target=public)
    return head, {**target.choices, **made.facts}


def _number(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Number)
    low, high = zip(*target.ranges, strict=True)
    head = number_head(sums, low, high)
    facts = {
        f"explained-{name}": share
        for name, share in zip(target.columns, head.explained.tolist(), strict=True)
    }
    return Answering(
        target.outputs, head.weight, head.bias, {"deviation": head.deviation.tolist()}, facts
    )


def _labels(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Labels)
    annotated = annotated_of(sums, target)
    moments = sums.moments() if sums.groups else None
    heads = label_heads(sums, annotated, target.columns, moments, calibrated=True)
    public = {"prevalence": heads.prevalence.tolist(), "left-out": dict(heads.left_out)}
    facts = {"labels": float(len(heads.labels)), "labels-left-out": float(len(heads.left_out))}
    return Answering(heads.labels, heads.weight, heads.bias, public, facts)


def annotated_of(sums: CodedSums, target: Labels) -> Annotated:
    """Sums over the records that are annotated for each label, from either code."""
    if target.capped:
        return Annotated.capped(sums, target.members, target.set_entry)
    return Annotated.exact(sums, len(target.columns))


def _time(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Time)
    head = risk_head(sums)
    made = risks(head, cells_of(sums), target)
    # Of the risk between records, for thirds that are known in public.
    spread = max(0.0, float(head.weight @ sums.covariance @ head.weight)) ** 0.5
    return replace(made, public={**made.public, "spread": spread})


def risks(head: RiskHead, cells: Cells, target: Time) -> Answering:
    """A model of risks, which also has the survival of all records.

    Args:
        head: calibrated.
        cells: of all records.
        target: of the run.
    """
    curve = kaplan_meier(cells)
    public = {
        "hazard": head.hazard.tolist(),
        "survival": [
            [round(each, 6) for each in part.tolist()]
            for part in (curve.survival, curve.low, curve.high)
        ],
    }
    facts = {"events": float(cells.events.sum())}
    bias = -(head.mean @ head.weight)[None]
    return Answering(target.outputs, head.weight[None], bias, public, facts)


def check_sums(sums: CodedSums, target: Target, largest: float = math.inf) -> None:
    """Check that some records of the target can have these sums, all statistics together.

    Args:
        sums: of a site, or of all.
        target: of the run.
        largest: norm of a record's features; 1 for clipped ones.

    Raises:
        SurrogateError: if none can.
    """
    CHECKS.get(target.name, _check_finite)(sums, target, largest)


def _check_finite(sums: CodedSums, target: Target, largest: float) -> None:
    check_finite(sums)


def _check_labels(sums: CodedSums, target: Target, largest: float) -> None:
    assert isinstance(target, Labels)
    if target.capped:
        check_capped(sums, target.members, target.set_entry, largest)
    else:
        check_labels(sums, len(target.outputs), largest)


# By kind of target: its head, and what its sums cannot be.
FITS: dict[str, Fit] = {"number": _number, "labels": _labels, "time": _time}
CHECKS: dict[str, Callable[[CodedSums, Target, float], None]] = {
    "number": lambda sums, target, largest: check_numbers(sums, largest),
    "labels": _check_labels,
    "time": lambda sums, target, largest: check_cells(sums, largest),
}
