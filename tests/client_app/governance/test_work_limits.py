"""Requests are counted over runs, hours and days, whatever their order; limits hold to the number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.client_app.governance import work_limits
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import PUBLIC_DATA
from fedsurrogate.client_app.governance.release import prepare
from fedsurrogate.client_app.governance.work_limits import (
    DAY,
    HOUR,
    REQUESTS_FILE,
    WorkLimits,
    admit,
    check_size,
    check_work,
)
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import PolicyError, StorageError
from fedsurrogate.common.run import Run, parse_run
from tests.registry import SPECS, settings_of

SAME_FOLDER = [HealthCheck.function_scoped_fixture]
# Runs that need different features.
RUNS = [parse_run({"image-size": size, "classes": "a,b"}) for size in (8, 9, 10)]


@dataclass(frozen=True)
class Event:
    """A request: how long after the one before, by which run, for which features."""

    after: float
    run: str
    features: int


EVENTS = st.lists(
    st.builds(
        Event,
        after=st.sampled_from([0.0, 1.0, 1799.0, 1800.0, HOUR - 1, HOUR, HOUR + 1, DAY - 1, DAY]),
        run=st.sampled_from("xyz"),
        features=st.integers(0, len(RUNS) - 1),
    ),
    max_size=25,
)
LIMITS = st.builds(
    WorkLimits,
    most_seconds=st.sampled_from([1.0, 1800.0, HOUR, DAY]),
    requests_per_run=st.integers(1, 6),
    requests_per_hour=st.integers(1, 4),
    extractions_per_day=st.integers(1, 3),
)


def expected(events: list[Event], limits: WorkLimits) -> Iterator[str]:
    """By request the limit that it exceeds, or nothing: from the list of all admitted requests."""
    admitted: list[tuple[float, Event]] = []
    now = 1e9
    for event in events:
        now += event.after
        own = [at for at, other in admitted if other.run == event.run]
        day = {other.features for at, other in admitted if now - at < DAY}
        if own and now - own[0] > limits.most_seconds:
            yield "most-seconds"
        elif len(own) + 1 > limits.requests_per_run:
            yield "requests-per-run"
        elif sum(now - at < HOUR for at, _ in admitted) + 1 > limits.requests_per_hour:
            yield "requests-per-hour"
        elif len(day | {event.features}) > limits.extractions_per_day:
            yield "extractions-per-day"
        else:
            admitted.append((now, event))
            yield ""


@settings(max_examples=60, suppress_health_check=SAME_FOLDER)
@given(events=EVENTS, limits=LIMITS)
def test_a_request_is_refused_exactly_where_all_earlier_ones_reach_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event], limits: WorkLimits
) -> None:
    node = NodeConfig(site="s", state_dir=str(tmp_path))
    (tmp_path / REQUESTS_FILE).unlink(missing_ok=True)
    now, found = 1e9, []
    for event in events:
        now += event.after
        monkeypatch.setattr(work_limits.time, "time", lambda now=now: now)
        try:
            admit(RUNS[event.features].settings, node, limits, event.run)
            found.append("")
        except PolicyError as error:
            found.append(str(error).partition(" ")[0])
    assert found == list(expected(events, limits))


@settings(max_examples=20, suppress_health_check=SAME_FOLDER)
@given(runs=st.lists(st.sampled_from("abcdef"), max_size=12))
def test_the_runs_that_began_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    monkeypatch.setattr(work_limits, "RUNS_KEPT", 3)
    file = tmp_path / REQUESTS_FILE
    file.unlink(missing_ok=True)
    began: dict[str, float] = {}
    for at, run in enumerate(runs):
        monkeypatch.setattr(work_limits.time, "time", lambda at=at: 1e9 + at)
        admit(RUNS[0].settings, NodeConfig(site="s", state_dir=str(tmp_path)), WorkLimits(), run)
        began.setdefault(run, at)
        began = dict(sorted(began.items(), key=lambda item: item[1])[-3:])
        assert json.loads(file.read_text())["runs"].keys() == began.keys()


WHOLE: dict[str, Any] = {"runs": {}, "requests": [], "extractions": {}}
PARTS: list[Any] = [None, 1, "a", [], {}]


@settings(max_examples=40, suppress_health_check=SAME_FOLDER)
@given(
    content=st.one_of(
        st.binary(max_size=20),
        st.fixed_dictionaries({}, optional={key: st.sampled_from(PARTS) for key in WHOLE}).map(
            lambda value: json.dumps(value).encode()
        ),
        st.sampled_from([json.dumps(WHOLE).encode()[:-1], b"[]", b"3", b'"runs"', b"null"]),
    )
)
def test_a_damaged_count_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / REQUESTS_FILE).write_bytes(content)
    admit(RUNS[0].settings, NodeConfig(site="s", state_dir=str(tmp_path)), WorkLimits(), "x")
    assert json.loads((tmp_path / REQUESTS_FILE).read_text())["runs"]["x"][1] == 1


def test_counts_that_cannot_be_written_stop_the_request(tmp_path: Path) -> None:
    (tmp_path / REQUESTS_FILE).mkdir()
    with pytest.raises(StorageError, match="nothing is done"):
        admit(RUNS[0].settings, NodeConfig(site="s", state_dir=str(tmp_path)), WorkLimits(), "x")


def asked(run: Run) -> dict[str, float]:
    """What a run needs, by the key of the limit."""
    work, settings = run.plan.work(len(run.settings.classes), 0), run.settings
    channels = {"pixels": 1, "pixels:rgb": 3}.get(settings.backbone, 0)
    return {
        "most_classes": len(settings.classes),
        "longest_class_name": max(map(len, settings.classes), default=0),
        "largest_image_size": settings.image_size,
        "largest_dimension": channels * settings.image_size**2,
        "most_rounds": work.rounds,
        "most_steps": work.steps,
        "most_passes": work.passes,
        "largest_width": work.width,
        "most_components": work.components,
        "largest_rank": work.rank,
        "most_synthetic": work.synthetic,
    }


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backbone", ["pixels", "pixels:rgb"])
def test_what_a_run_needs_is_allowed_and_one_less_is_not(name: str, backbone: str) -> None:
    chosen = settings_of(SPECS[name]) | {"backbone": backbone, "image-size": 8, "classes": "a,bc"}
    run = parse_run(chosen)
    needs = asked(run)
    exact = {key: max(1, value) for key, value in needs.items()}
    work = run.plan.work(2, 0)
    check_work(work, WorkLimits(**exact), run.settings)
    for key, value in needs.items():
        if value > 1:
            with pytest.raises(PolicyError, match=f"^{key.replace('_', '-')} = .*requests"):
                check_work(work, WorkLimits(**(exact | {key: value - 1})), run.settings)


@given(
    dimension=st.integers(1, 40),
    classes=st.integers(1, 5),
    limits=st.tuples(*[st.integers(1, 40)] * 2),
)
@settings(max_examples=40)
def test_the_size_of_features_is_limited_exactly(
    dimension: int, classes: int, limits: tuple[int, int]
) -> None:
    work = RUNS[0].plan.work(classes, dimension)
    allowed = WorkLimits(
        largest_dimension=limits[0],
        most_classes=limits[1],
        most_numbers=max(1, work.numbers),
        most_synthetic=max(1, work.synthetic),
    )
    if dimension > limits[0] or classes > limits[1]:
        with pytest.raises(PolicyError):
            check_size(work, allowed, dimension, classes)
        return
    check_size(work, allowed, dimension, classes)
    for key, value in (("most_numbers", work.numbers), ("most_synthetic", work.synthetic)):
        if value > 1:
            with pytest.raises(PolicyError, match=key.replace("_", "-")):
                check_size(work, allowed.model_copy(update={key: value - 1}), dimension, classes)


@pytest.mark.parametrize("named", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("own", [2, 3, 4])
def test_the_larger_number_of_classes_is_limited(tmp_path: Path, named: int, own: int) -> None:
    names = ["a", "b", "c", "d", "e"]
    labels = torch.arange(12) % own
    save_file(
        {"x": torch.eye(12, 6) + labels[:, None], "y": labels},
        tmp_path / "own.safetensors",
        {"classes": ",".join(names[:own]), "fingerprint": "f"},
    )
    run = parse_run({"classes": ",".join(names[:named]), "fedpft.covariance": "spherical"})
    places: dict[str, Any] = {"data": "safetensors", "data_dir": str(tmp_path)}
    node = NodeConfig(site="s", state_dir=str(tmp_path / "s"), cache_dir=str(tmp_path), **places)
    request = SiteRequest(run, node, "s", flower_run="1")
    # Where a run names classes, those are the site's.
    most = max(named, named or own)
    for limit in (most, most - 1):
        policy = PUBLIC_DATA.model_copy(update={"most_classes": limit})
        gate = Gate(policy, Ledger(tmp_path / "ledger", "a" * 16))
        if limit == most:
            assert prepare(request, gate).found.classes
        elif limit:
            with pytest.raises(
                PolicyError, match=f"most-classes = {limit}: the run requests {most}"
            ):
                prepare(request, gate)
