"""Metrics and manifest follow from configuration and outcome alone."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.server_app.runs.metrics import End, make_metrics, make_projection
from fedsurrogate.server_app.runs.writer import Start, make_manifest
from fedsurrogate.strategies.base.outcome import Outcome, Points, Site

HEADER = Header("fedpft", "r", "coordinator", "f" * 64, ("cat", "dog"))
HEAD = Head(HEADER, torch.zeros(2, 3), torch.zeros(2))
START = Start(42, datetime(2026, 1, 2, tzinfo=UTC), {"torch": "2"}, "abc")


def test_the_same_outcome_gives_the_same_metrics_and_is_left_as_it_was() -> None:
    outcome = Outcome(
        {1: Site("a", "used", "", 100, 10, 8, 6)},
        model=HEAD,
        accuracy={"model": 0.5},
        hops=[{"site": "a"}],
    )
    before = replace(outcome)
    first, again = (make_metrics(parse_run({}), outcome, End("ok", "", 2.0)) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    assert outcome == before
    assert first["rounds"] == [{"round": 1, "accuracy": 0.5, "bytes_up": 100, "seconds": 2.0}]
    assert first["hops"] == [{"site": "a"}]
    assert not {"failure", "stopped", "parameters", "downstream"} & set(first)


@pytest.mark.parametrize(("stopped", "epsilon"), [("", 8.0), ("the budget is spent", 3.5)])
def test_a_run_that_stopped_early_reports_the_epsilon_it_spent(
    stopped: str, epsilon: float
) -> None:
    config = parse_run({"method": "fedlap", "epsilon": 8.0, "delta": 1e-5, "classes": "cat,dog"})
    claim = config.mechanism
    assert claim is not None
    sites = {1: Site("a", "used", "", claim=replace(claim, epsilon=8.0))}
    outcome = Outcome(sites, rounds=[{"round": 1, "epsilon": 3.5}], stopped=stopped)
    assert make_metrics(config, outcome, End("ok"))["privacy"]["epsilon"] == epsilon


def test_a_picture_needs_a_model_and_points() -> None:
    points = {"synthetic": Points([0.0], [1.0], [0])}
    assert make_projection(Outcome(model=HEAD)) == make_projection(Outcome(points=points)) == {}
    assert set(make_projection(Outcome(model=HEAD, points=points))) == {"classes", "synthetic"}


def test_a_manifest_names_backbone_and_classes_once_there_is_a_model() -> None:
    flat = parse_run({}).settings.flat()
    early, late = make_manifest(flat, "run", START), make_manifest(flat, "run", START, HEAD)
    assert late == early | {"fingerprint": "f" * 64, "classes": ["cat", "dog"]}
    assert early["started"] == "2026-01-02T00:00:00+00:00"
