"""Several private steps, record by record in plain loops: what the network becomes with FedProx's
term, and the facts that stay at the site.
"""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dp.record_gradients import (
    UnitRecords,
    Units,
    clipped_gradients,
    train_privately,
)
from fedsurrogate.client_app.methods.local_training import Variant, class_losses
from fedsurrogate.common.models.networks import linear

RECORDS, STEPS = 7, 3
# Double precision: the gradient of the second network has length 42, and single precision is off by
# 4e-3 there, by other digits on each processor.
X = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(RECORDS) % 3
# How far a record's clipped gradient is off, for a clip of one: its factors are on a grid of 2^-22,
# and one of them is multiplied by a number of the record.
GRID = 2.0**-22 * float(X.abs().max())
# What a record is: itself, or one of a patient's.
PATIENTS = st.none() | st.lists(st.sampled_from("abcd"), min_size=RECORDS, max_size=RECORDS)


class Normalised(nn.Module):
    """A network with a layer that is not linear, whose gradients are stored record by record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


NETWORKS = {"linear layers": lambda: linear(4, 3), "other layers": Normalised}


def network(name: str) -> nn.Module:
    module = NETWORKS[name]().double()
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.linspace(-0.3, 0.4 + at, parameter.numel()).view_as(parameter))
    return module


def gradient(module: nn.Module, row: int) -> Tensor:
    loss = nn.functional.cross_entropy(module(X[row : row + 1]), Y[row : row + 1])
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
    samples=st.lists(st.sets(st.integers(0, RECORDS - 1)), min_size=STEPS, max_size=STEPS),
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
    whose = patients or [str(row) for row in range(RECORDS)]
    order = list(dict.fromkeys(whose))

    def by_loops(shaken: float) -> tuple[Tensor, int, int, list[float]]:
        """Parameters after all steps, records cut and drawn, and the signal of each step. Sums are
        off by as much as their rounding may be.
        """
        wanted, cut, drawn, signal = network(name), 0, 0, []
        start = flat(wanted)
        for taken in samples:
            rows = [row for row in range(RECORDS) if order.index(whose[row]) in taken]
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

    (end, cut, drawn, signal), module = by_loops(0.0), network(name)
    numbers = iter(
        [[0.1 if unit in taken else 0.9 for unit in range(len(order))] for taken in samples]
    )
    chosen: Any = SimpleNamespace(private_steps=STEPS, sample_rate=0.5, batch_size=batch)
    claim: Any = SimpleNamespace(clip=clip, noise_multiplier=multiplier)
    records = UnitRecords(X, Y, Units.of(patients, RECORDS))
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


@settings(max_examples=16, deadline=None)
@given(
    st.sampled_from(sorted(NETWORKS)),
    st.sampled_from([1e-3, 0.5, 1e3]),
    st.sets(st.integers(0, RECORDS - 1)),
    st.lists(st.sampled_from([0.125, 0.5, 1.0]), min_size=RECORDS, max_size=RECORDS),
)
def test_the_clipped_sum_has_the_gradients_by_parameter(
    name: str, clip: float, rows: set[int], weights: list[float]
) -> None:
    module, kept = network(name), sorted(rows)
    wanted = torch.zeros(len(flat(module)), dtype=torch.float64)
    for row in kept:
        wanted += clipped(module, row, clip) * weights[row]
    own = torch.tensor([weights[row] for row in kept], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = clipped_gradients(module, X[kept], Y[kept], clip, weights=own)
    assert list(found) == [parameter for parameter, _ in module.named_parameters()]
    # The grid of the sum is as fine as the clip asks for.
    whole = torch.cat([part.flatten() for part in found.values()])
    torch.testing.assert_close(whole, wanted, rtol=0, atol=RECORDS * GRID * clip)
