"""The derivative of gradient matching, against a backward pass through a backward pass in 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.fedlap.statistics import (
    CLASS_GRADIENTS,
    matching_slope,
    real_class_gradients,
)
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, gradient, loss, mismatch
from fedsurrogate.common.models.networks import convnet, linear, mlp, parameters_of, split_input
from fedsurrogate.common.models.training_parts import Change, draw

LABELS = torch.arange(12) % 3
NETWORKS = {"convnet": convnet(256, 4, 16), "mlp": mlp(256, 4, 16), "linear": linear(256, 4)}


def records(body: nn.Module, seed: int, dtype: torch.dtype = torch.float64) -> LandscapeRecords:
    shape = (
        (12, 1, 16, 16)
        if isinstance(body[0] if isinstance(body, nn.Sequential) else body, nn.Conv2d)
        else (12, 256)
    )
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return LandscapeRecords.evenly(values.to(dtype), LABELS)


def exact(
    body: nn.Module, model: dict[str, Tensor], mine: LandscapeRecords, target: Any, change: Change
) -> tuple[Any, Any]:
    at = {name: tensor.detach().requires_grad_() for name, tensor in model.items()}
    values = mine.values.clone().requires_grad_()
    found = loss(body, at, LandscapeRecords(change(values), mine.labels, mine.weights))
    wrong = mismatch(torch.autograd.grad(found, list(at.values()), create_graph=True), target, 0.1)
    return float(wrong.detach()), torch.autograd.grad(wrong, [values])[0]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("augment", ["", "colour", "rotate"])
def test_the_slope_in_32_bits_is_the_exact_derivative(kind: str, augment: str) -> None:
    if augment and kind != "convnet":
        pytest.skip("only images are changed")
    module = NETWORKS[kind]
    body, _ = split_input(module, torch.zeros(1, 256))
    change = draw((augment,) if augment else (), torch.Generator().manual_seed(2))
    model = {name: tensor.double() for name, tensor in parameters_of(module).items()}
    body = body.double()
    target = list(gradient(body, model, records(body, 1), change).values())
    wanted, slope = exact(body, model, records(body, 2), target, change)
    single = {name: tensor.float() for name, tensor in model.items()}
    goal = [tensor.float() for tensor in target]
    mine = records(body, 2, torch.float32)
    found, ours = matching_slope(
        body.float(), single, [mine], change, lambda a: mismatch(a, goal, 0.1)
    )
    assert found == pytest.approx(wanted, rel=1e-4)
    assert float((ours - slope).norm() / slope.norm()) < 1e-2
    assert not any(layer._forward_hooks for layer in body.modules()), "the network is as before"


def test_slopes_by_class_come_in_the_order_of_the_records() -> None:
    module = NETWORKS["mlp"]
    body, _ = split_input(module.float(), torch.zeros(1, 256))
    model = parameters_of(module)
    change = draw((), torch.Generator())
    real = list(real_class_gradients(body, model, records(body, 1, torch.float32), change).values())
    mine = records(body, 2, torch.float32)
    order = LABELS.argsort(stable=True)
    found, slope = CLASS_GRADIENTS.slope(body, model, mine, change, real, 0.1, 0.0)
    assert not mine.values.requires_grad, "the records stay as they are"
    assert not any(tensor.requires_grad for tensor in model.values())
    same, by_class = CLASS_GRADIENTS.slope(body, model, mine.take(order), change, real, 0.1, 0.0)
    assert found == pytest.approx(same, rel=1e-5)
    assert torch.allclose(slope[order], by_class, atol=1e-5 * float(slope.abs().max()))
