"""Gradient matching: the mismatch between the gradients of synthetic and real records, and its
derivative by the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsurrogate.common.models.augmentation import Change
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, loss
from fedsurrogate.common.models.parameters import Tensors

# Length of a move of the model, as a share of one plus its norm. Longer moves bend; shorter ones
# lose digits of 32 bits.
MOVE = 1e-3

Difference = Callable[[Sequence[Tensor]], Tensor]


def matching_slope(
    body: nn.Module,
    parameters: Tensors,
    sets: Sequence[LandscapeRecords],
    change: Change,
    difference: Difference,
) -> tuple[float, Tensor]:
    """The difference between gradients of synthetic records and a target, and its derivative by
    their values.

    Let v be the derivative of the difference by a gradient. The derivative by the values is that of
    v · ∇L: the rate at which the derivative of L by the values changes as the model moves along v
    (Pearlmutter 1994). So two plain backward passes serve in place of one through another, which
    for GroupNorm and pooling costs more than twice as much. Each unit of ReLU stays as it is during
    the move, as in the exact derivative. The error is below a hundredth of its length.

    Args:
        body: the network.
        parameters: of the model, by name.
        sets: records with one gradient each: all together, or those of one class.
        change: augmentation of the values.
        difference: takes the gradients of all sets, parameter by parameter; differentiable.

    Returns:
        The difference, and its derivative (n, ...) by the values of all sets.

    Source: Pearlmutter 1994.
    """
    model = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    size = 1 + _norm(parameters.values())
    gradients: list[Tensor] = []
    befores, holds = [], []
    for records in sets:
        with _held_units(body) as units:
            *mine, before = _slopes(body, model, records, change, list(model.values()))
        gradients += mine
        befores.append(before)
        holds.append(units)
    for part in gradients:
        part.requires_grad_()
    wrong = difference(gradients)
    directions = torch.autograd.grad(wrong, gradients)
    slopes = []
    for index, (records, before, units) in enumerate(zip(sets, befores, holds, strict=True)):
        along = directions[index * len(model) : (index + 1) * len(model)]
        far = MOVE * size / _norm(along).clamp_min(1e-30)
        moved = {
            name: tensor + far * by
            for (name, tensor), by in zip(parameters.items(), along, strict=True)
        }
        with _held_units(body, units):
            (after,) = _slopes(body, moved, records, change, [])
        slopes.append((after - before) / far)
    return float(wrong.detach()), torch.cat(slopes)


def _slopes(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    asked: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Derivatives of the loss by the parameters `asked`, and by the values before their change."""
    values = records.values.detach().requires_grad_()
    total = loss(
        body, parameters, LandscapeRecords(change(values), records.labels, records.weights)
    )
    return torch.autograd.grad(total, [*asked, values])


@contextmanager
def _held_units(
    body: nn.Module, units: dict[nn.Module, Tensor] | None = None
) -> Iterator[dict[nn.Module, Tensor]]:
    """Record which units of each ReLU pass their inputs on; with `units`, these do, whatever their
    inputs.
    """
    kept: dict[nn.Module, Tensor] = {} if units is None else units

    def hold(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if units is not None:
            return inputs[0] * units[layer]  # type: ignore[no-any-return]
        kept[layer] = (output > 0).to(output)
        return None

    handles = [
        layer.register_forward_hook(hold) for layer in body.modules() if isinstance(layer, nn.ReLU)
    ]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.detach().square().sum() for tensor in tensors]).sum().sqrt()
