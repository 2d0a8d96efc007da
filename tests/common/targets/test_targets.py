"""Targets follow from settings alone, and no code of a record is longer than its bound."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.targets.metrics import answers_of, checked_target
from fedsurrogate.common.targets.target import CODE, PRODUCTS, Target

Flat = dict[str, Scalar]
NUMBER: Flat = {"task": "regression", "target-range": "-3,5; 0,1", "value-columns": "age,dose"}
LABELS: Flat = {"task": "multilabel", "label-columns": "edema,fracture,nodule"}
TIME: Flat = {"task": "survival", "horizon": 3.0, "bins": 6}
CAPPED: Flat = LABELS | {
    "label-sets": "a=edema,fracture; b=nodule",
    "epsilon": 2.0,
    "delta": 1e-5,
}
KINDS = (NUMBER, LABELS, TIME)
PRIVATE: Flat = {"epsilon": 2.0, "delta": 1e-5}
number = st.floats(-1e9, 1e9)
VALUES = {
    "regression": st.tuples(number, number),
    "multilabel": st.tuples(*3 * [st.sampled_from([0.0, 1.0, math.nan])]),
    "survival": st.tuples(st.floats(0, 1e9), st.sampled_from([0.0, 1.0])),
}


def resolved(flat: Flat) -> tuple[Run, Target]:
    run = parse_run(flat)
    assert run.target is not None
    return run, run.target


@pytest.mark.parametrize(
    ("flat", "private"), [*((kind, p) for kind in KINDS for p in (False, True)), (CAPPED, True)]
)
def test_shares_are_one_budget_and_the_mechanism_has_each_bound(flat: Flat, private: bool) -> None:
    run, target = resolved(flat | (PRIVATE if private else {}))
    sums = target.statistics(private)
    assert [each.name for each in sums] == [field.name for field in run.plan.messages.sends]
    if not private:
        assert run.mechanism is None
        return
    assert math.isclose(sum(each.share for each in sums), 1)
    assert run.mechanism is not None
    assert {name: bound for name, (_, bound) in run.mechanism.noise.items()} == {
        each.name: each.bound for each in sums
    }
    for each in sums:
        sigma, bound = run.mechanism.noise[each.name]
        due = run.mechanism.noise_multiplier * bound / math.sqrt(each.share)
        assert math.isclose(sigma, due)


@pytest.mark.parametrize("flat", [*KINDS, CAPPED])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_record_has_a_code_longer_than_its_bound(flat: Flat, data: st.DataObject) -> None:
    _, target = resolved(flat)
    rows = data.draw(st.lists(VALUES[target.name], min_size=1, max_size=5))
    values = torch.tensor(rows, dtype=torch.float64)
    assert not any(wrong.any() for wrong in target.faults(values).values())
    code = target.code(values)
    assert code.shape == (len(rows), len(target.rows))
    bounds = {each.name: each.bound for each in target.statistics(private=True)}
    assert float(code.norm(dim=1).max()) <= bounds[CODE] + 1e-12
    if PRODUCTS in bounds:
        squares = torch.einsum("ni,nj->nij", code, code).flatten(1)
        assert float(squares.norm(dim=1).max()) <= bounds[PRODUCTS] + 1e-12
    # The code of a record depends on no other.
    alone = torch.cat([target.code(row[None]) for row in values])
    assert torch.equal(alone, code)


@pytest.mark.parametrize("flat", [*KINDS, CAPPED])
def test_a_run_resolves_to_itself_and_its_digest_holds_the_target(flat: Flat) -> None:
    run, target = resolved(flat)
    again = parse_run(run.settings.flat())
    assert (again.full_digest, again.target) == (run.full_digest, target)
    assert run.settings.classes == target.rows
    changed: dict[str, Flat] = {
        "regression": {"target-range": "-3,5; 0,2"},
        "multilabel": {"label-columns": "edema,fracture,nodule,mass"},
        "survival": {"horizon": 4.0},
    }
    assert parse_run(flat | changed[target.name]).digest != run.digest
    assert parse_run({}).target is None


def test_faults_of_values_are_found_record_by_record() -> None:
    def wrong(flat: Flat, rows: Tensor) -> list[list[bool]]:
        return [each.tolist() for each in resolved(flat)[1].faults(rows).values()]

    inf, nan = math.inf, math.nan
    assert wrong(NUMBER, torch.tensor([[0.0, inf], [nan, 0.0]])) == [[True, False]]
    assert wrong(LABELS, torch.tensor([[0.0, 1.0, 2.0], [nan, 0.0, 1.0]])) == [[True, False]]
    rows = torch.tensor([[-1.0, 1.0], [1.0, 2.0], [inf, 0.0], [1.0, 0.0]])
    assert wrong(TIME, rows) == [[True, False, True, False], [False, True, False, False]]


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
facts = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["regression", "multilabel", "survival", "other"]),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
    st.dictionaries(st.sampled_from(["deviation", "prevalence", "hazard", "edges"]), facts),
    facts | st.lists(st.text(max_size=3)),
)
def test_a_model_with_any_facts_is_refused_or_answers(
    name: str, outputs: list[str], more: dict[str, object], columns: object
) -> None:
    text = json.dumps({"name": name, "columns": columns, **more})
    try:
        checked_target(text, tuple(outputs))
    except SurrogateError:
        return
    found = answers_of(text, tuple(outputs), torch.randn(4, len(outputs)))
    assert found
    assert {len(column) for column in found.values()} == {4}


@settings(max_examples=20, deadline=None)
@given(
    st.integers(-2000, 2000) | st.sampled_from([0, 1]),
    st.sampled_from(["regression", "multilabel"]),
)
def test_facts_about_a_target_may_have_65536_characters(beyond: int, name: str) -> None:
    text = json.dumps({"name": name, "columns": ["a"]}).ljust(2**16 + beyond)
    if beyond > 0:
        with pytest.raises(SurrogateError, match=f"{len(text)} characters, 65536 at most"):
            checked_target(text, ("a",))
    else:
        assert checked_target(text, ("a",)) == text


@pytest.mark.parametrize("more", [{}, {"secure-aggregation": True}, PRIVATE])
def test_times_say_before_the_start_what_keeps_a_site_out(more: Flat) -> None:
    for head in ("auto", "cells"):
        run, _ = resolved(TIME | more | {"time-head": head})
        said = any("set time-head = 'residuals', secure-aggregation" in gap for gap in run.gaps(4))
        assert said == (not more and head == "cells")
