"""What of a site's records may be in an exact sum, and how records are grouped, against a count of
records one by one.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.target import CODE, SQUARES, SUMS, Target
from fedsurrogate.common.targets.time import Time

LABEL = st.sampled_from([0.0, 1.0, math.nan])


def target_of(**flat: object) -> Target:
    run = parse_run({key.replace("_", "-"): value for key, value in flat.items()})  # type: ignore[misc]
    assert run.target is not None
    return run.target


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(LABEL, LABEL), max_size=8),
    least=st.integers(0, 4),
    summed=st.booleans(),
)
def test_a_label_leaves_only_with_enough_records_of_each_answer(
    rows: list[tuple[float, float]], least: int, summed: bool
) -> None:
    labels = Labels(("a", "b"))
    code = labels.code(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2))
    small, large = set(), set()
    for at, name in enumerate(labels.columns):
        seen = Counter("?" if math.isnan(row[at]) else row[at] for row in rows)
        if not seen[1.0] + seen[0.0]:
            continue
        # Where few are not annotated, the sum of the others and that of all differ by these few.
        few = min(seen[1.0], seen[0.0]) < least or 0 < seen["?"] < least
        (small if few else large).add(name)
    if small and not large and not summed:
        with pytest.raises(DataError, match=f"no label has {least} records"):
            labels.large_enough(code, least, summed)
        return
    kept, why = labels.large_enough(code, least, summed)
    wanted = code.clone()
    for name in small:
        at = labels.columns.index(name)
        wanted[:, 2 * at : 2 * at + 2] = 0
    assert torch.equal(kept, wanted)
    assert bool(why) == bool(small)
    assert all((repr(name) in why) == (name in small) for name in labels.columns)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 5, width=32), st.sampled_from([0.0, 1.0])), max_size=8),
    least=st.integers(0, 4),
    summed=st.booleans(),
)
def test_times_leave_only_where_no_cell_has_few_records(
    rows: list[tuple[float, float]], least: int, summed: bool
) -> None:
    time = Time(("t", "e"), (0.0, 1.0, 3.0))
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)

    def cell(at: float, event: float) -> int:
        if event and at <= 3:
            return 0 if at <= 1 else 1
        return 2 if at < 0.5 else 3 if at < 2 else 4

    cells = [cell(*row) for row in rows]
    assert time.cells(values).tolist() == time.groups(values).tolist() == cells
    code = time.code(values)
    assert code.sum(0).tolist() == [cells.count(each) for each in range(5)]
    sizes = [size for size in Counter(cells).values() if size < max(2, least)]
    if summed or not sizes:
        assert time.large_enough(code, least, summed) == (code, "")
        return
    first = min(each for each in cells if cells.count(each) < max(2, least))
    with pytest.raises(DataError, match=f"^{len(sizes)} cells .* as '{time.rows[first]}'"):
        time.large_enough(code, least, summed)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_numbers_are_grouped_into_fifths_of_equal_size_in_their_order(values: list[int]) -> None:
    groups = Number(("x",), ((0.0, 1.0),)).groups(torch.tensor(values).double()[:, None]).tolist()
    by_value = [group for _, group in sorted(zip(values, groups, strict=True))]
    assert by_value == sorted(by_value) == [at * 5 // len(values) for at in range(len(values))]


def test_labels_are_grouped_by_the_first_one() -> None:
    values = torch.tensor([[0.0, 1.0], [1.0, 0.0], [math.nan, 1.0], [1.0, math.nan]])
    assert Labels(("a", "b")).groups(values).tolist() == [0, 1, 2, 1]


@settings(max_examples=60, deadline=None)
@given(
    sets=st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=1, max_size=6),
    colluding=st.sampled_from([0.0, 0.2, 0.34, 0.5]),
    secure=st.booleans(),
    private=st.booleans(),
)
def test_an_exact_sum_of_a_label_is_of_two_sites_besides_those_that_may_collude(
    sets: list[set[str]], colluding: float, secure: bool, private: bool
) -> None:
    flat: dict[str, object] = {
        "task": "multilabel",
        "label_columns": "a,b,c",
        "label_sets": "; ".join(f"s{at}={', '.join(sorted(own))}" for at, own in enumerate(sets)),
        "secure_aggregation": secure,
        "colluding": colluding,
    }
    if private:
        flat |= {"epsilon": 2.0, "delta": 1e-5}
    by_label = [sum(name in own for own in sets) for name in "abc"]
    # Differences of sums are over the sites of one set at least.
    least = min(*by_label, *(sets.count(own) for own in sets))
    if secure and not private and least < 2 + math.floor(colluding * len(sets)):
        with pytest.raises(ConfigError, match="annotate"):
            target_of(**flat)
        return
    target = target_of(**flat)
    assert isinstance(target, Labels)
    name, sites = target.fewest()
    named = set(name.split(", "))
    assert sites == least
    assert least in (sets.count(named), *([by_label["abc".index(name)]] if name in "abc" else []))


def test_bins_of_times_are_fewer_under_noise_and_widen_unless_a_run_sets_them() -> None:
    for more, bins in (({}, 20), ({"epsilon": 2.0, "delta": 1e-5}, 10), ({"bins": 4}, 4)):
        time = target_of(task="survival", horizon=8.0, **more)
        assert isinstance(time, Time)
        assert time.bins == bins
        assert (time.edges[0], time.edges[-1]) == (0.0, 8.0)
        widths = torch.tensor(time.edges).diff()
        ratios = widths[1:] / widths[:-1]
        wanted = 1.0 if more.get("bins") else 4 ** (1 / (bins - 1))
        assert ratios.tolist() == pytest.approx([wanted] * (bins - 1), rel=0.05)
        assert all(f"{edge:.3g}" == f"{edge:.6g}" for edge in time.edges)
    assert target_of(task="survival", horizon=8.0, secure_aggregation=True).statistics(False)


@pytest.mark.parametrize("records", [50, 100, 200])
@pytest.mark.parametrize("wrong", [0.009, 0.01, 0.02, 0.94, 0.95, 0.96])
def test_a_person_is_told_of_more_than_a_share(records: int, wrong: float) -> None:
    few = round(wrong * records)
    numbers = torch.tensor([[11.0]] * few + [[10.0]] * (records - few))
    for beyond in (numbers, 10 - numbers):
        said = Number(("x",), ((0.0, 10.0),)).warnings(beyond)
        assert bool(said) == (few / records > 0.01)
    time = Time(("t", "e"), (0.0, 1.0, 2.0), "years")
    for late, where in ((2.5, "beyond the horizon 2"), (0.5, "in the first bin")):
        other = 1.5
        for event in (0.0, 1.0):
            rows = [[late, event]] * few + [[other, event]] * (records - few)
            said = time.warnings(torch.tensor(rows))
            assert [where in each and "in years?" in each for each in said] == (
                [True] if few / records > 0.95 else []
            )
    assert time.warnings(torch.zeros(0, 2)) == []


@pytest.mark.parametrize("count", [1, 2, 5])
def test_bounds_are_those_of_the_longest_code(count: int) -> None:
    names = tuple("abcde"[:count])
    labels = {each.name: each.bound for each in Labels(names).statistics(True)}
    number = Number(names, ((0.0, 1.0),) * count)
    numbers = {each.name: each.bound for each in number.statistics(True)}
    root = math.sqrt(count)
    assert labels == pytest.approx({CODE: root, SUMS: root, SQUARES: 1.0})
    ends = number.code(torch.ones(1, count).double() * 7)
    assert ends.tolist() == [[1.0] * count]
    assert number.code(torch.full((1, count), 0.5).double()).tolist() == [[0.0] * count]
    assert float(ends.norm()) == pytest.approx(numbers[CODE])
    assert float((ends.T @ ends).norm()) == pytest.approx(numbers["products"])
