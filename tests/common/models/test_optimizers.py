"""Optimisers without torch's compiler: the same steps, and no import of it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedsurrogate.common.models.training_parts import UncompiledAdam, UncompiledSGD

PAIRS = [
    (UncompiledSGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (UncompiledAdam, torch.optim.Adam, {}),
    (UncompiledAdam, torch.optim.Adam, {"fused": True}),
]


def trained(kind: type[torch.optim.Optimizer], options: dict[str, object]) -> list[torch.Tensor]:
    """Parameters after steps under a schedule, continued from a stored state half-way."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, generator=generator).requires_grad_() for _ in range(2)]

    def made() -> torch.optim.Optimizer:
        groups = [{"params": values[:1], "lr": 0.01}, {"params": values[1:]}]
        return kind(groups, lr=0.02, **options)  # type: ignore[call-arg]

    optimiser = made()
    for step in range(10):
        if step == 5:
            state = optimiser.state_dict()
            optimiser = made()
            optimiser.load_state_dict(state)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 2)
        optimiser.zero_grad()
        sum(each.pow(4).sum() + each.sum() for each in values).backward()  # type: ignore[union-attr]
        optimiser.step()
        schedule.step()
    return values


@pytest.mark.parametrize(("own", "torchs", "options"), PAIRS)
def test_steps_are_those_of_torch_bit_by_bit(
    own: type[torch.optim.Optimizer],
    torchs: type[torch.optim.Optimizer],
    options: dict[str, object],
) -> None:
    for mine, theirs in zip(trained(own, options), trained(torchs, options), strict=True):
        assert torch.equal(mine, theirs)


def test_a_closure_is_called_with_gradients() -> None:
    value = torch.ones(2).requires_grad_()
    optimiser = UncompiledSGD([value], lr=0.5)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        (loss := value.square().sum()).backward()
        return loss

    assert optimiser.step(closure).item() == 2.0
    assert value.tolist() == [0.0, 0.0]


def test_the_compiler_is_not_imported() -> None:
    code = (
        "import sys, torch\n"
        "from fedsurrogate.common.models import training_parts as own\n"
        "for kind in (own.UncompiledSGD, own.UncompiledAdam):\n"
        "    layer = torch.nn.Linear(2, 2)\n"
        "    optimiser = kind(layer.parameters(), lr=0.1)\n"
        "    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 3)\n"
        "    layer(torch.ones(1, 2)).sum().backward()\n"
        "    optimiser.step(); schedule.step(); optimiser.zero_grad(); optimiser.state_dict()\n"
        "assert own.COMPILER not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compiled_step_still_works_where_the_compiler_is_loaded() -> None:
    layer = nn.Linear(2, 2)
    optimiser = UncompiledSGD(layer.parameters(), lr=0.1)
    step = torch.compile(lambda: optimiser.step(), backend="eager")
    layer(torch.ones(1, 2)).sum().backward()  # type: ignore[no-untyped-call]
    before = layer.bias.detach().clone()
    step()
    assert torch.allclose(layer.bias, before - 0.1)
