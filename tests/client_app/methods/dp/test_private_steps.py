"""A private step takes a Poisson sample, and divides its sum by a public number; quickly, and for
every way to train.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from scipy import stats
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dp.record_gradients import (
    PrivateGradient,
    UnitRecords,
    Units,
    clipped_gradients,
    clipped_sum,
    clipped_sums,
    poisson_sample,
    train_privately,
)
from fedsurrogate.client_app.methods.dpcvae.training import trainer_of
from fedsurrogate.client_app.methods.local_training import Variant, class_losses
from fedsurrogate.common.models.generators import fresh_companion, fresh_generator
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.networks import linear, parameters_of
from fedsurrogate.common.models.training_parts import draws
from fedsurrogate.common.run import parse_run

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
        rows = found.sample(rate)[0]
        assert int((rows < 30).sum()) in (0, 30)
        taken[run] = torch.tensor([float((rows < 30).any()), float((rows == 30).any())])
    spread = (rate * (1 - rate) / runs) ** 0.5
    assert bool(((taken.mean(0) - rate).abs() < 5 * spread).all())


RECORDS_TRAINING, STEPS = 7, 3
# Double precision: the gradient of the second network has length 42, and single precision is off by
# 4e-3 there, by other digits on each processor.
X_TRAINING = torch.randn(
    RECORDS_TRAINING, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)
Y_TRAINING = torch.arange(RECORDS_TRAINING) % 3
# How far a record's clipped gradient is off, for a clip of one: its factors are on a grid of 2^-22,
# and one of them is multiplied by a number of the record.
GRID = 2.0**-22 * float(X_TRAINING.abs().max())
# What a record is: itself, or one of a patient's.
PATIENTS = st.none() | st.lists(
    st.sampled_from("abcd"), min_size=RECORDS_TRAINING, max_size=RECORDS_TRAINING
)


class Normalised(nn.Module):
    """A network with a layer that is not linear, whose gradients are stored record by record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


NETWORKS = {"linear layers": lambda: linear(4, 3), "other layers": Normalised}


def network_training(name: str) -> nn.Module:
    module = NETWORKS[name]().double()
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.linspace(-0.3, 0.4 + at, parameter.numel()).view_as(parameter))
    return module


def gradient(module: nn.Module, row: int) -> Tensor:
    loss = nn.functional.cross_entropy(module(X_TRAINING[row : row + 1]), Y_TRAINING[row : row + 1])
    parts = torch.autograd.grad(loss, [*module.parameters()])
    return torch.cat([part.flatten() for part in parts]).double()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters()]).double()


def clipped(module: nn.Module, row: int, clip: float) -> Tensor:
    own = gradient(module, row)
    return own * min(1.0, clip / float(own.norm()))


@settings(max_examples=24, deadline=None)
@given(
    name=st.sampled_from(sorted(NETWORKS)),
    patients=PATIENTS,
    samples=st.lists(st.sets(st.integers(0, RECORDS_TRAINING - 1)), min_size=STEPS, max_size=STEPS),
    clip=st.sampled_from([0.2, 1.0, 50.0]),
    mu=st.sampled_from([0.0, 0.5]),
    rate=st.sampled_from([0.1, 1.0]),
    batch=st.sampled_from([1, 5]),
    multiplier=st.sampled_from([0.5, 2.0]),
)
def test_steps_add_up_and_facts_are_of_what_was_drawn(
    name: str,
    patients: list[str] | None,
    samples: list[set[int]],
    clip: float,
    mu: float,
    rate: float,
    batch: int,
    multiplier: float,
) -> None:
    """With noise of one standard deviation everywhere."""
    whose = patients or [str(row) for row in range(RECORDS_TRAINING)]
    order = list(dict.fromkeys(whose))

    def by_loops(shaken: float) -> tuple[Tensor, int, int, list[float]]:
        """Parameters after all steps, records cut and drawn, and the signal of each step. Sums are
        off by as much as their rounding may be.
        """
        wanted, cut, drawn, signal = network_training(name), 0, 0, []
        start = flat(wanted)
        for taken in samples:
            rows = [row for row in range(RECORDS_TRAINING) if order.index(whose[row]) in taken]
            total = torch.zeros(len(start), dtype=torch.float64)
            for row in rows:
                cut += int(float(gradient(wanted, row).norm()) > clip)
                total += clipped(wanted, row, clip) / whose.count(whose[row])
            drawn += len(rows)
            signal.append(float(total.norm()) / (multiplier * clip * len(start) ** 0.5))
            # Noise is on that grid, too.
            total += shaken * (len(rows) + 1) * GRID * clip + multiplier * clip
            now = flat(wanted)
            after = now - rate * (total / batch + mu * (now - start))
            torch.nn.utils.vector_to_parameters(after, wanted.parameters())
        return flat(wanted), cut, drawn, signal

    (end, cut, drawn, signal), module = by_loops(0.0), network_training(name)
    numbers = iter(
        [[0.1 if unit in taken else 0.9 for unit in range(len(order))] for taken in samples]
    )
    chosen: Any = SimpleNamespace(private_steps=STEPS, sample_rate=0.5, batch_size=batch)
    claim: Any = SimpleNamespace(clip=clip, noise_multiplier=multiplier)
    records = UnitRecords(X_TRAINING, Y_TRAINING, Units.of(patients, RECORDS_TRAINING))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(
            record_gradients,
            "system_uniforms",
            lambda count: torch.tensor(next(numbers), dtype=torch.float64),
        )
        patch.setattr(
            "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian",
            lambda variance, count: np.full(count, math.isqrt(variance)),
        )
        variant = Variant(mu=mu, losses=class_losses)
        facts = train_privately(module, records, chosen, claim, rate, variant)
    # What the rounding of the first sums becomes in later steps, in the network itself.
    rounding = max(float((by_loops(way)[0] - end).abs().max()) for way in (-1.0, 1.0))
    torch.testing.assert_close(flat(module), end, rtol=0, atol=2 * rounding)
    assert facts.keys() == {"clip-fraction", "signal-to-noise-gradients"}
    assert facts["clip-fraction"] == pytest.approx(cut / max(1, drawn))
    assert facts["signal-to-noise-gradients"] == pytest.approx(sum(signal) / STEPS, rel=1e-4)


