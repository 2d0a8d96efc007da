"""Several private steps, record by record in plain loops: what the network becomes with FedProx's term,
and the facts that stay at the site.
"""

from __future__ import annotations

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
from fedsurrogate.client_app.methods.dp.dp_sgd import clipped_gradients, train_privately
from fedsurrogate.client_app.methods.local_training import PLAIN, class_losses
from fedsurrogate.common.models.networks import linear

RECORDS, STEPS = 7, 3
X = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(RECORDS) % 3


def network() -> nn.Module:
    module = linear(4, 3)
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


@settings(max_examples=12, deadline=None)
@given(
    samples=st.lists(st.sets(st.integers(0, RECORDS - 1)), min_size=STEPS, max_size=STEPS),
    clip=st.sampled_from([0.2, 1.0, 50.0]),
    mu=st.sampled_from([0.0, 0.5]),
    rate=st.sampled_from([0.1, 1.0]),
    batch=st.sampled_from([1, 5]),
    multiplier=st.sampled_from([0.5, 2.0]),
)
def test_steps_add_up_and_facts_are_of_what_was_drawn(
    samples: list[set[int]], clip: float, mu: float, rate: float, batch: int, multiplier: float
) -> None:
    """Without the noise itself, which other tests draw."""
    module, wanted = network(), network()
    start, cut, signal = flat(wanted), 0, []
    for rows in samples:
        total = torch.zeros(15, dtype=torch.float64)
        for row in rows:
            own = gradient(wanted, row)
            cut += int(float(own.norm()) > clip)
            total += own * min(1.0, clip / float(own.norm()))
        signal.append(float(total.norm()) / (multiplier * clip * 15**0.5))
        now = flat(wanted)
        after = now - rate * (total / batch + mu * (now - start))
        torch.nn.utils.vector_to_parameters(after.float(), wanted.parameters())
    numbers = iter([[0.1 if row in rows else 0.9 for row in range(RECORDS)] for rows in samples])
    chosen: Any = SimpleNamespace(private_steps=STEPS, sample_rate=0.5, batch_size=batch)
    claim: Any = SimpleNamespace(clip=clip, noise_multiplier=multiplier)
    variant: Any = SimpleNamespace(mu=mu, losses=class_losses)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(
            record_gradients,
            "system_uniforms",
            lambda count: torch.tensor(next(numbers), dtype=torch.float64),
        )
        patch.setattr(
            "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian",
            lambda variance, count: np.zeros(count, dtype=np.int64),
        )
        facts = train_privately(module, X, Y, chosen, claim, rate, variant)
    assert torch.allclose(flat(module), flat(wanted), atol=1e-5)
    assert facts.keys() == {"clip-fraction", "signal-to-noise-gradients"}
    assert facts["clip-fraction"] == pytest.approx(cut / max(1, sum(map(len, samples))))
    assert facts["signal-to-noise-gradients"] == pytest.approx(sum(signal) / STEPS, rel=1e-4)
    assert PLAIN.mu == 0


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([1e-3, 0.5, 1e3]), st.sets(st.integers(0, RECORDS - 1)))
def test_the_clipped_sum_has_the_gradients_by_parameter(clip: float, rows: set[int]) -> None:
    module, kept = network(), sorted(rows)
    wanted = torch.zeros(15, dtype=torch.float64)
    for row in kept:
        own = gradient(module, row)
        wanted += own * min(1.0, clip / float(own.norm()))
    found = clipped_gradients(module, X[kept], Y[kept], clip)
    assert list(found) == [name for name, _ in module.named_parameters()]
    # The grid of the sum is as fine as the clip asks for.
    whole = torch.cat([part.flatten() for part in found.values()])
    assert torch.allclose(whole, wanted, atol=1e-5 * max(1.0, clip))
