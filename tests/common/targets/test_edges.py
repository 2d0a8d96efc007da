"""Targets where records, groups or answers are missing, and at the last value that a setting may have:
the sums of courses, merged cells, hazard ratios, edges of bins, and what a model says of itself.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.targets import counted
from fedsurrogate.common.targets.counted import CountedTimes
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.metrics import (
    answer_columns,
    answers_of,
    checked_target,
    facts_of,
    measured,
    metrics_of,
)
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.target import sums_of_counts
from fedsurrogate.common.targets.time import (
    Scored,
    Time,
    merged_cells,
    merged_places,
    residual_course,
    scored,
    usual_edges,
    widening_edges,
)
from fedsurrogate.common.terms import Term

few = settings(max_examples=60, deadline=None)


def tuples(sums: tuple[Term, ...] | None) -> list[tuple[Any, ...]]:
    """Name, shape, degree, bound, share, whole."""
    return [
        (each.name, each.shape, each.degree, each.bound, each.share, each.whole)
        for each in sums or ()
    ]


@few
@given(st.floats(0.5, 9), st.booleans(), st.booleans())
def test_the_sums_of_a_counting_code_are_these(bound: float, private: bool, blocks: bool) -> None:
    shares = (0.1, 0.2, 0.7)
    coded = [
        ("code", "C", 0, bound, 0.1, True),
        ("sums", "C d", 1, bound, 0.2, False),
        ("squares", "B T" if blocks else "T", 2, 1.0, 0.7, False),
    ]
    plain = [
        ("records", "B" if blocks else "1", 0, 1.0, 0.0, True),
        ("totals", "B d" if blocks else "d", 1, 1.0, 0.0, False),
    ]
    found = tuples(sums_of_counts(bound, private, shares, blocks))
    assert found == (coded if private else plain + coded)
    usual = [each.share for each in sums_of_counts(bound, True)]
    assert usual == [0.03, 0.55, 0.42]


@pytest.mark.parametrize("private", [False, True])
def test_the_rounds_of_times_send_these_sums(private: bool) -> None:
    found = residual_course(private)
    exact = [("records", "1", 0, 1.0, 0.0, True)]
    shared = [("totals", "d", 1, 1.0, 0.08, False)]
    code = [("code", "1", 0, 1.0, 0.0, False)]
    rest = [("sums", "1 d", 1, 1.0, 0.45, False), ("squares", "T", 2, 1.0, 0.42, False)]
    assert tuples(found.each) == (shared + rest if private else exact + shared + code + rest)
    assert tuples(found.first) == [("code", "C", 0, 1.0, 1.0, True)]
    assert (found.rounds, found.first_share) == (2, 0.05)
    assert found.receives == (("values", "C"),)
    numbers = Number(("a", "b"), ((0.0, 1.0),) * 2).statistics(private)
    assert tuples(numbers) == [
        ("records", "1", 0, 1.0, 0.03, True), ("totals", "d", 1, 1.0, 0.10, False),
        ("code", "C", 0, math.sqrt(2), 0.06, False), ("sums", "C d", 1, math.sqrt(2), 0.38, False),
        ("squares", "T", 2, 1.0, 0.40, False), ("products", "P", 0, 2.0, 0.03, False),
    ]  # fmt: skip


# Cells with few records.


@few
@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 6))
def test_merged_places_have_no_records_or_enough_and_merge_neighbours_only(
    counts: list[int], least: int
) -> None:
    found = merged_places(counts, least)
    assert len(found) == len(counts)
    if sum(counts) < least:
        assert found == [-1 if sum(counts) else place for place in range(len(counts))]
        return
    sums: dict[int, int] = {}
    for place, count in zip(found, counts, strict=True):
        assert 0 <= place < len(counts)
        sums[place] = sums.get(place, 0) + count
    assert all(not size or size >= least for size in sums.values())
    assert found == sorted(found)
    # A run ends as soon as it has enough, and is counted in the middle of its places with records.
    runs, start, size = [], 0, 0
    for place, count in enumerate(counts):
        size += count
        if size >= least:
            runs.append([start, place + 1])
            start, size = place + 1, 0
    runs[-1][1] = len(counts)
    for first, last in runs:
        held = [place for place in range(first, last) if counts[place]]
        middle = held[(len(held) - 1) // 2]
        assert found[first:last] == [middle] * (last - first)


@few
@given(st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(1, 5))
def test_events_and_others_are_merged_apart(counts: list[int], least: int) -> None:
    found = merged_cells(torch.tensor(counts), least).tolist()
    events = merged_places(counts[:2], least)
    others = [each + 2 if each >= 0 else -1 for each in merged_places(counts[2:], least)]
    assert found == events + others


# Bins.


@few
@given(st.floats(0.1, 1e4), st.integers(1, 40), st.sampled_from([1.0, 1.5, 4.0, 20.0]))
def test_the_last_bin_is_so_many_times_as_wide_as_the_first(
    horizon: float, bins: int, ratio: float
) -> None:
    edges = widening_edges(horizon, bins, ratio)
    assert len(edges) == bins + 1
    assert (edges[0], edges[-1]) == (0.0, pytest.approx(horizon))
    step = ratio ** (1 / max(1, bins - 1))
    whole = sum(step**at for at in range(bins))
    for at in range(1, bins):
        exact = horizon * sum(step**below for below in range(at)) / whole
        assert edges[at] == pytest.approx(exact, rel=1e-9 if ratio == 1 else 6e-3)
        assert ratio == 1 or edges[at] == float(f"{edges[at]:.3g}")
    assert widening_edges(horizon, bins) == widening_edges(horizon, bins, 1.0)
    assert usual_edges(horizon, True) == widening_edges(horizon, 10, 4.0)
    assert usual_edges(horizon, False) == widening_edges(horizon, 20, 4.0)


@few
@given(st.lists(st.floats(0, 4), min_size=1, max_size=5), st.data())
def test_a_scored_time_has_the_value_of_its_cell(times: list[float], data: st.DataObject) -> None:
    usual = Time(("t", "e"), (0.0, 1.0, 3.0), "years", "residuals")
    values = torch.tensor(data.draw(st.lists(st.floats(-3, 3), min_size=5, max_size=5)))
    found = scored(usual, values)
    rows = torch.tensor([[each, float(data.draw(st.booleans()))] for each in times])
    wanted = [[min(max(float(values[cell]), -1.0), 1.0)] for cell in usual.cells(rows).tolist()]
    assert found.code(rows).tolist() == [[pytest.approx(each[0], abs=1e-6)] for each in wanted]
    assert isinstance(found, Scored)
    assert (found.rows, found.counts, found.divides) == (("value",), False, False)
    assert (found.edges, found.unit, found.head) == (usual.edges, "years", "residuals")


# Metrics of records that do not determine all of them.


@few
@given(st.lists(st.sampled_from([0.0, 1.0, math.nan]), max_size=5), st.integers(0, 9))
def test_labels_of_one_kind_have_no_area_and_all_else(true: list[float], seed: int) -> None:
    scores = torch.randn(len(true), 1, generator=torch.Generator().manual_seed(seed)).double()
    text = json.dumps({"name": "multilabel", "columns": ["x"]})
    own = measured(text, ("x",), scores, torch.tensor(true).reshape(-1, 1))
    found = metrics_of(own)["x"]
    known = [each for each in true if not math.isnan(each)]
    assert found["records"] == len(known)
    both = 0 < sum(known) < len(known)
    wanted = {"records"} | ({"positive", "brier"} if known else set())
    assert set(found) == wanted | ({"auroc"} if both else set())
    if known:
        assert found["positive"] == sum(known)


@few
@given(st.integers(1, 200), st.floats(-1e6, 1e6), st.integers(0, 9))
@example(100, 102.36432494005135, 0)
def test_equal_numbers_have_errors_and_no_share_that_is_explained(
    count: int, value: float, seed: int
) -> None:
    scores = torch.randn(count, 1, generator=torch.Generator().manual_seed(seed)).double()
    text = json.dumps({"name": "regression", "columns": ["x"]})
    true = torch.full((count, 1), value, dtype=torch.float64)
    found = metrics_of(measured(text, ("x",), scores, true))["x"]
    error = scores - true
    assert found.pop("records") == count
    assert found == pytest.approx(
        {"mae": float(error.abs().mean()), "rmse": float(error.square().mean().sqrt())}
    )
    sums = {"records": 2.0, "absolute": 1.0, "squared": 1.0, "value": 4.0, "energy": 8.0}
    assert set(metrics_of({f"regression.0.x.{key}": each for key, each in sums.items()})["x"]) == {
        "records", "mae", "rmse",
    }  # fmt: skip


# What a model says.


@few
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4), st.floats(-2, 2), st.booleans())
def test_survival_of_levels_is_the_product_of_what_is_left_of_each_bin(
    steps: list[float], risk: float, levels: bool
) -> None:
    steps = steps if levels else [abs(each) for each in steps]
    edges = [0.0, *(float(at + 1) for at in range(len(steps)))]
    facts = {"name": "survival", "columns": ["t", "e"], "edges": edges}
    facts |= {"levels": steps} if levels else {"hazard": steps}
    # In single precision, as heads give it.
    scores = torch.tensor([[risk], [0.0]])
    risk = float(scores[0])
    found = answers_of(json.dumps(facts), ("risk",), scores)
    assert list(found) == ["risk", *(f"survival {edge:g}" for edge in edges[1:])]
    for at in (0, 1):
        own, left = (risk, 0.0)[at], 1.0
        for step, edge in zip(steps, edges[1:], strict=True):
            left *= 1 / (1 + math.exp(step + own)) if levels else math.exp(-step * math.exp(own))
            assert float(found[f"survival {edge:g}"][at]) == pytest.approx(left, rel=1e-9)
    assert answer_columns(json.dumps(facts), ("risk",)) == tuple(found)
    assert answer_columns("", ("a", "b")) == ("a", "b")
    assert facts_of("") == {}


@pytest.mark.parametrize(
    "text",
    [
        "{", "3", "[]", "null", '"multilabel"', "{}", '{"name": "multilabel"}', '{"name": "other", "columns": []}',
        "[" * 20_000,
        '{"name": "multilabel", "columns": 3}', '{"name": "multilabel", "columns": [3]}',
        '{"name": ["multilabel"], "columns": []}',
        '{"name": "regression", "columns": ["a"], "deviation": [1e999]}',
        '{"name": "regression", "columns": ["a"], "deviation": []}',
        '{"name": "regression", "columns": ["a"], "deviation": 3}',
        '{"name": "regression", "columns": ["a"], "deviation": ["x"]}',
        '{"name": "survival", "columns": ["a"]}', '{"name": "survival", "columns": ["a"], "hazard": [1], "edges": [0]}',
        '{"name": "survival", "columns": ["a"], "hazard": [[1]], "edges": [0, 1]}',
        '{"name": "survival", "columns": ["a"], "hazard": [-800], "edges": [0, 1]}',
        '{"name": "survival", "columns": ["a"], "hazard": [1], "edges": [0, {}]}',
        '{"name": "regression", "columns": ["a"], "deviation": [' + "9" * 400 + "]}",
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_facts_that_no_model_has_are_refused_in_one_way(text: str) -> None:
    with pytest.raises(
        SurrogateError, match=r"a model whose target cannot be read|a column without a name"
    ):
        checked_target(text, ("a",))
    assert checked_target("", ("a",)) == ""


# What is counted.


@pytest.mark.parametrize("bins", [4, 5, 10, 11])
def test_labels_are_decided_where_two_bins_meet(bins: int) -> None:
    own = CountingSettings(bins=bins)
    if bins % 2:
        with pytest.raises(ConfigError, match=f"must be even; set {bins + 1}"):
            counted.counted(Labels(("a",)), own)
        return
    made = counted.counted(Labels(("a",)), own)
    assert made.table.shape == (1, 2, bins)
    values = torch.tensor([[1.0], [1.0], [0.0]]).double()
    added = made.judged({}, ("a",), torch.tensor([[-1e-9], [0.0], [0.0]]).double(), values)
    assert added[:, 0].sum(1).argmax(1).tolist() == [bins // 2 - 1, bins // 2, bins // 2]


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_risks_at_the_limits_are_in_the_middle_third(spread: float) -> None:
    made = CountedTimes(Time(("t", "e"), (0.0, 1.0)))
    cut = counted.THIRD * spread
    beyond = cut + 1e-9
    scores = torch.tensor([[-beyond], [-cut], [cut], [beyond]], dtype=torch.float64)
    added = made.judged({"spread": spread}, ("risk",), scores, torch.tensor([[0.5, 1.0]] * 4))
    assert added[:, 0].sum(2).argmax(1).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "sums",
    [
        {"value": 1e200}, {"value": -1e200}, {"records": 1e-320}, {"squared": -1.0}, {"absolute": None},
    ],
    ids=str,
)  # fmt: skip
def test_sums_without_a_metric_leave_the_number_of_records(sums: dict[str, float | None]) -> None:
    """A square that overflows, a root of less than zero, and a sum that is not there."""
    usual = {"records": 2.0, "absolute": 1.0, "squared": 1.0, "value": 4.0, "energy": 9.0}
    whole = {
        f"regression.0.x.{name}": each for name, each in (usual | sums).items() if each is not None
    }
    found = metrics_of(whole)["x"]
    records = sums.get("records", 2.0)
    assert found["records"] == records
    if records == 2.0:
        assert found == {"records": 2.0}


@few
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(3, 9),
)
def test_the_best_levels_of_training_are_the_hazards_of_the_curve(
    leaving: list[tuple[int, int]], outlived: int
) -> None:
    """A record that is last seen about an edge is at risk until there, in training as in the curve."""
    bins, edges = len(leaving), tuple(map(float, range(len(leaving) + 1)))
    counts = [each for each, _ in leaving] + [last for _, last in leaving] + [outlived]
    code = torch.eye(2 * bins + 1, dtype=torch.float64).repeat_interleave(torch.tensor(counts), 0)
    shares, left = [], sum(counts)
    for event, last in leaving:
        left -= last
        shares.append(event / left)
        left -= event
    best = torch.tensor(shares, dtype=torch.float64).logit().requires_grad_()
    losses = Time(("time", "event"), edges).objective().losses(best.expand(len(code), -1), code)
    (slope,) = torch.autograd.grad(losses.sum(), best)
    assert torch.allclose(slope, torch.zeros(bins, dtype=torch.float64), atol=1e-9)
