"""A site's sums in a round of a Cox model, record by record in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.methods.cox_rounds import round_sums
from fedsurrogate.client_app.methods.local_training import network_of_target
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.networks import of_target
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.wire.parts import in_parts, joined
from tests.rounds_of_times import hospitals, released, task_of

BINS = 3
COX = {"target": "time", "horizon": 3.0, "bins": BINS, "time-head": "cox", "cox-rounds": 4}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), steep=st.sampled_from([0.0, 0.5, 60.0]), summed=st.booleans())
def test_the_sums_of_a_round_are_those_of_a_loop_over_the_records(
    seed: int, steep: float, summed: bool
) -> None:
    run, ((x, y),) = parse_run(COX | {"secure-sum": summed}), hospitals((30,), seed)
    draw = np.random.default_rng(seed)
    beta, offset, hazard = steep * draw.normal(size=4), float(draw.normal()), draw.random(BINS)
    numbers = {"beta": beta, "offset": np.array([offset]), "hazard": hazard}
    model = {
        part: tensor
        for name, own in numbers.items()
        for part, tensor in in_parts(name, torch.from_numpy(own), 3).items()
    }
    weights, first = np.zeros(BINS + 1), np.zeros((BINS + 1, 4))
    second, events, code = np.zeros((4, 4)), np.zeros(4), np.zeros(2 * BINS + 1)
    for row, (time, event) in zip(x.astype(np.float32).astype(float), y, strict=True):
        # Bins of one unit each, up to the horizon. A record without an event leaves at the nearest edge,
        # after the bin before it.
        early = event and time <= BINS
        place = max(0, math.ceil(time) - 1) if early else min(int(time + 0.5), BINS)
        code[place if early else BINS + place] += 1
        events += row * early
        if not early:
            place = BINS if place == BINS else place - 1
        if place < 0:
            continue
        weight = np.exp(np.clip(row @ beta - offset, -12, 12))
        weights[place] += weight
        first[place] += weight * row
        second += weight * hazard[: place + 1].sum() * np.outer(row, row)
    task = task_of(run, (x, y), model, 1)
    if summed:
        found, claim = round_sums(task)
        assert claim is None
    else:
        sent = released(task)
        assert (sent.records, sent.round) == (30, 1)
        names = ("code", "event-sums", "weights", "first", "second")
        found = {name: joined(name, sent.tensors, 3) for name in names}
    own = {"code": code, "event-sums": events, "weights": weights, "first": first}
    for name, wanted in own.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(unfold(found["second"], 4), second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [0, 5])
def test_a_round_that_the_run_does_not_have_is_refused(number: int) -> None:
    run, (site,) = parse_run(COX), hospitals((30,))
    task = replace(task_of(run, site, {}, 1), info={"round": max(1, number)})
    if number:
        with pytest.raises(SurrogateError, match="round 5 of a run of 4"):
            released(task)
    else:
        with pytest.raises(SurrogateError, match="without weights, offset or hazards"):
            released(task)


def test_a_network_of_another_target_has_the_parameters_that_came_and_no_other_shapes() -> None:
    run = parse_run(
        {"method": "fedavg", "target": "number", "target-range": "0,1", "value-columns": "a"}
    )
    objective = run.target.objective() if run.target else None
    assert objective is not None
    fresh = of_target(objective, 3)
    tensors = {name: torch.randn_like(p) for name, p in fresh.named_parameters()}
    module = network_of_target(objective, 3, tensors)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, tensors[name])
        assert parameter.data_ptr() != tensors[name].data_ptr()
    for features in (2, 4):
        with pytest.raises(SurrogateError, match=f"not the run's, for {features} features"):
            network_of_target(objective, features, tensors)
