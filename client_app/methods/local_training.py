"""Training of one network on one site's records: plain SGD, with the terms of FedProx and SCAFFOLD
where requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.networks import build, of_target, split_input
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.models.training_parts import UncompiledSGD, draw

if TYPE_CHECKING:
    from fedsurrogate.common.settings import FedAvgSettings, Model
    from fedsurrogate.common.targets.target import Objective

# Losses of records (n,), from outputs (n, o) and what is known of the records, (n, ...).
Losses = Callable[[Tensor, Tensor], Tensor]


def class_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record (n,)."""
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")


@dataclass(frozen=True)
class Variant:
    """Changes to plain local SGD in variants of FedAvg; the defaults change nothing.

    Attributes:
        mu: weight of FedProx's term (mu / 2) |w - w_0|^2 around the start w_0.
        correction: SCAFFOLD's c - c_i, added to every gradient.
        single_step: one batch only (FedSGD).
        losses: of records (n,), from outputs and labels, or the code of another target.
        faster: multiples of the learning rate, by parameter.

    Source: FedProx (Li et al. 2020); SCAFFOLD (Karimireddy et al. 2020).
    """

    mu: float = 0.0
    correction: Tensors | None = None
    single_step: bool = False
    losses: Losses = class_losses
    faster: Mapping[str, float] = field(default_factory=dict)


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


def network_of_target(objective: Objective, inputs: int, tensors: Tensors) -> nn.Module:
    """The linear model of another target than classes, with a copy of these parameters.

    Args:
        objective: of the target.
        inputs: d, numbers in the features of a record.
        tensors: the parameters, by name.

    Raises:
        SurrogateError: for parameters of another model.
    """
    module = of_target(objective, inputs)
    wanted = {name: parameter.shape for name, parameter in module.named_parameters()}
    if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
        raise SurrogateError(f"a model that is not the run's, for {inputs} features")
    module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
    return module


def step_length(
    kind: Model, settings: FedAvgSettings, features: Tensor, linear: float = 0.0
) -> float:
    """The learning rate; for a linear model over the mean squared norm of its inputs, the scale of
    its curvature.

    Args:
        kind: of the network.
        settings: the rate before that.
        features: inputs of the network, (n, d).
        linear: default of a linear model of another target than classes; 0 for classes.
    """
    rate = settings.rate(private=False, linear=linear)
    if kind != "linear":
        return rate
    return rate / mean_square(features)


def mean_square(features: Tensor) -> float:
    """Mean squared norm of features (n, d), above zero."""
    return max(float(features.square().sum(1).mean()), 1e-12)


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
        labels: indices of classes, (n,), or the code of another target, (n, q).
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
    optimiser = UncompiledSGD(
        [
            {"params": [parameter], "lr": rate * variant.faster.get(name, 1.0)}
            for name, parameter in trained
        ],
        lr=rate,
        momentum=settings.momentum,
    )
    steps = 0
    if settings.augment:
        module, features = split_input(module, features)
    for rows in _batches(len(labels), settings, generator):
        optimiser.zero_grad()
        change = draw(settings.augment, generator)
        losses = variant.losses(module(change(features[rows])), labels[rows])
        losses.mean().backward()  # type: ignore[no-untyped-call]
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
