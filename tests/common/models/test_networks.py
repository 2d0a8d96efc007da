"""The networks that sites train together, and optimisers without torch's compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.networks import (
    convnet,
    image_shape,
    linear,
    parameters_of,
    run_network,
)
from fedsurrogate.common.models.training_parts import UncompiledAdam, UncompiledSGD


@pytest.mark.parametrize(("inputs", "count"), [(3 * 32 * 32, 320_010), (28 * 28, 317_706)])
def test_the_convnet_has_the_papers_number_of_parameters(inputs: int, count: int) -> None:
    module = convnet(inputs, 10, 128)
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    assert module(torch.rand(2, inputs)).shape == (2, 10)


def test_the_same_seed_gives_the_same_parameters_and_leaves_other_randomness_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first, again, other = (parameters_of(convnet(64, 10, 8, seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["linear.weight"], other["linear.weight"])


def test_a_network_runs_under_other_parameters_than_its_own() -> None:
    module = linear(4, 3)
    tensors = {"weight": torch.ones(3, 4), "bias": torch.arange(3.0)}
    assert torch.equal(
        run_network(module, tensors, torch.ones(1, 4)), torch.tensor([[4.0, 5.0, 6.0]])
    )
    assert float(module.weight.abs().sum()) == 0


def test_pixels_keep_their_place_in_the_image() -> None:
    images = convnet(3 * 8 * 8, 10, 4).images
    pixels = torch.rand(2, 3 * 8 * 8)
    assert torch.allclose(images(pixels), (pixels.reshape(2, 3, 8, 8) - 0.5) / 0.25)


@pytest.mark.parametrize("inputs", [1280, 2, 3 * 8 * 9])
def test_features_that_are_no_square_image_are_refused(inputs: int) -> None:
    with pytest.raises(ConfigError, match="no square images"):
        image_shape(inputs)


def test_an_odd_side_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="set image-size to 28"):
        convnet(27 * 27, 10, 4)


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
