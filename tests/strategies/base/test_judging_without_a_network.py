"""What a simulation reports of a model, and measures that cannot be read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.metrics import METRIC_VALUES
from fedsurrogate.strategies.base import federation
from fedsurrogate.strategies.base.outcome import Points, Site, metric_values_in
from fedsurrogate.strategies.fedavg import Updates
from tests.strategies.base.test_courses_of_a_run import Kept

MODEL = Head(Header("fedavg", "r", "c", "f", ("a", "b")), torch.eye(2), torch.zeros(2))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("source", [False, True])
def test_a_comparison_has_shares_bytes_measures_and_points(
    monkeypatch: pytest.MonkeyPatch, measured: bool, source: bool
) -> None:
    strategy = Updates({"method": "fedavg", "seed": 11}, Kept())
    strategy.outcome.sites = {0: Site("s0", "used", "", simulated=True)}
    strategy.outcome.model = MODEL
    info: dict[str, Any] = {
        "accuracy.model": 0.5, "accuracy.centralized": 0.75, "accuracy.wrong": 1.5, "other.share": 0.25,
        "bytes.centralized": 40, "bytes.average": -3, "points.x": [1.0, 2.0], "points.y": [3.0, 4.0], "points.label": [0, 1],
    }  # fmt: skip
    if measured:
        info[METRIC_VALUES] = json.dumps({"regression.0.age.records": 3.0})
    drawn: list[Any] = []

    def sample(seed: int, limit: int) -> Any:
        drawn.append((seed, limit))
        return torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1, 0])

    if source:
        strategy.outcome.learned = SimpleNamespace(sample=sample)
    monkeypatch.setattr(strategy, "_judged", lambda *given: info)
    monkeypatch.setattr(Head, "plane", lambda self: torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    strategy._compare(None, 1.0)  # type: ignore[arg-type]
    assert isinstance(strategy.recorder, Kept)
    accuracy = {"model": 0.5, "centralized": 0.75}
    assert strategy.outcome.accuracy == accuracy
    assert strategy.outcome.compare_bytes == {"centralized": 40, "average": 0}
    assert (strategy.outcome.quality, strategy.outcome.data) == (None, [])
    if measured:
        assert strategy.outcome.measured == {"regression.0.age.records": 3.0}
        event = {"event": "compared", "metric_values": {"age": {"records": 3.0}}}
        assert (strategy.recorder.events, strategy.outcome.points) == ([event], {})
        return
    assert strategy.recorder.events == [{"event": "compared", **accuracy}]
    points = {"real": Points([1.0, 2.0], [3.0, 4.0], [0, 1])}
    if source:
        points["synthetic"] = Points([0.0, 2.0], [1.0, 0.0], [1, 0])
        assert drawn == [(11, federation.PICTURE_POINTS)]
    assert strategy.outcome.points == points


@pytest.mark.parametrize("text", [9000 * "[", "{", "[]", "3", '{"a": "b"}', '{"a": NaN}', "null"])
def test_measures_that_cannot_be_read_are_none(text: str) -> None:
    whole = {"regression.0.age.records": 3.0, "no metric": 1.0, "regression.0.age.absolute": 2}
    assert metric_values_in({METRIC_VALUES: json.dumps(whole)}) == {
        "regression.0.age.records": 3.0,
        "regression.0.age.absolute": 2.0,
    }
    assert metric_values_in({METRIC_VALUES: text}) == metric_values_in({}) == {}
