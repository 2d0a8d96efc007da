"""Rounds of a generator from secure aggregation, without a run: the first, the mean update, and false sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.generators import COUNTS, SUMS
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import absorb_total, expected_shapes, with_classes
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.strategies.dpcvae.test_generating_by_loops import CLASSES, D, run

few = settings(max_examples=10, deadline=None)


def begun(**more: Any) -> Training:
    return Training.begin(run(**{"classes": "a,b,c"} | more), CLASSES, "f", D)


@few
@given(st.integers(0, 999), st.integers(1, 5), st.booleans())
def test_the_model_moves_by_the_sum_over_the_sum_of_weights(
    seed: int, sites: int, first: bool
) -> None:
    training = begun()
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(4, 40, (3,), generator=draw).double()
    sums = counts[:, None] * torch.randn(3, D, generator=draw).double() / 9
    first_round = Total(training.header(), {COUNTS: counts, SUMS: sums})
    reply = Parameters(training.header(), 1, {COUNTS: counts.float(), SUMS: sums.float()})
    wanted = with_classes(training, [reply], sites)
    names = [f"s{at}" for at in range(sites)]
    absorb_total(first_round, training, names)
    assert training.model.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(training.model[name], tensor)
    assert (training.round, training.memory) == (1, {})
    assert training.confirmed == dict.fromkeys(names, 1)
    if first:
        return
    shapes = expected_shapes(training)
    assert len(shapes) > 1
    before, size = dict(training.model), sum(torch.Size(each).numel() for each in shapes.values())
    update = torch.randn(size, generator=draw, dtype=torch.float64)
    tensors = {"update": update, "records": torch.tensor([30.0]).double()}
    absorb_total(Total(training.header(), tensors), training, ["s0"] * sites)
    weight, at = 30.0, 0
    for name in sorted(shapes):
        part = update[at : at + before[name].numel()].reshape(before[name].shape) / weight
        torch.testing.assert_close(training.model[name], before[name] + part.float())
        at += before[name].numel()
    assert at == size
    for name in before.keys() - shapes.keys():
        assert torch.equal(training.model[name], before[name])
    assert training.round == 2


def test_sums_of_the_first_round_that_no_records_have_end_the_run() -> None:
    training = begun()
    before = training.payload()
    counts = torch.tensor([5.0, 5.0, 5.0]).double()
    long = Total(training.header(), {COUNTS: counts, SUMS: 9 * torch.ones(3, D).double()})
    with pytest.raises(RunError, match=r"records have: class 'a': the sum of 5 embed.* false"):
        absorb_total(long, training, ["s0"])
    assert (training.round, training.payload()) == (0, before)


@pytest.mark.parametrize("sites", [1, 9])
def test_noise_of_all_sites_together_explains_longer_sums(sites: int) -> None:
    training = begun(epsilon=2.0, delta=1e-5)
    assert training.config.mechanism is not None
    noise = training.config.mechanism.event(1).noise_multiplier
    # Thirty deviations of the noise of so many sites, of which a class size has 7 % of the budget.
    least = -30 * noise * sites**0.5 / 0.07**0.5
    claim, sums = training.config.mechanism, torch.zeros(3, D).double()
    for share in (1.01, 0.99):
        counts = torch.tensor([share * least, 1e5, 1e5]).double()
        sent = Total(training.header(), {COUNTS: counts, SUMS: sums}, {}, claim)
        if share > 1:
            with pytest.raises(RunError, match=r"class sizes of .* are out of range"):
                absorb_total(sent, training, ["s"] * sites)
        else:
            absorb_total(sent, training, ["s"] * sites)
    assert training.round == 1
