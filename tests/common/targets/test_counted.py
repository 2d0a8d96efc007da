"""What a record adds to a survey and to an evaluation of a target, record by record with plain loops,
and no more than the bound that the noise follows from.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.targets.counted import (
    PARTS,
    CountedLabels,
    CountedNumbers,
    CountedTarget,
    CountedTimes,
)
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.time import Time

few = settings(max_examples=60, deadline=None)
LABEL = st.sampled_from([0.0, 1.0, math.nan])
RANGES = ((0.0, 100.0), (-5.0, 5.0))
NUMBER = st.sampled_from([-300.0, -5.0, -4.999, 0.0, 2.5, 4.999, 5.0, 50.0, 99.9, 100.0, 1e4])
EDGES = (0.0, 1.0, 3.0)
TIMES = st.tuples(
    st.sampled_from([0.0, 0.5, 0.999, 1.0, 2.5, 3.0, 9.0]), st.sampled_from([0.0, 1.0])
)
NORMAL_THIRD = 0.430727


def within_bound(how: CountedTarget, added: torch.Tensor) -> None:
    assert added.shape[1:] == how.table.shape
    assert float(added.abs().max()) <= how.table.most
    norms = added.flatten(1).norm(dim=1)
    assert (
        float(norms.max()) <= how.table.bound <= how.table.most * math.sqrt(added[0].numel()) + 1e-6
    )


@few
@given(
    rows=st.lists(st.tuples(LABEL, LABEL), min_size=1, max_size=6),
    scores=st.lists(st.sampled_from([-99.0, -8.0, -4.0, -0.01, 0.0, 3.999, 4.0, 8.0, 99.0]), min_size=12, max_size=12),
    bins=st.sampled_from([2, 4, 16]),
    turned=st.booleans(),
)  # fmt: skip
def test_a_label_is_counted_by_its_answer_and_by_the_bin_of_its_log_odds(
    rows: list[tuple[float, float]], scores: list[float], bins: int, turned: bool
) -> None:
    how = CountedLabels(Labels(("a", "b")), bins)
    values = torch.tensor(rows, dtype=torch.float64)
    cell = {1.0: 0, 0.0: 1}
    assert how.cells(values).tolist() == [[cell.get(each, 2) for each in row] for row in rows]
    kind = {1.0: 1, 0.0: 0}
    assert how.kinds(values).tolist() == [[kind.get(each, -1) for each in row] for row in rows]
    assert how.rows == tuple(
        f"{name}: {answer}" for name in "ab" for answer in ("present", "absent", "not annotated")
    )
    assert how.bound == pytest.approx(2**0.5)
    assert how.bound >= 2**0.5
    outputs = ("b", "a") if turned else ("a", "b")
    table = torch.tensor(scores[: 2 * len(rows)], dtype=torch.float64).reshape(-1, 2)
    added = how.judged({}, outputs, table, values)
    for n, row in enumerate(rows):
        wanted = torch.zeros(2, 2, bins)
        for topic, name in enumerate("ab"):
            if not math.isnan(row[topic]):
                share = (float(table[n, outputs.index(name)]) + 8) / 16
                at = min(max(math.floor(share * bins), 0), bins - 1)
                wanted[topic, int(row[topic]), at] = 1
        assert torch.equal(added[n], wanted.double())
    one = how.judged({}, ("b",), table[:, :1], values)
    assert not one[:, 0].any(), "a label that the model does not have"
    within_bound(how, added)


@few
@given(
    rows=st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6),
    answers=st.lists(NUMBER, min_size=12, max_size=12),
    bins=st.sampled_from([1, 4, 10]),
    largest=st.sampled_from([0.2, 1.0]),
    turned=st.booleans(),
    deviations=st.none() | st.tuples(*[st.sampled_from([0.0, 1.0, 20.0, 200.0])] * 2),
)
def test_a_number_adds_its_error_and_its_value_as_shares_of_the_range(
    rows: list[tuple[float, float]],
    answers: list[float],
    bins: int,
    largest: float,
    turned: bool,
    deviations: tuple[float, float] | None,
) -> None:
    how = CountedNumbers(Number(("x", "y"), RANGES), bins, largest)
    values = torch.tensor(rows, dtype=torch.float64)

    def share(value: float, topic: int) -> float:
        low, high = RANGES[topic]
        return min(max((value - low) / (high - low), 0.0), 1.0)

    for topic, cells in enumerate(how.cells(values).T.tolist()):
        low, high = RANGES[topic]
        for row, cell in zip(rows, cells, strict=True):
            width = (high - low) / bins
            assert 0 <= cell < bins
            assert low + cell * width <= max(row[topic], low) + 1e-9
            assert min(row[topic], high) <= low + (cell + 1) * width + 1e-9
    assert how.kinds(values).tolist() == [[0, 0]] * len(rows)
    outputs = ("y", "x") if turned else ("x", "y")
    table = torch.tensor(answers[: 2 * len(rows)], dtype=torch.float64).reshape(-1, 2)
    facts = {} if deviations is None else {"deviation": list(deviations)}
    added = how.judged(facts, outputs, table, values)
    for n, row in enumerate(rows):
        for topic, name in enumerate("xy"):
            place = outputs.index(name)
            answer = float(table[n, place])
            u, error = share(row[topic], topic), share(answer, topic) - share(row[topic], topic)
            e = min(max(error / largest, -1.0), 1.0)
            inside = deviations is not None and (
                abs(row[topic] - answer) <= 1.959963984540054 * deviations[place]
            )
            parts = {
                "records": 1.0, "absolute": abs(e), "squared": e * e, "error": (e + 1) / 2, "value": u,
                "energy": (2 * u - 1) ** 2, "within": float(inside),
            }  # fmt: skip
            assert added[n, topic].tolist() == pytest.approx([100 * parts[each] for each in PARTS])
    within_bound(how, added)


@few
@given(st.integers(-50, 50), st.integers(1, 200), st.integers(4, 256))
def test_whole_numbers_are_counted_as_numpy_counts_them(low: int, width: int, bins: int) -> None:
    how = CountedNumbers(Number(("x",), ((float(low), float(low + width)),)), bins)
    values = np.arange(low, low + width + 1.0)
    own = torch.bincount(how.cells(torch.from_numpy(values)[:, None])[:, 0], minlength=bins)
    edges = [low + width * at / bins for at in range(bins + 1)]
    assert own.tolist() == np.histogram(values, edges)[0].tolist()


@pytest.mark.parametrize(("bins", "first", "last"), [(1, "0 to 100", "0 to 100"), (4, "0 to 25", "75 to 100")])  # fmt: skip
def test_bins_of_a_number_are_named_by_their_edges(bins: int, first: str, last: str) -> None:
    how = CountedNumbers(Number(("x", "y"), RANGES), bins)
    assert [*how.questions] == ["x", "y"]
    one, other = how.questions.values()
    assert len(one) == len(other) == bins
    assert (one[0], one[-1]) == (first, last)
    assert other[0].startswith("-5 to ")


@few
@given(
    rows=st.lists(TIMES, min_size=1, max_size=6),
    risks=st.lists(st.integers(-3, 3), min_size=6, max_size=6),
    spread=st.none() | st.sampled_from([0.0, 0.5, 2.0]),
    edge=st.booleans(),
)
def test_a_time_is_counted_in_its_cell_and_in_the_third_of_its_risk(
    rows: list[tuple[float, float]], risks: list[int], spread: float | None, edge: bool
) -> None:
    how = CountedTimes(Time(("t", "e"), EDGES))
    values = torch.tensor(rows, dtype=torch.float64)

    def cell(time: float, event: float) -> int:
        if event and time <= 3:
            return 0 if time <= 1 else 1
        return 2 if time < 0.5 else 3 if time < 2 else 4

    cells = [cell(*row) for row in rows]
    assert how.cells(values).tolist() == [[each] for each in cells]
    assert how.kinds(values).tolist() == [[int(each < 2)] for each in cells]
    assert (how.bound, how.table.bound, how.table.shape) == (1.0, 1.0, (1, 3, 5))
    assert how.rows == how.target.rows
    facts = {} if spread is None else {"spread": spread}
    cut = NORMAL_THIRD * (1.0 if spread is None else spread)
    # A little beside the limits, or anywhere.
    found = [each * cut * (1 + 1e-4) if edge else float(each) for each in risks[: len(rows)]]
    added = how.judged(facts, ("risk",), torch.tensor(found, dtype=torch.float64)[:, None], values)
    for n, (risk, place) in enumerate(zip(found, cells, strict=True)):
        third = 0 if risk < -cut else 2 if risk > cut else 1
        wanted = torch.zeros(1, 3, 5)
        wanted[0, third, place] = 1
        assert torch.equal(added[n], wanted.double())


@pytest.mark.parametrize("spread", [-1.0, -1e-9, math.nan, math.inf])
def test_a_spread_of_the_risk_that_is_none_is_refused(spread: float) -> None:
    how = CountedTimes(Time(("t", "e"), EDGES))
    with pytest.raises(ValueError, match="spread of the risk"):
        how.judged({"spread": spread}, ("risk",), torch.zeros(1, 1), torch.zeros(1, 2))
