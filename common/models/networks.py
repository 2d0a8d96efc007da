"""Small networks that sites train together: a linear layer, a hidden-layer network, and FedLAP's
ConvNet on flat images.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import LARGEST_DIMENSION, ConfigError, SurrogateError
from ..privacy.gaussian_mechanism import clip_rows

if TYPE_CHECKING:
    from ..settings import Model
    from ..targets.target import Objective


BLOCKS = 3
WIDEST = 1024
# Prefix of the names of the last layer's parameters.
HEAD = "linear."
# Parameters of linear models that features do not multiply.
OFFSETS = ("bias", "levels.weight")
# Pixels are between 0 and 1. These public constants scale them to about mean zero and deviation
# one.
PIXEL_MEAN, PIXEL_DEVIATION = 0.5, 0.25


class Normalise(nn.Module):
    """Normalise features (n, d), each to mean zero and deviation one over its own entries; other
    records have no effect.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Features of norm sqrt(d)."""
        return nn.functional.layer_norm(features, features.shape[1:])


class Standardise(nn.Module):
    """Convert pixels (n, d) to images (n, channels, size, size) of about mean 0 and deviation 1.

    Args:
        channels: of an image.
        size: side of an image, in pixels.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.shape = (channels, size, size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Images of flat pixels."""
        return ((pixels - PIXEL_MEAN) / PIXEL_DEVIATION).reshape(-1, *self.shape)


def linear(inputs: int, classes: int) -> nn.Module:
    """A linear layer that starts at zero: softmax regression has one minimum, so the start has no
    effect.

    Args:
        inputs: dimension of the features.
        classes: number of classes.
    """
    layer = nn.Linear(inputs, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Levelled(nn.Module):
    """One linear score of the features, and a level for each output: outputs are their sums.

    The levels are a layer too, whose input is one, so that all parameters belong to linear layers.

    Args:
        inputs: dimension of the features.
        levels: at the start.
    """

    def __init__(self, inputs: int, levels: Sequence[float]) -> None:
        super().__init__()
        self.score = nn.Linear(inputs, 1, bias=False)
        self.levels = nn.Linear(1, len(levels), bias=False)
        nn.init.zeros_(self.score.weight)
        with torch.no_grad():
            self.levels.weight.copy_(torch.tensor(levels)[:, None])

    def forward(self, features: Tensor) -> Tensor:
        """Outputs (n, o) of features (n, d)."""
        score = self.score(features)
        outputs: Tensor = score + self.levels(torch.ones_like(score))
        return outputs


def of_target(objective: Objective, inputs: int) -> nn.Module:
    """The linear model of another target than classes, before training.

    Args:
        objective: of the target.
        inputs: dimension of the features.

    Example:
        >>> from fedsurrogate.common.targets.time import Time
        >>> model = of_target(Time(("t", "e"), (0.0, 1.0, 2.0)).objective(), inputs=3)
        >>> {name: tuple(each.shape) for name, each in parameters_of(model).items()}
        {'score.weight': (1, 3), 'levels.weight': (2, 1)}
    """
    if objective.levels:
        return Levelled(inputs, objective.levels)
    return linear(inputs, objective.outputs)


def mlp(inputs: int, classes: int, width: int, seed: int = 0) -> nn.Module:
    """A network with one hidden layer of ReLU units on normalised features.

    Args:
        inputs: dimension of the features.
        classes: number of classes.
        width: units of the hidden layer.
        seed: the same one gives the same parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden, out = nn.Linear(inputs, width), nn.Linear(width, classes)
    return nn.Sequential(
        OrderedDict(features=Normalise(), hidden=hidden, relu=nn.ReLU(), linear=out)
    )


def convnet(inputs: int, classes: int, width: int, seed: int = 0) -> nn.Module:
    """FedLAP's ConvNet on flat square images: three times convolution, GroupNorm, ReLU and pooling,
    then a linear layer.

    The first convolution pads sizes that are no multiple of 8: 28 to 32 (MNIST). 320,010 parameters
    for width 128, 3 x 32 x 32 and ten classes; 317,706 for grey 28 x 28.

    Args:
        inputs: channels x size x size, grey or RGB.
        classes: number of classes.
        width: channels of each convolution.
        seed: the same one gives the same parameters.

    Raises:
        ConfigError: for inputs that are no square image, or one with an odd side.

    Source:
        FedLAP-DP, appendix, but with one linear layer as in its code, not two as in its text.

    Example:
        >>> network = convnet(inputs=64, classes=3, width=4)
        >>> tuple(network(torch.zeros(2, 64)).shape)
        (2, 3)
    """
    channels, size = image_shape(inputs)
    padded = max(8, -(-size // 8) * 8)
    if (padded - size) % 2:
        raise ConfigError(
            f"images of {size} x {size}: the side must be even; set image-size to {size + 1}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(images=Standardise(channels, size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in range(BLOCKS):
            before, padding = (channels, 1 + (padded - size) // 2) if block == 0 else (width, 1)
            layers[f"convolution{block + 1}"] = nn.Conv2d(before, width, 3, padding=padding)
            layers[f"norm{block + 1}"] = nn.GroupNorm(width, width)
            layers[f"relu{block + 1}"] = nn.ReLU()
            layers[f"pool{block + 1}"] = nn.AvgPool2d(2)
        layers["flat"] = nn.Flatten()
        layers["linear"] = nn.Linear(width * (padded // 8) ** 2, classes)
    return nn.Sequential(layers)


def image_shape(inputs: int) -> tuple[int, int]:
    """Channels and side of square images.

    Args:
        inputs: pixels in all channels.

    Raises:
        ConfigError: if no square image has so many.

    Example:
        >>> image_shape(784), image_shape(3072)
        ((1, 28), (3, 32))
    """
    for channels in (1, 3):
        size = math.isqrt(inputs // channels)
        if channels * size * size == inputs:
            return channels, size
    raise ConfigError(
        f"features of dimension {inputs} are no square images; a convnet needs backbone = 'pixels' "
        "or 'pixels:rgb', and image-size"
    )


def build(kind: Model, inputs: int, classes: int, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A network with the shape of `tensors`, without their values.

    Args:
        kind: of the network.
        inputs: dimension of the features.
        classes: number of classes.
        tensors: parameters by name.

    Raises:
        SurrogateError: for tensors that are not a network's of this kind and these sizes.
    """
    return fresh(kind, inputs, classes, check_parameters(kind, inputs, classes, tensors))


def check_parameters(kind: Model, inputs: int, classes: int, tensors: Mapping[str, Tensor]) -> int:
    """Check that tensors are the parameters of a network, without memory for the network.

    Args:
        kind: of the network.
        inputs: stated dimension of the features; any number.
        classes: number of classes.
        tensors: parameters by name, of any shapes.

    Returns:
        The network's width.

    Raises:
        SurrogateError: for other names or shapes, or a network that cannot be.
    """
    if not 0 < inputs <= LARGEST_DIMENSION or not classes:
        raise SurrogateError(
            f"a {kind} of {str(inputs)[:20]} inputs for {classes} classes; 1 to "
            f"{LARGEST_DIMENSION} inputs and one class or more are allowed"
        )
    first = tensors.get({"mlp": "hidden.weight", "convnet": "convolution1.weight"}.get(kind, ""))
    width = len(first) if first is not None and first.dim() else 0
    if kind != "linear" and not 0 < width <= WIDEST:
        raise SurrogateError(f"a {kind} without a first layer, or wider than {WIDEST}")
    try:
        # On this device tensors have shapes and no memory: a few bytes may state any sizes.
        with torch.device("meta"):
            wanted = {
                name: parameter.shape
                for name, parameter in fresh(kind, inputs, classes, width).named_parameters()
            }
    except ConfigError as error:
        raise SurrogateError(f"a {kind} that cannot be built ({error})") from None
    if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
        raise SurrogateError(
            f"a {kind} whose tensors do not fit {classes} classes and {inputs} inputs"
        )
    return width


def fresh(kind: Model, inputs: int, classes: int, width: int, seed: int = 0) -> nn.Module:
    """A network before training.

    Args:
        kind: of the network.
        inputs: dimension of the features.
        classes: number of classes.
        width: units of the hidden layer, or channels of each convolution; a linear layer has none.
        seed: the same one gives the same parameters.

    Raises:
        ConfigError: for inputs that a convnet does not support.
    """
    match kind:
        case "linear":
            return linear(inputs, classes)
        case "mlp":
            return mlp(inputs, classes, width, seed)
        case "convnet":
            return convnet(inputs, classes, width, seed)


def split_input(module: nn.Module, features: Tensor) -> tuple[nn.Module, Tensor]:
    """Split off a network's fixed first step.

    A linear layer has no such step; its features are normalised to norm one.

    Args:
        module: the network.
        features: (n, d).

    Returns:
        The rest of the network, with the same parameter names, and the features after that step,
        (n, d) or images.
    """
    if isinstance(module, nn.Sequential):
        return module[1:], module[0](features)
    return module, clip_rows(features, 0.0).to(features)


def body_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters below a network's last layer, its head; none for a linear layer, which is all
    head.
    """
    return {
        name: tensor
        for name, tensor in tensors.items()
        if "." in name and not name.startswith(HEAD)
    }


def embed(module: nn.Module, tensors: Mapping[str, Tensor], values: Tensor) -> Tensor:
    """The inputs of a network's head.

    Args:
        module: the network without its fixed first step, see `split_input`.
        tensors: parameters by name.
        values: of records, after that step, (n, ...).

    Returns:
        The inputs (n, width); for a linear layer the values (n, d) themselves.
    """
    if not isinstance(module, nn.Sequential):
        return values
    embedded: Tensor = torch.func.functional_call(module[:-1], body_of(tensors), (values,))
    return embedded


def run_network(module: nn.Module, tensors: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Logits of features, without gradients.

    Args:
        module: the network.
        tensors: its parameters by name.
        features: (n, d).

    Returns:
        Logits (n, C).
    """
    with torch.no_grad():
        logits: Tensor = torch.func.functional_call(module, dict(tensors), (features,))
    return logits


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, copied."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
