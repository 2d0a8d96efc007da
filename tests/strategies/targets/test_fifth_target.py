"""A fifth target, numbers of events, takes a file of the target, a head, and a line for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.common.escapes import ranges
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.common.targets.target import Answering, Facts, Kind, Target
from fedsurrogate.strategies.targets import strategy
from fedsurrogate.strategies.targets.number import number_head
from fedsurrogate.strategies.targets.sums import CodedSums


# The file in common/targets/.
@dataclass(frozen=True)
class Events(Number):
    """Numbers of events, of which the logarithm is linear in the features."""

    name = "events"

    def code(self, values: Tensor) -> Tensor:
        return super().code(values.log1p())


def make(settings: Settings) -> Target:
    return Events(settings.value_columns, ranges(settings.target_range))


def answers(facts: Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    return dict(zip(outputs, scores.exp().sub(1).clamp_min(0).unbind(1), strict=True))


def measured(scores: Tensor, true: Tensor) -> dict[str, float]:
    error = (scores.exp() - 1 - true).abs().sum()
    return {"records": float(len(true)), "absolute": float(error)}


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
    return {"mae": sums["absolute"] / sums["records"]}


EVENTS = Kind(
    "events",
    ("target_range", "value_columns"),
    make,
    answers,
    measured,
    metrics,
    score="mae",
    columns=("value_columns", "events"),
)


# The head in strategies/targets/.
def head(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Events)
    low, high = zip(*target.ranges, strict=True)
    found = number_head(sums, low, high)
    return Answering(target.outputs, found.weight, found.bias)


@pytest.fixture
def with_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, EVENTS.name, EVENTS)
    monkeypatch.setitem(strategy.FITS, EVENTS.name, head)


@pytest.mark.usefixtures("with_events")
@pytest.mark.parametrize(
    "more", [{}, {"secure_aggregation": True, "dropouts": 0.0}, {"epsilon": 8.0, "delta": 1e-5}]
)
def test_a_fifth_target_runs_in_every_way(more: dict[str, Any], tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sites = []
    for _ in range(3):
        x = draw.normal(size=(400, 3)) * 0.5
        sites.append((x, draw.poisson(np.exp(1 + x[:, 0]))))
    run = fs.simulate(sites, task="events", target_range=(0, 4), output_dir=tmp_path, **more)
    found = run.metrics["metric_values"]["all"]["events"]
    usual = np.mean([np.abs(y - y.mean()).mean() for _, y in sites])
    assert found["mae"] < usual
    assert json.loads(target_of_model(run.model.classifier))["name"] == "events"
    assert run.model.predict(sites[0][0]).min() >= 0
