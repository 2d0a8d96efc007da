"""Clipping without per-record gradients gives the same result as clipping each record alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp.record_gradients import (
    _clipped_sum,
    clipped_gradients,
    clipped_sum,
    clipped_sums,
)
from fedsurrogate.client_app.methods.dpcvae.training_steps import trainer_of
from fedsurrogate.common.models.generators import fresh_companion, fresh_generator
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.training_parts import draws
from fedsurrogate.common.run import parse_run


def one_by_one(
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
    expected, norms = one_by_one(again.modules, lambda: again.losses(x, labels, noise), 9, clip)
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


@pytest.mark.parametrize("way", ["linear layers", "single gradients", "FedLAP-DP"])
def test_every_record_has_the_weight_of_its_own_in_whichever_call_it_is(way: str) -> None:
    """More records than a call takes: the k-th record of a call has not the k-th weight."""
    count, clip, random = 600, 0.05, torch.Generator().manual_seed(2)
    module = nn.Sequential(nn.Linear(4, 3))
    x, y = torch.randn(count, 4, generator=random), torch.arange(count) % 3
    weights = torch.rand(count, generator=random, dtype=torch.float64)
    if way == "linear layers":
        found = list(clipped_gradients(module, x, y, clip, weights=weights).values())
    elif way == "single gradients":
        sampled = GradSampleModule(module, loss_reduction="sum")
        found = [part.value for part in _clipped_sum(sampled, x, y, clip, weights=weights)[0]]
    else:
        records, change = LandscapeRecords.evenly(x, y), next(draws((), torch.Generator()))
        at = {name: part.detach() for name, part in module.named_parameters()}
        sums, _ = clipped_sum(module, at, records, clip, change, weights)
        found = [part.value for part in sums]
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
