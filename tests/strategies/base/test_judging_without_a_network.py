"""What sites and a simulation report of a model, who is asked, and what is recorded of it, without a network."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.metrics import METRIC_VALUES
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.strategies.base import federation
from fedsurrogate.strategies.base.outcome import NO_REPLY, Points, Site, metric_values_in
from fedsurrogate.strategies.fedavg import Updates
from tests.strategies.base.test_courses_of_a_run import Kept
from tests.strategies.base.test_one_round_without_a_network import Held

MODEL = Head(Header("fedavg", "r", "c", "f", ("a", "b")), torch.eye(2), torch.zeros(2))
NUMBER: dict[str, Any] = {"task": "regression", "target-range": "0,1"}


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


REPORT = st.one_of(
    st.none(),
    st.just(SurrogateError("broken")),
    st.builds(dict, correct=st.integers(0, 6), tested=st.integers(0, 6)),
    st.just(
        {
            METRIC_VALUES: json.dumps(
                {"regression.0.age.records": 3.0, "regression.0.age.absolute": 2.0}
            ),
            "correct": 1,
            "tested": 3,
        }
    ),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(REPORT, min_size=1, max_size=5), st.booleans())
def test_the_accuracy_is_of_all_test_records_of_sites_with_a_valid_report(
    reports: list[Any], target: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        strategy = begun(patch, len(reports) + 1, **(NUMBER if target else {}))
        strategy.outcome.sites[len(reports)].fate = "dropped"
        for site in strategy.outcome.sites.values():
            site.correct, site.tested = (2, 4) if site.fate == "used" else (0, 0)
        replies: Any = [(at, own) for at, own in enumerate(reports) if own is not None]
        found = strategy._judge(replies)
    wanted: list[dict[str, Any]] = []
    correct = tested = 0
    for at, own in replies:
        site = {"site": f"s{at}"}
        if isinstance(own, SurrogateError):
            wanted.append({"event": "evaluation-failed", **site, "reason": "broken"})
            continue
        if own["correct"] > own["tested"]:
            reason = f"{own['correct']} correct predictions reported for only {own['tested']} test records"
            wanted.append({"event": "evaluation-failed", **site, "reason": reason})
            continue
        correct, tested = correct + own["correct"], tested + own["tested"]
        kept = strategy.outcome.sites[at]
        assert (kept.correct, kept.tested) == (own["correct"], own["tested"])
        if METRIC_VALUES in own:
            metric_values = {"age": {"records": 3.0}}
            wanted.append(
                {"event": "evaluated", **site, "tested": 3, "metric_values": metric_values}
            )
            assert kept.measured == {
                "regression.0.age.records": 3.0,
                "regression.0.age.absolute": 2.0,
            }
        elif own["tested"]:
            share = own["correct"] / own["tested"]
            wanted.append(
                {"event": "evaluated", **site, "accuracy": share, "tested": own["tested"]}
            )
    silent = [at for at, own in enumerate(reports) if own is None]
    wanted += [
        {"event": "evaluation-failed", "site": f"s{at}", "reason": NO_REPLY} for at in silent
    ]
    assert events(strategy) == wanted
    assert found == (correct / tested if tested and not target else None)
    for at, own in enumerate(reports):
        if own is None or isinstance(own, SurrogateError):
            assert strategy.outcome.sites[at].tested == 0


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


def test_sites_judge_before_the_simulation_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, calls = begun(monkeypatch), list[Any]()
    monkeypatch.setattr(strategy, "_broadcast", lambda: ["message"])
    monkeypatch.setattr(federation, "Collection", lambda *given: given)
    monkeypatch.setattr(strategy, "_judge", lambda replies: calls.append(("judge", replies)) or 0.5)
    monkeypatch.setattr(strategy, "_compare", lambda *given: calls.append(("compare", *given)))
    grid: Any = object()
    assert strategy.evaluate(grid, 7.0) == 0.5
    assert calls == [("judge", (grid, ["message"], 7.0)), ("compare", grid, 7.0)]
    assert 0 <= strategy.outcome.seconds["evaluate"] < 5


@pytest.mark.parametrize("replies", [[], [("r", {"accuracy.model": 0.5})]])
def test_the_first_used_site_judges_for_the_simulation(
    monkeypatch: pytest.MonkeyPatch, replies: list[Any]
) -> None:
    strategy, asked = begun(monkeypatch), list[Any]()
    strategy.outcome.sites[0].fate = "dropped"
    for site in strategy.outcome.sites.values():
        site.simulated = True

    def collection(grid: Any, messages: Any, deadline: float) -> Any:
        (message,) = messages
        info = dict(message.content.config_records[INFO])
        asked.append((message.metadata.dst_node_id, message.metadata.message_type, info, deadline))
        return replies

    monkeypatch.setattr(federation, "Collection", collection)
    grid: Any = object()
    values: Any = {"x": 1}
    if replies:
        assert strategy._judged(grid, 3.0, values) == {"accuracy.model": 0.5}
    else:
        with pytest.raises(SurrogateError, match=NO_REPLY):
            strategy._judged(grid, 3.0, values)
        assert strategy._accuracy(grid) is None
        strategy._compare(grid, 3.0)
        failed = {"event": "comparison-failed", "reason": NO_REPLY}
        assert events(strategy) == [failed, failed]
    size = len(pack_classifier(MODEL))
    assert asked[0] == (1, federation.COMPARE, {"x": 1, "bytes": size}, 3.0)


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


@pytest.mark.parametrize("number", [None, 1, 3])
@pytest.mark.parametrize("named", [False, True])
def test_only_the_start_of_a_run_waits_for_all_sites_and_says_what_is_not_defended(
    monkeypatch: pytest.MonkeyPatch, number: int | None, named: bool
) -> None:
    strategy, asked = begun(monkeypatch, 3, sites=5, quorum=0.4), list[Any]()
    names = {0: "s0"}
    strategy.registered = SimpleNamespace(names=lambda: names) if named else None  # type: ignore[assignment]

    def connected(grid: Any, *given: Any) -> list[int]:
        asked.append(given)
        return [0, 1, 2]

    def admit(outcome: Any, recorder: Any, nodes: Any, table: Any, given: Any) -> list[int]:
        assert (nodes, table, given) == ([0, 1, 2], names if named else None, number)
        return [0, 2]

    monkeypatch.setattr(federation, "connected_nodes", connected)
    monkeypatch.setattr(federation, "admit", admit)
    monkeypatch.setattr(type(strategy.config), "gaps", lambda self, sites: [f"{sites} a", "b"])
    assert strategy.invite(None, 7.0, number) == [0, 2]  # type: ignore[arg-type]
    ((sites, quorum, deadline, _, table),) = asked
    assert (sites, quorum) == ((5, 0.4) if number is None else (0, 0.0))
    assert deadline == 7.0
    assert (table is not None) == named
    how = "registered" if named else "claimed"
    start: list[dict[str, Any]] = [{"event": "invited", "site": f"s{at}"} for at in (0, 2) if named]
    start += [{"event": "invited", "sites": 2, "names": how}]
    start += [{"event": "note", "reason": reason} for reason in ("2 a", "b")]
    assert events(strategy) == (start if number is None else [])
    assert strategy.outcome.names == (how if number is None else "")


@pytest.mark.parametrize("text", [9000 * "[", "{", "[]", "3", '{"a": "b"}', '{"a": NaN}', "null"])
def test_measures_that_cannot_be_read_are_none(text: str) -> None:
    whole = {"regression.0.age.records": 3.0, "no metric": 1.0, "regression.0.age.absolute": 2}
    assert metric_values_in({METRIC_VALUES: json.dumps(whole)}) == {
        "regression.0.age.records": 3.0,
        "regression.0.age.absolute": 2.0,
    }
    assert metric_values_in({METRIC_VALUES: text}) == metric_values_in({}) == {}
