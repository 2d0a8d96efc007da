"""Methods that FedLAP is compared with, as recipes of its synthesis: DSC, FedDM and PSG. None of
them has a radius.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsurrogate.client_app.methods.fedlap.approximation import Recipe, approximate
from fedsurrogate.client_app.methods.fedlap.statistics import CLASS_GRADIENTS, CLASS_MEANS
from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.models.networks import fresh, parameters_of
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.randomness import stream


def dsc(task: Task) -> MethodOutput:
    """Dataset condensation by gradient matching in each class, at the received model.

    Args:
        task: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Zhao et al. 2021, algorithm 1. Differs from the paper, which begins at many random
    models: here all gradients are those at one model, and later rounds go on at the model that was
    learned.
    """
    return approximate(task, Recipe(CLASS_GRADIENTS, searches=False))


def feddm(task: Task) -> MethodOutput:
    """Distribution matching: class means of the head's inputs and outputs, at models drawn around
    the received one.

    Args:
        task: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Xiong et al. 2023, algorithm 1; their rho, which bounds the drawn models and the
    coordinator's steps, is `fedlap.trust-radius`. Differs from the paper: a drawn model's distance
    is uniform from zero to rho; there it is that of a truncated Gaussian, which in many dimensions
    is nearly always rho.
    """

    def starts(task: Task) -> Callable[[Tensors], Tensors]:
        generator = stream(task.run.settings.seed, "feddm", task.site, task.round)
        return lambda model: perturbed(model, task.run.settings.fedlap.trust_radius, generator)

    return approximate(task, Recipe(CLASS_MEANS, starts, searches=False))


def psg(task: Task) -> MethodOutput:
    """Private set generation: private gradients of all classes together, at models drawn at random.

    Args:
        task: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Chen et al. 2022, algorithm 1. Noise and accounting are those of FedLAP-DP.
    """

    def starts(task: Task) -> Callable[[Tensors], Tensors]:
        generator = stream(task.run.settings.seed, "psg", task.site, task.round)
        return lambda model: _fresh(task, model, generator)

    return approximate(task, Recipe(starts=starts, searches=False))


def perturbed(model: Tensors, radius: float, generator: torch.Generator) -> dict[str, Tensor]:
    """A model in a random direction from another one.

    Args:
        model: the other one, by parameter.
        radius: its distance is drawn from zero to this.
        generator: of direction and distance.
    """
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.items()}
    length = torch.stack([part.double().square().sum() for part in noise.values()]).sum().sqrt()
    share = float(radius * torch.rand(1, generator=generator) / length)
    return {name: tensor + share * noise[name].to(tensor) for name, tensor in model.items()}


def _fresh(task: Task, model: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    settings, seed = task.run.settings.fedlap, int(torch.randint(2**31, (1,), generator=generator))
    inputs, classes = task.found.train.features.shape[1], len(task.received_model().header.classes)
    drawn = parameters_of(fresh(settings.kind, inputs, classes, settings.width, seed))
    return {name: drawn[name].to(tensor) for name, tensor in model.items()}
