"""Attacks of a coordinator on survival runs in rounds: what it sends decides what sites add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.sums import bounded_sums, residual_sums
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.common.targets.time import Time, scored
from tests.rounds_of_times import Site, hospitals, job_of, released

BINS, LEAST = 6, 5
RESIDUALS: dict[str, Scalar] = {
    "task": "survival",
    "horizon": 3.0,
    "bins": BINS,
    "time-head": "residuals",
}
PRIVATE: dict[str, Scalar] = {"epsilon": 2.0, "delta": 1e-5}


def group_sum(run: Run, site: Site, values: Tensor, least: int) -> tuple[float, Tensor]:
    """The sum of values, and of values times features, that a coordinator reads from a message."""
    sent = released(job_of(run, site, {"values": values}, 2, least)).tensors
    mean = sent[TOTALS].double() / sent[RECORDS].double()
    return float(sent[CODE]), sent[SUMS][0].double() + float(sent[CODE]) * mean


def shown(run: Run, site: Site, least: int) -> list[int]:
    """Numbers of records whose features' sum a coordinator reads by naming one cell at a time."""
    found = []
    for cell in range(2 * BINS + 1):
        values = torch.zeros(2 * BINS + 1)
        values[cell] = 1.0
        found.append(round(group_sum(run, site, values, least)[0]))
    return found


def test_a_coordinator_that_names_a_cell_gets_no_sum_of_few_records() -> None:
    """Without the policy it gets single records, exactly; with it, groups of enough."""
    run, (site,) = parse_run(RESIDUALS), hospitals((60,), seed=3)
    assert isinstance(run.target, Time)
    alone = shown(run, site, 1)
    assert 1 in alone, "the attack works where the policy allows one record"
    values = torch.zeros(2 * BINS + 1)
    values[alone.index(1)] = 1.0
    cells = run.target.cells(torch.as_tensor(site[1]))
    (record,) = (cells == alone.index(1)).nonzero().flatten().tolist()
    secret = torch.as_tensor(site[0][record])
    assert float((group_sum(run, site, values, 1)[1] - secret).abs().max()) < 0.05
    guarded = shown(run, site, LEAST)
    assert set(guarded) & set(range(1, LEAST)) == set()
    assert sum(guarded) == 60


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    numbers=st.lists(
        st.sampled_from([-1.0, -0.5, 0.0, 1e-3, 1.0]), min_size=2 * BINS + 1, max_size=2 * BINS + 1
    ),
)
def test_any_values_weigh_groups_of_enough_records_alike(seed: int, numbers: list[float]) -> None:
    """So a message is a combination of sums that the policy lets out, whatever was sent."""
    run, (site,) = parse_run(RESIDUALS), hospitals((40,), seed)
    assert isinstance(run.target, Time)
    values = torch.tensor(numbers)
    job = job_of(run, site, {"values": values}, 2, LEAST)
    try:
        total, _ = group_sum(run, site, values, LEAST)
    except DataError:
        events = int((run.target.cells(torch.as_tensor(site[1])) < BINS).sum())
        assert 0 < events < LEAST
        return
    sizes = torch.tensor(shown(run, site, LEAST))
    assert not ((sizes > 0) & (sizes < LEAST)).any()
    assert total == pytest.approx(float(sizes.double() @ values.double()), abs=0.05)
    assert job.limits.smallest_class == LEAST


def test_a_site_with_few_events_sends_nothing_without_noise() -> None:
    draw = np.random.default_rng(0)
    y = np.stack([draw.uniform(0.5, 2.9, 40), np.zeros(40)], 1)
    y[7, 1] = 1
    run, site = parse_run(RESIDUALS), (draw.normal(size=(40, 4)), y)
    for number in (1, 2):
        with pytest.raises(DataError, match="have an event"):
            released(job_of(run, site, {"values": torch.ones(2 * BINS + 1)}, number, LEAST))
    y[7, 1] = 0
    counts = released(job_of(run, site, {"values": torch.zeros(2 * BINS + 1)}, 1, LEAST))
    assert not counts.tensors[CODE][:BINS].any()


def test_numbers_of_the_first_round_are_none_or_enough() -> None:
    run, (site,) = parse_run(RESIDUALS), hospitals((60,), seed=3)
    zeros = torch.zeros(2 * BINS + 1)
    sent = released(job_of(run, site, {"values": zeros}, 1, LEAST)).tensors[CODE].round()
    assert float(sent.sum()) == 60
    assert not ((sent > 0) & (sent < LEAST)).any()
    exact = released(job_of(run, site, {"values": zeros}, 1, 1)).tensors[CODE].round()
    assert ((exact > 0) & (exact < LEAST)).any()
    assert float(exact[:BINS].sum()) == float(sent[:BINS].sum())


number = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    numbers=st.lists(st.floats(-1e15, 1e15), min_size=2 * BINS + 1, max_size=2 * BINS + 1),
)
def test_values_beyond_one_do_not_raise_the_sensitivity(
    data: st.DataObject, numbers: list[float]
) -> None:
    """Under privacy, in both rounds, whatever the coordinator sends."""
    run = parse_run(RESIDUALS | PRIVATE)
    assert isinstance(run.target, Time)
    assert run.mechanism is not None
    record = st.tuples(*4 * [number], st.floats(0, 5), st.sampled_from([0.0, 1.0]))
    rows = np.array(data.draw(st.lists(record, min_size=1, max_size=4)))
    site = (rows[:, :4], rows[:, 4:])
    without = (rows[1:, :4], rows[1:, 4:])
    for round, target, names in (
        (1, run.target, {CODE}),
        (2, scored(run.target, torch.tensor(numbers).double()), {TOTALS, SUMS, "squares"}),
    ):
        made = [
            bounded_sums(job_of(run, each, {}, round), target, PublicMap()).bounded
            for each in (site, without)
        ]
        assert {each.name for each in made[0]} == names
        for one, other in zip(*made, strict=True):
            bound = run.mechanism.noise[one.name][1]
            assert float((one.value - other.value).norm()) <= bound * (1 + 1e-6), one.name


def test_values_that_are_not_finite_are_refused_and_larger_ones_are_cut_off() -> None:
    run = parse_run(RESIDUALS | PRIVATE | {"secure-aggregation": True})
    (site,) = hospitals((50,))
    sums = [
        residual_sums(job_of(run, site, {"values": torch.full((2 * BINS + 1,), size)}, 2)).values
        for size in (1.0, 9000.0)
    ]
    assert torch.equal(sums[0][SUMS], sums[1][SUMS])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    one=st.integers(1, 14),
    other=st.integers(1, 14),
)
def test_the_larger_of_smallest_class_and_smallest_cell_counts_whichever_it_is(
    seed: int, one: int, other: int
) -> None:
    run, (site,) = parse_run(RESIDUALS), hospitals((40,), seed)
    draw = torch.Generator().manual_seed(seed)
    model = {"values": 2 * torch.rand(2 * BINS + 1, generator=draw) - 1}

    def sent(smallest_class: int, smallest_cell: int) -> Tensors | str:
        limits = SiteLimits(smallest_class=smallest_class, smallest_cell=smallest_cell)
        try:
            return released(replace(job_of(run, site, model, 2), limits=limits)).tensors
        except DataError as error:
            return str(error)

    wanted = sent(max(one, other), max(one, other))
    for found in (sent(one, other), sent(other, one)):
        if isinstance(wanted, str) or isinstance(found, str):
            assert found == wanted
        else:
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
