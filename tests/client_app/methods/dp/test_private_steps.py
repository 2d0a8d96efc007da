"""A private step takes a Poisson sample, and divides its sum by a public number; quickly, and for
every way to train.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dp.record_gradients import (
    PrivateGradient,
    UnitRecords,
    Units,
    poisson_sample,
    train_privately,
)
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.networks import linear, parameters_of

RECORDS, CLIP, RATE = 9, 0.4, 0.3
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(RECORDS, 5, generator=GENERATOR), torch.arange(RECORDS) % 3
ALONE = Units(RECORDS)
Step = Callable[[int, Units], Tensor]


def network() -> nn.Module:
    module = linear(5, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1)
    return module


def of_dp_sgd(public: int, record_gradients: Units = ALONE) -> Tensor:
    """The mean gradient of one step of DP-SGD, from what it changes at a learning rate of one."""
    module = network()
    chosen = SimpleNamespace(private_steps=1, sample_rate=RATE, batch_size=public)
    claim = SimpleNamespace(clip=CLIP, noise_multiplier=1.0)
    before = torch.cat([p.detach().flatten() for p in module.parameters()]).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_privately(module, UnitRecords(X, Y, record_gradients), chosen, claim, 1.0)  # type: ignore[arg-type]
    return before - torch.cat([p.detach().flatten() for p in module.parameters()])


def of_fedlap(public: int, record_gradients: Units = ALONE) -> Tensor:
    """The mean gradient of FedLAP-DP."""
    module = network()
    records = LandscapeRecords.evenly(X, Y)
    looks = PrivateGradient(module, records, CLIP, 1.0, RATE, public, record_gradients)
    found = looks(parameters_of(module), lambda values: values)
    return torch.cat([part.flatten() for part in found.values()])


def one_by_one(rows: list[int], weights: list[float]) -> Tensor:
    """The sum of the gradients of these rows, each shortened to the clip and weighted."""
    module = network()
    total = torch.zeros(18)
    for row in rows:
        loss = nn.functional.cross_entropy(module(X[row : row + 1]), Y[row : row + 1])
        gradient = torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, [*module.parameters()])]
        )
        total += gradient * min(1.0, CLIP / float(gradient.norm())) * weights[row]
    return total


WAYS: dict[str, Step] = {"DP-SGD": of_dp_sgd, "FedLAP-DP": of_fedlap}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8)
@given(
    drawn=st.lists(st.floats(0, 1, exclude_max=True), min_size=RECORDS, max_size=RECORDS),
    public=st.sampled_from([1, 4, 50]),
    patients=st.none() | st.lists(st.sampled_from("abcd"), min_size=RECORDS, max_size=RECORDS),
)
def test_a_step_is_the_sum_over_its_sample_over_a_public_number(
    way: str, drawn: list[float], public: int, patients: list[str] | None
) -> None:
    """The sample is what the secret numbers say, record by record, or patient by patient with all
    records, which weigh one together: nobody else, never a fixed number of them, and the divisor
    does not depend on how many there are.
    """
    whose = patients or [str(row) for row in range(RECORDS)]
    order = list(dict.fromkeys(whose))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            record_gradients,
            "system_uniforms",
            lambda count: torch.tensor(drawn[:count], dtype=torch.float64),
        )
        patch.setattr(
            "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian",
            lambda variance, count: np.zeros(count, dtype=np.int64),
        )
        found = WAYS[way](public, Units.of(patients, RECORDS))
    rows = [row for row, name in enumerate(whose) if drawn[order.index(name)] < RATE]
    wanted = one_by_one(rows, [1 / whose.count(name) for name in whose]) / public
    assert torch.allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9, 1.0])
def test_every_record_is_in_the_sample_at_its_rate_and_alone(rate: float) -> None:
    """Sizes of samples are binomial, each record comes equally often, and pairs are independent."""
    count, runs = 40, 600
    taken = torch.zeros(runs, count)
    for run in range(runs):
        taken[run, poisson_sample(count, rate)] = 1
    if rate == 1:
        assert bool(taken.all())
        return
    spread = (rate * (1 - rate)) ** 0.5
    scores = (taken.sum(0) - runs * rate) / (spread * runs**0.5)
    assert float(scores.square().sum()) < stats.chi2.ppf(1 - 1e-6, count)
    sizes = taken.sum(1).double()
    assert float(sizes.var()) / (count * spread**2) == pytest.approx(1, abs=5 * (2 / runs) ** 0.5)
    centred = (taken - rate) / spread
    pairs = (centred.T @ centred / runs**0.5)[torch.triu(torch.ones(count, count), 1) == 1]
    assert float(pairs.square().mean()) == pytest.approx(1, abs=0.35)


@settings(max_examples=20, deadline=None)
@given(
    patients=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=40),
    rate=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_a_patient_is_drawn_with_all_records_which_weigh_one_together(
    patients: list[str], rate: float
) -> None:
    found = Units.of(patients, len(patients))
    assert found.count == len(set(patients))
    rows, weights = found.sample(rate)
    assert weights is not None
    chosen = {patients[row] for row in rows.tolist()}
    assert rows.tolist() == [row for row, name in enumerate(patients) if name in chosen]
    for name in chosen:
        own = [
            w
            for w, row in zip(weights.tolist(), rows.tolist(), strict=True)
            if patients[row] == name
        ]
        assert 1 - 1e-9 <= sum(map(Fraction, own)) <= 1
    if rate == 1:
        assert chosen == set(patients)


def test_every_patient_is_in_the_sample_at_the_rate_however_many_records() -> None:
    """Not at the rate of one of the records."""
    patients, rate, runs = ["a"] * 30 + ["b"], 0.3, 3000
    found = Units.of(patients, 31)
    taken = torch.zeros(runs, 2)
    for run in range(runs):
        rows = found.sample(rate).rows
        assert int((rows < 30).sum()) in (0, 30)
        taken[run] = torch.tensor([float((rows < 30).any()), float((rows == 30).any())])
    spread = (rate * (1 - rate) / runs) ** 0.5
    assert bool(((taken.mean(0) - rate).abs() < 5 * spread).all())
