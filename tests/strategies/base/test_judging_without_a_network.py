"""What sites and a simulation report of a model, who is asked, and what is recorded of it, without a network."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.metrics import METRIC_VALUES
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.strategies.base import federation
from fedsurrogate.strategies.base.outcome import Points, Site, metric_values_in
from fedsurrogate.strategies.fedavg import Updates
from tests.strategies.base.test_courses_of_a_run import Kept
from tests.strategies.base.test_one_round_without_a_network import Held

MODEL = Head(Header("fedavg", "r", "c", "f", ("a", "b")), torch.eye(2), torch.zeros(2))


def begun(monkeypatch: pytest.MonkeyPatch, count: int = 3, **more: Any) -> Updates:
    strategy = Updates({"method": "fedavg"} | more, Kept())
    strategy.receipts = Held([])  # type: ignore[assignment]
    strategy.outcome.sites = {at: Site(f"s{at}", "used", "") for at in range(count)}
    strategy.outcome.model = MODEL
    monkeypatch.setattr(strategy, "_node", lambda reply: reply[0])
    monkeypatch.setattr(strategy, "_read", lambda reply, site: (None, _info(reply)))
    return strategy


def _info(reply: Any) -> Any:
    if isinstance(reply[1], SurrogateError):
        raise reply[1]
    return reply[1]


def events(strategy: Updates) -> list[dict[str, Any]]:
    assert isinstance(strategy.recorder, Kept)
    return strategy.recorder.events


@pytest.mark.parametrize("how", ["signed", "unsigned", "broken"])
def test_used_sites_get_the_model_with_its_signature_if_it_has_one(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    strategy, asked = begun(monkeypatch), list[Any]()
    strategy.outcome.sites[1].fate = "dropped"

    def signer(outcome: Any) -> str:
        assert outcome is strategy.outcome
        if how == "broken":
            raise OSError("no room")
        return "signed model"

    strategy.signer = None if how == "unsigned" else signer  # type: ignore[assignment]
    monkeypatch.setattr(federation, "save_signed_model", lambda model: model.encode())
    monkeypatch.setattr(
        federation, "signed_values", lambda model: asked.append(model) or {"own": 1}
    )
    payload = pack_classifier(MODEL)
    messages = list(strategy._broadcast())
    values = {"bytes": len(payload)} | ({"own": 1} if how == "signed" else {})
    found = {
        each.metadata.dst_node_id: dict(each.content.config_records[INFO]) for each in messages
    }
    assert found == {0: values, 2: values}
    assert {each.metadata.message_type for each in messages} == {"evaluate"}
    assert len({each.metadata.group_id for each in messages}) == 2
    assert strategy.outcome.sites[0].bytes_down > len(payload)
    assert isinstance(strategy.recorder, Kept)
    kept = {"file model.fedsurrogate": b"signed model"} if how == "signed" else {}
    assert strategy.recorder.surrogates == kept
    failed = {"event": "model-not-signed", "reason": "no room"}
    assert events(strategy) == ([failed] if how == "broken" else [])


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("source", [False, True])
def test_a_comparison_has_shares_bytes_measures_and_points(
    monkeypatch: pytest.MonkeyPatch, measured: bool, source: bool
) -> None:
    strategy = begun(monkeypatch, 1, seed=11)
    strategy.outcome.sites[0].simulated = True
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
    accuracy = {"model": 0.5, "centralized": 0.75}
    assert strategy.outcome.accuracy == accuracy
    assert strategy.outcome.compare_bytes == {"centralized": 40, "average": 0}
    assert (strategy.outcome.quality, strategy.outcome.data) == (None, [])
    if measured:
        assert strategy.outcome.measured == {"regression.0.age.records": 3.0}
        event = {"event": "compared", "metric_values": {"age": {"records": 3.0}}}
        assert (events(strategy), strategy.outcome.points) == ([event], {})
        return
    assert events(strategy) == [{"event": "compared", **accuracy}]
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
