"""What sites and a simulation report of a model, and how long a run waits for sites, without a network."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.metrics import METRIC_VALUES
from fedsurrogate.strategies.base import federation
from fedsurrogate.strategies.base.outcome import NO_REPLY, Site, metric_values_in
from fedsurrogate.strategies.fedavg import Updates
from tests.strategies.base.test_courses_of_a_run import Kept

MODEL = Head(Header("fedavg", "r", "c", "f", ("a", "b")), torch.eye(2), torch.zeros(2))
NUMBER: dict[str, Any] = {"task": "regression", "target-range": "0,1"}


def begun(monkeypatch: pytest.MonkeyPatch, count: int = 3, **more: Any) -> Updates:
    strategy = Updates({"method": "fedavg"} | more, Kept())
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
@example([{"correct": 5, "tested": 4}], False)
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


@pytest.mark.parametrize("text", [9000 * "[", "{", "[]", "3", '{"a": "b"}', '{"a": NaN}', "null"])
def test_measures_that_cannot_be_read_are_none(text: str) -> None:
    whole = {"regression.0.age.records": 3.0, "no metric": 1.0, "regression.0.age.absolute": 2}
    assert metric_values_in({METRIC_VALUES: json.dumps(whole)}) == {
        "regression.0.age.records": 3.0,
        "regression.0.age.absolute": 2.0,
    }
    assert metric_values_in({METRIC_VALUES: text}) == metric_values_in({}) == {}


@pytest.mark.parametrize("number", [None, 3])
def test_only_the_start_of_a_run_waits_for_all_sites_and_says_what_is_not_defended(
    monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    strategy, asked = begun(monkeypatch, 2, sites=5, quorum=0.4), list[Any]()
    monkeypatch.setattr(
        federation, "connected_nodes", lambda grid, *given_: asked.append(given_[:3]) or [0, 1]
    )
    monkeypatch.setattr(federation, "admit", lambda outcome, recorder, nodes, *given_: nodes)
    assert strategy.invite(None, 7.0, number) == [0, 1]  # type: ignore[arg-type]
    assert asked == [(5, 0.4, 7.0) if number is None else (0, 0.0, 7.0)]
    start = [{"event": "invited", "sites": 2, "names": "claimed"}]
    start += [{"event": "note", "reason": reason} for reason in strategy.config.gaps(2)]
    assert len(start) > 1
    assert events(strategy) == (start if number is None else [])
