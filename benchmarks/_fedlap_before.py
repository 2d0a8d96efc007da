"""FedLAP's image steps as they were: a backward pass through a backward pass, and rounding errors
count as gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.fedlap import approximation
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, loss
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.models.training_parts import Change

SETTINGS: dict[str, Any] = {
    "fedlap.image-steps": 100,
    "fedlap.mse-weight": 0.1,
    "fedlap.memory": 0.0,
}


@contextmanager
def before() -> Iterator[None]:
    """Run FedLAP with the old steps; the old defaults are `SETTINGS`."""
    with (
        patch.object(approximation, "matching_slope", _slope),
        patch.object(approximation, "mismatch", _mismatch),
    ):
        yield


def _slope(
    body: nn.Module,
    parameters: Tensors,
    sets: Sequence[LandscapeRecords],
    change: Change,
    difference: Callable[[Sequence[Tensor]], Tensor],
) -> tuple[float, Tensor]:
    model = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    values = [records.values.detach().requires_grad_() for records in sets]
    slopes: list[Tensor] = []
    for records, own in zip(sets, values, strict=True):
        total = loss(body, model, LandscapeRecords(change(own), records.labels, records.weights))
        slopes += torch.autograd.grad(total, list(model.values()), create_graph=True)
    wrong = difference(slopes)
    return float(wrong.detach()), torch.cat(torch.autograd.grad(wrong, values))


def _mismatch(
    synthetic: Sequence[Tensor], real: Sequence[Tensor], mse_weight: float, noise: float = 0.0
) -> Tensor:
    total = torch.zeros(())
    for mine, theirs in zip(synthetic, real, strict=True):
        a, b = (
            tensor.flatten(1) if tensor.dim() > 1 else tensor[None] for tensor in (mine, theirs)
        )
        unlike = (
            1 - (a * b).sum(1) / ((a.square().sum(1) + 1e-16) * (b.square().sum(1) + 1e-16)).sqrt()
        )
        if noise:
            unlike = unlike * (
                1 - b.shape[1] * noise**2 / b.square().sum(1).clamp_min(1e-30)
            ).clamp_min(0)
        total = total + unlike.mean() + mse_weight * (a - b).square().sum()
    return total
