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
    check_cells,
    check_finite,
    check_labels,
    check_numbers,
)
from fedsurrogate.strategies.targets.labels import Annotated, label_heads, ridge_discriminant
from fedsurrogate.strategies.targets.number import number_head
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.survival import kaplan_meier
from fedsurrogate.strategies.targets.time import cells_of, risk_head


@dataclass(frozen=True)
class Answering:
    """A linear model of a target.

    Attributes:
        outputs: names of what it answers, o.
        weight: (o, d).
        bias: (o,).
        public: what a model says of it besides the target's own facts, as values of JSON.
        facts: numbers for the run's result.
    """

    outputs: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    public: Mapping[str, object]
    facts: Mapping[str, float]


Fit = Callable[[CodedSums, Target, float | None], Answering]


def learned(sums: CodedSums, header: Header, target: Target) -> tuple[Head, dict[str, float]]:
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
    return _head(FITS[target.name](sums, target, None), header, target)


def ridged(
    sums: CodedSums, header: Header, target: Target, ridge: float
) -> tuple[Head, dict[str, float]]:
    """The model of AFL: least squares with `afl.ridge`, as `learned` otherwise.

    Args:
        sums: as in `learned`, without noise.
        header: as in `learned`.
        target: as in `learned`.
        ridge: `afl.ridge`, added to the moment of all records.

    Raises:
        RunError: as in `learned`.
    """
    return _head(FITS[target.name](sums, target, ridge), header, target)


def _head(made: Answering, header: Header, target: Target) -> tuple[Head, dict[str, float]]:
    if not (made.weight.isfinite().all() and made.bias.isfinite().all()):
        raise RunError("the sums of this run give no finite model; leave out sites with --without")
    public = json.dumps({**target.public, **made.public}, sort_keys=True)
    named = replace(header, classes=made.outputs)
    head = Head(named, made.weight.float(), made.bias.float(), target=public)
    return head, dict(made.facts)


def _number(sums: CodedSums, target: Target, ridge: float | None) -> Answering:
    assert isinstance(target, Number)
    low, high = zip(*target.ranges, strict=True)
    strength = None if ridge is None else ridge / sums.records
    head = number_head(sums, low, high, strength)
    facts = {
        f"explained-{name}": share
        for name, share in zip(target.columns, head.explained.tolist(), strict=True)
    }
    return Answering(
        target.outputs, head.weight, head.bias, {"deviation": head.deviation.tolist()}, facts
    )


def _labels(sums: CodedSums, target: Target, ridge: float | None) -> Answering:
    assert isinstance(target, Labels)
    annotated = Annotated.exact(sums, len(target.columns))
    heads = label_heads(sums, annotated, target.columns)
    weight, bias = heads.weight, heads.bias
    if ridge is not None:
        places = [target.columns.index(name) for name in heads.labels]
        pairs = [
            ridge_discriminant(annotated, at, sums.covariance, ridge / sums.records)
            for at in places
        ]
        weight, bias = (torch.stack(list(each)) for each in zip(*pairs, strict=True))
    public = {"prevalence": heads.prevalence.tolist(), "left-out": dict(heads.left_out)}
    facts = {"labels": float(len(heads.labels)), "labels-left-out": float(len(heads.left_out))}
    return Answering(heads.labels, weight, bias, public, facts)


def _time(sums: CodedSums, target: Target, ridge: float | None) -> Answering:
    assert isinstance(target, Time)
    head, cells = risk_head(sums), cells_of(sums)
    curve = kaplan_meier(cells)
    public = {
        "hazard": head.hazard.tolist(),
        # Of the risk between records.
        "spread": max(0.0, float(head.weight @ sums.covariance @ head.weight)) ** 0.5,
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
    check_labels(sums, len(target.outputs), largest)


# By kind of target: its head, and what its sums cannot be.
FITS: dict[str, Fit] = {"number": _number, "labels": _labels, "time": _time}
CHECKS: dict[str, Callable[[CodedSums, Target, float], None]] = {
    "number": lambda sums, target, largest: check_numbers(sums, largest),
    "labels": _check_labels,
    "time": lambda sums, target, largest: check_cells(sums, largest),
}
