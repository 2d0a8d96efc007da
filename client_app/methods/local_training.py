"""Training of one network on one site's records: plain SGD, with the terms of FedProx and SCAFFOLD
where requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsurrogate.common.models.augmentation import draw
from fedsurrogate.common.models.networks import build, split_input
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.settings import FedAvgSettings, Model


@dataclass(frozen=True)
class Variant:
    """Changes to plain local SGD in variants of FedAvg; the defaults change nothing.

    Attributes:
        mu: weight of FedProx's term (mu / 2) |w - w_0|^2 around the start w_0.
        correction: SCAFFOLD's c - c_i, added to every gradient.
        single_step: one batch only (FedSGD).

    Source: FedProx (Li et al. 2020); SCAFFOLD (Karimireddy et al. 2020).
    """

    mu: float = 0.0
    correction: Tensors | None = None
    single_step: bool = False


PLAIN = Variant()


def network(kind: Model, inputs: int, classes: int, tensors: Tensors) -> nn.Module:
    """A network with a copy of these parameters.

    Args:
        kind: of the network.
        inputs: d, numbers in the features of a record.
        classes: number of classes.
        tensors: the parameters, by name.
    """
    module = build(kind, inputs, classes, tensors)
    module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
    return module


def step_length(kind: Model, settings: FedAvgSettings, features: Tensor) -> float:
    """The learning rate; for a linear model over the mean squared norm of its inputs, the scale of
    its curvature.

    Args:
        kind: of the network.
        settings: the rate before that.
        features: inputs of the network, (n, d).
    """
    rate = settings.rate(private=False)
    if kind != "linear":
        return rate
    return rate / max(float(features.square().sum(1).mean()), 1e-12)


def train(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    settings: FedAvgSettings,
    rate: float,
    generator: torch.Generator,
    variant: Variant = PLAIN,
) -> int:
    """Train a network in place by SGD, `settings.local_epochs` times over the records.

    Parameters that need no gradient stay as they are; without records, all do.

    Args:
        module: the network.
        features: of the records, (n, d).
        labels: indices of classes, (n,).
        settings: epochs, size of a batch, momentum and augmentation.
        rate: learning rate.
        generator: of the order of the records, and of the augmentation.
        variant: changes to plain SGD.

    Returns:
        The number of steps.
    """
    if not len(labels):
        return 0
    trained = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    start = [parameter.detach().clone() for _, parameter in trained] if variant.mu else []
    optimiser = torch.optim.SGD(
        [parameter for _, parameter in trained], lr=rate, momentum=settings.momentum
    )
    steps = 0
    if settings.augment:
        module, features = split_input(module, features)
    for rows in _batches(len(labels), settings, generator):
        optimiser.zero_grad()
        change = draw(settings.augment, generator)
        torch.nn.functional.cross_entropy(module(change(features[rows])), labels[rows]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for index, (name, parameter) in enumerate(trained):
                assert parameter.grad is not None
                if variant.mu:
                    parameter.grad.add_(parameter - start[index], alpha=variant.mu)
                if variant.correction is not None:
                    parameter.grad.add_(variant.correction[name].to(parameter))
        optimiser.step()
        steps += 1
        if variant.single_step:
            break
    return steps


def _batches(count: int, settings: FedAvgSettings, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(settings.local_epochs):
        yield from torch.split(torch.randperm(count, generator=generator), settings.batch_size)
