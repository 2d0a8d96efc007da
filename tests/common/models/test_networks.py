"""The networks that sites train together."""

import pytest
import torch

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.networks import (
    convnet,
    image_shape,
    linear,
    parameters_of,
    run_network,
)


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
