"""Which exact counts of a target may leave, cell by cell; and which models answer a run's target."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.methods import counting as target_counts
from fedsurrogate.client_app.methods.counting import (
    count_answers,
    count_cells,
    large_cells,
    large_topics,
)
from fedsurrogate.common.errors import SurrogateError, norm_of_ones
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header

QUESTIONS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def counted(sizes: list[int]) -> Any:
    """A target that is counted with so many cells in each question; a value is its cell."""
    questions = [SimpleNamespace(cells=range(size)) for size in sizes]
    rows = [(at, cell) for at, size in enumerate(sizes) for cell in range(size)]
    bound = norm_of_ones(len(sizes))
    return SimpleNamespace(
        questions=questions, rows=rows, bound=bound, cells=lambda values: values.long()
    )


@given(sizes=QUESTIONS, data=st.data(), least=st.integers(0, 4))
def test_a_small_cell_leaves_out_itself_and_of_several_questions_its_question(
    sizes: list[int], data: st.DataObject, least: int
) -> None:
    cells = data.draw(st.lists(st.integers(0, 5), min_size=sum(sizes), max_size=sum(sizes)))
    expected, start = [], 0
    for size in sizes:
        own = cells[start : start + size]
        small = [0 < count < least for count in own]
        out = [any(small)] * size if len(sizes) > 1 else small
        expected += [0 if hidden else count for hidden, count in zip(out, own, strict=True)]
        start += size
    assert large_cells(counted(sizes), torch.tensor(cells), least).tolist() == expected


@given(sizes=QUESTIONS, data=st.data(), records=st.integers(0, 9))
def test_each_record_is_counted_in_its_cell_of_each_question(
    sizes: list[int], data: st.DataObject, records: int
) -> None:
    rows = [[data.draw(st.integers(0, size - 1)) for size in sizes] for _ in range(records)]
    used = [data.draw(st.booleans()) for _ in range(records)]
    values = torch.tensor(rows, dtype=torch.float64).reshape(records, len(sizes))
    found = count_cells(counted(sizes), values, torch.tensor(used).double())
    expected = [
        sum(row[at] == cell for row, counts in zip(rows, used, strict=True) if counts)
        for at, size in enumerate(sizes)
        for cell in range(size)
    ]
    assert found.value.flatten().tolist() == expected


@given(
    rows=st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.booleans()), max_size=12),
    least=st.integers(0, 4),
)
def test_a_topic_needs_enough_of_each_kind_that_is_there(
    rows: list[tuple[int, int, bool]], least: int
) -> None:
    how: Any = SimpleNamespace(kinds=lambda values: values.long())
    values = torch.tensor([row[:2] for row in rows], dtype=torch.float64).reshape(len(rows), 2)
    good = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    expected = []
    for topic in range(2):
        kinds = [row[topic] for row in rows if row[2]]
        sizes = [kinds.count(0), kinds.count(1)]
        expected.append(any(sizes) and all(size == 0 or size >= least for size in sizes))
    assert large_topics(how, values, good, least).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0])), max_size=9),
    topics=st.lists(st.booleans(), min_size=3, max_size=3),
    inner=st.sampled_from([(), (4,), (2, 2)]),
)
def test_an_answer_counts_in_the_topics_that_are_counted_with_the_weight_of_its_record(
    numbers: list[tuple[int, float]], topics: list[bool], inner: tuple[int, ...]
) -> None:
    """Some records at a time, each with its own score, value and weight."""
    shape = (3, *inner)

    def judged(facts: Any, names: Any, scores: Tensor, values: Tensor) -> Tensor:
        assert (facts["name"], names) == ("regression", ("age",))
        units = torch.arange(math.prod(shape)).reshape(shape) % 3 == 0
        size = (scores[:, 0] - 2 * values[:, 0]) / 16
        return units[None] * size.reshape(-1, *(1,) * len(shape)) / math.prod(shape)

    # A record changes each number by less than one.
    table = SimpleNamespace(shape=shape, most=1.0, bound=math.sqrt(math.prod(shape)))
    how: Any = SimpleNamespace(table=table, judged=judged)
    scores = torch.tensor([[n + 0.25] for n, _ in numbers], dtype=torch.float64).reshape(-1, 1)
    values = torch.tensor([[9.0 - n] for n, _ in numbers], dtype=torch.float64).reshape(-1, 1)
    weights = torch.tensor([w for _, w in numbers], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_counts, "ROWS", 2)
        found = count_answers(how, answers(PUBLIC), scores, values, weights, torch.tensor(topics))
    wanted = torch.zeros(shape, dtype=torch.float64)
    for row, (_, weight) in enumerate(numbers):
        own = judged(PUBLIC, ("age",), scores[row : row + 1], values[row : row + 1])[0]
        for topic, counts in enumerate(topics):
            wanted[topic] += weight * own[topic] * counts
    torch.testing.assert_close(found.value, wanted, rtol=0, atol=1e-5)

    def unfit(*given: Any) -> Tensor:
        raise KeyError("deviation")

    how.judged = unfit
    with pytest.raises(SurrogateError, match=r"cannot be counted .'deviation'.$"):
        count_answers(how, answers(PUBLIC), scores, values, weights, torch.tensor(topics))


RUN = parse_run({"task": "regression", "value-columns": "age", "target-range": "0,99"})
assert RUN.target is not None
PUBLIC: dict[str, Any] = json.loads(json.dumps(RUN.target.public))


def answers(facts: dict[str, Any]) -> Head:
    header = Header("fedpft", "r", "coordinator", "f", ("age",))
    text = json.dumps(facts) if facts else ""
    return Head(header, torch.ones(1, 2), torch.zeros(1), target=text)
