"""Synthetic records whose gradients are like those of a site's real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from common.augmentation import Change
from common.landscape import Records, distance, gradient, loss, mismatch
from common.parameters import Tensors
from common.sections import FedLAPConfig

# The gradient of real records under these parameters: exact, of a batch, or private.
RealGradient = Callable[[Tensors, Change], dict[str, Tensor]]


@dataclass
class Story:
    """How a synthesis went: the mismatch before and after it, looks at real records, and seconds spent on each part."""

    first: float = float("nan")
    last: float = float("nan")
    looks: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"real-gradients": 0.0, "image-steps": 0.0})


def synthesise(
    body: nn.Module,
    model: Tensors,
    begin: Records,
    real: RealGradient,
    settings: FedLAPConfig,
    rate: float,
    mse_weight: float,
    changes: Iterator[Change],
) -> tuple[Records, Story]:
    """Move the values of `begin` until their gradients are like the real ones, along trajectories that start at `model`.

    Source: FedLAP-DP, algorithm 1 (algorithm 3 with a private `real`). The labels stay. Differs from the paper: the batches
    of a loop, which its algorithm leaves out but its accounting counts, are a setting.
    """
    story = Story()
    values = begin.values.clone().requires_grad_()
    optimiser = torch.optim.SGD([values], lr=settings.image_learning_rate, momentum=settings.image_momentum)
    for _ in range(settings.trajectories):
        here = {name: tensor.clone() for name, tensor in model.items()}
        for loop in range(settings.loops):
            if distance(here, model) >= settings.trust_radius:
                break
            for _ in range(settings.batches):
                change = next(changes)
                began = time.perf_counter()
                target = list(real(here, change).values())
                story.looks += 1
                story.seconds["real-gradients"] += time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(settings.image_steps):
                    story.last = _image_step(body, here, values, begin, target, change, mse_weight, optimiser)
                    story.first = story.last if story.first != story.first else story.first
                story.seconds["image-steps"] += time.perf_counter() - began
            if loop < settings.loops - 1:
                now = Records(values.detach(), begin.labels, begin.weights)
                for _ in range(settings.model_steps):
                    slope = gradient(body, here, now, next(changes))
                    here = {name: here[name] - rate * slope[name] for name in here}
    return Records(values.detach(), begin.labels, begin.weights), story


def _image_step(
    body: nn.Module,
    here: Tensors,
    values: Tensor,
    begin: Records,
    target: list[Tensor],
    change: Change,
    mse_weight: float,
    optimiser: torch.optim.Optimizer,
) -> float:
    """One step of the values towards a target gradient; returns the mismatch before it."""
    asked = {name: tensor.detach().requires_grad_() for name, tensor in here.items()}
    synthetic = loss(body, asked, Records(change(values), begin.labels, begin.weights))
    mine = torch.autograd.grad(synthetic, list(asked.values()), create_graph=True)
    wrong = mismatch(mine, target, mse_weight)
    (values.grad,) = torch.autograd.grad(wrong, [values])
    # A step that is not finite would lose all that came before it.
    if values.grad.isfinite().all():
        optimiser.step()
    return float(wrong.detach())