def one_by_one_clipping(
    modules: nn.ModuleList, losses: Any, count: int, clip: float
) -> tuple[dict[str, Tensor], Tensor]:
    """The reference: every record's gradient computed alone."""
    names, parameters = zip(*modules.named_parameters(), strict=True)
    each = losses()
    total = {
        name: torch.zeros_like(parameter) for name, parameter in zip(names, parameters, strict=True)
    }
    norms = []
    for index in range(count):
        gradient = torch.autograd.grad(each[index], parameters, retain_graph=True)
        norm = torch.cat([part.flatten() for part in gradient]).norm()
        norms.append(norm)
        for name, part in zip(names, gradient, strict=True):
            total[name] += part * min(1.0, clip / float(norm))
    return total, torch.stack(norms)


@pytest.mark.parametrize("method", ["dpcvae", "dpcgan"])
@pytest.mark.parametrize("hidden", [0, 16])
@pytest.mark.parametrize("clip", [1e-3, 0.05, 1e3])
def test_the_sum_is_that_of_records_clipped_one_by_one(
    method: str, hidden: int, clip: float
) -> None:
    run = parse_run({"method": method, "dpcvae.hidden": hidden, "dpcvae.latent": 4})
    shared, companion = (
        make(run.settings, run.method.adversarial, 3, 20).double()
        for make in (fresh_generator, fresh_companion)
    )
    x, labels = torch.randn(9, 20).double(), torch.arange(9) % 3

    def fresh_trainer() -> Any:
        return trainer_of(
            shared,
            companion,
            run.settings.dpcvae,
            (3, 9),
            torch.ones(3),
            False,
            torch.Generator().manual_seed(5),
        )

    trainer = fresh_trainer()
    noise = trainer.noise(9).double()
    sums, cut = clipped_sums(trainer.modules, trainer.losses, (x, labels, noise), clip)
    again = fresh_trainer()
    expected, norms = one_by_one_clipping(
        again.modules, lambda: again.losses(x, labels, noise), 9, clip
    )
    assert sums.keys() == expected.keys()
    for name, sum_ in sums.items():
        # Factors of a product are on a grid of 2^-22 of the clip: an error of half a step for each
        # of nine records.
        assert torch.allclose(sum_.value, expected[name], rtol=3e-6, atol=9 * 2.0**-22 * clip), name
    assert cut == int((norms > clip).sum())


def test_the_sum_is_that_of_opacus() -> None:
    modules = nn.ModuleList([nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))])
    x, y = torch.randn(8, 6), torch.arange(8) % 2

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(modules[0](x), y, reduction="none")

    sums, _ = clipped_sums(modules, losses, (x, y), 0.3)
    sampled = GradSampleModule(modules[0], loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.functional.cross_entropy(sampled(x), y, reduction="sum").backward()
    each = [parameter.grad_sample for parameter in modules[0].parameters()]
    norms = torch.cat([part.flatten(1) for part in each], 1).norm(dim=1)
    factors = (0.3 / norms).clamp_max(1.0)
    for found, part in zip(sums.values(), each, strict=True):
        assert torch.allclose(
            found.value.float(), torch.einsum("n,n...->...", factors, part), rtol=3e-5, atol=1e-7
        )


@pytest.mark.parametrize("way", ["linear layers", "single gradients"])
def test_every_record_has_the_weight_of_its_own_in_whichever_call_it_is(way: str) -> None:
    """More records than a call takes: the k-th record of a call has not the k-th weight."""
    count, clip, random = 600, 0.05, torch.Generator().manual_seed(2)
    module = nn.Sequential(nn.Linear(4, 3))
    x, y = torch.randn(count, 4, generator=random), torch.arange(count) % 3
    weights = torch.rand(count, generator=random, dtype=torch.float64)
    if way == "linear layers":
        found = list(clipped_gradients(module, x, y, clip, weights=weights).values())
    else:
        records, change = LandscapeRecords.evenly(x, y), next(draws((), torch.Generator()))
        at = {name: part.detach() for name, part in module.named_parameters()}
        sums, _ = clipped_sum(module, at, records, clip, change, weights)
        found = [part.value for part in sums.values()]
    residual = (module(x).softmax(1) - nn.functional.one_hot(y, 3)).detach().double()
    length = residual.norm(dim=1) * (x.double().square().sum(1) + 1).sqrt()
    scaled = residual * (weights * (clip / length).clamp_max(1.0))[:, None]
    for part, due in zip(found, (scaled.T @ x.double(), scaled.sum(0)), strict=True):
        assert torch.allclose(part, due, rtol=1e-4, atol=1e-4 * clip)


def test_parameters_that_the_rule_does_not_cover_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    odd = Odd()
    modules, x = nn.ModuleList([odd]), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"0\.scale"):
        clipped_sums(modules, lambda x: (odd.linear(x) * odd.scale).sum(1), (x,), 1.0)
    twice = nn.ModuleList([nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="used twice"):
        clipped_sums(twice, lambda x: twice[0](twice[0](x)).sum(1), (x,), 1.0)
