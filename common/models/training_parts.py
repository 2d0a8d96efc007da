"""Parts of training: optimisers of torch without its compiler, training of a linear head, and
differentiable augmentation (Zhao & Bilen 2021).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..settings import HeadSettings


COMPILER = "torch._dynamo"


class _Uncompiled(torch.optim.Optimizer):
    """Calls torch's methods without what wraps them for the compiler, unless it is loaded anyway."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        _plain(super().add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        _plain(super().zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        state: dict[str, Any] = _plain(super().state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        _plain(super().load_state_dict)(self, state_dict)

    def step(self, closure: Any = None) -> Any:
        """As torch's."""
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return _plain(super().step)(self, closure)


class UncompiledSGD(_Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD`."""


class UncompiledAdam(_Uncompiled, torch.optim.Adam):
    """`torch.optim.Adam`."""


def _plain(method: Any) -> Callable[..., Any]:
    """The function of a bound method, without the compiler's wrappers if that is not loaded."""
    function: Callable[..., Any] = method.__func__
    return function if COMPILER in sys.modules else inspect.unwrap(function)


Batch = tuple[Tensor, Tensor]


def train_head(
    batches: Iterable[Batch],
    steps: int,
    mean: Tensor,
    variance: Tensor,
    classes: int,
    settings: HeadSettings,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train softmax regression on standardised features.

    The standardisation is folded into the result, so the scale of the features has no effect. Adam
    starts from zero weights at `settings.rate(d)`, which a cosine anneals to zero over `steps`
    batches.

    Args:
        batches: features (n, d), and the second argument of `loss`: labels, or class probabilities.
        steps: number of batches.
        mean: by which features are standardised, (d,).
        variance: by which features are standardised, (d,).
        classes: of the head.
        settings: of the training.
        loss: of logits (n, classes) and the second part of a batch.

    Returns:
        Weight (classes, d) and bias (classes,).
    """
    deviation = variance.sqrt()
    # Features that are constant except for rounding get no weight: Adam would turn the rounding
    # into full-size steps.
    constant = deviation <= 1e-6 * torch.maximum(deviation.max(), mean.abs())
    deviation = deviation.masked_fill(constant, torch.inf)
    weight = torch.zeros(classes, len(mean), device=mean.device, requires_grad=True)
    bias = torch.zeros(classes, device=mean.device, requires_grad=True)
    optimiser = UncompiledAdam([weight, bias], lr=settings.rate(len(mean)), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    for features, labels in batches:
        # Standardising the weights instead of every batch gives the same logits with a hundredth of
        # the work.
        scaled = weight / deviation
        logits = torch.addmm(bias - scaled @ mean, features, scaled.T)
        optimiser.zero_grad()
        loss(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    final = (weight / deviation).detach()
    return final, bias.detach() - final @ mean


def shuffled_batches(
    features: Tensor, labels: Tensor, size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """One pass over records in random order.

    Args:
        features: (n, d).
        labels: (n, ...).
        size: records of a batch; the last one may have fewer.
        generator: of the order.
    """
    for rows in torch.split(
        torch.randperm(len(labels), generator=generator).to(labels.device), size
    ):
        yield features[rows], labels[rows]


def train_on_features(
    features: Tensor,
    targets: Tensor,
    classes: int,
    settings: HeadSettings,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train the same head as `train_head` on features held in memory.

    Args:
        features: (n, d).
        targets: labels, or other targets that `loss` takes, (n, ...).
        classes: of the head.
        settings: of the training.
        seed: of the order of the records.
        loss: of logits (n, classes) and targets.

    Returns:
        Weight (classes, d) and bias (classes,). Without records the head is zero: it gives all
        classes the same score.

    Example:
        >>> from fedsurrogate.common.settings import HeadSettings
        >>> features = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 8)
        >>> labels = torch.tensor([0, 1] * 8)
        >>> weight, bias = train_on_features(features, labels, 2, HeadSettings(), seed=0)
        >>> (features @ weight.T + bias).argmax(1).equal(labels)
        True
    """
    if not len(targets):
        none = features.new_zeros(classes, features.shape[1] + 1).float()
        return none[:, 1:], none[:, 0]
    generator = torch.Generator().manual_seed(seed)
    features = features.float()
    per_pass = -(-len(targets) // settings.batch_size)
    passes = settings.passes(per_pass)
    batches = (
        batch
        for _ in range(passes)
        for batch in shuffled_batches(features, targets, settings.batch_size, generator)
    )
    mean, variance = features.mean(0), features.var(0, correction=0)
    return train_head(batches, passes * per_pass, mean, variance, classes, settings, loss)


# The strengths that FedLAP's code uses.
BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
SHIFT, HOLE, LARGEST_SCALE, LARGEST_ANGLE = 0.125, 0.5, 1.2, 15.0

Change = Callable[[Tensor], Tensor]


def draw(names: Sequence[str], generator: torch.Generator) -> Change:
    """A random augmentation with random parameters.

    The parameters are the same for the whole batch, so the change of a record depends on no other
    record.

    Args:
        names: of the augmentations to choose from.
        generator: of the choice and the parameters. It must not be the one for privacy noise.

    Returns:
        A differentiable function of images (n, c, s, s) to the same shape; the identity if `names`
        is empty.

    Source:
        Zhao & Bilen 2021.

    Example:
        >>> change = draw(["crop"], torch.Generator().manual_seed(0))
        >>> tuple(change(torch.zeros(2, 3, 8, 8)).shape)
        (2, 3, 8, 8)
    """
    if not names:
        return lambda images: images
    name = names[int(torch.randint(len(names), (1,), generator=generator))]
    u, v, w = (torch.rand(3, generator=generator) - 0.5).tolist()
    match name:
        case "colour":
            return lambda images: _colour(images, u, v, w)
        case "crop":
            return lambda images: _shift(images, u, v)
        case "cutout":
            return lambda images: _cutout(images, u, v)
        case "flip":
            return lambda images: images.flip(-1) if u < 0 else images
        case "scale":
            across, along = (LARGEST_SCALE ** (2 * each) for each in (u, v))
            return lambda images: _warp(images, [[across, 0.0, 0.0], [0.0, along, 0.0]])
        case _:
            angle = math.radians(2 * u * LARGEST_ANGLE)
            sine, cosine = math.sin(angle), math.cos(angle)
            return lambda images: _warp(images, [[cosine, -sine, 0.0], [sine, cosine, 0.0]])


def draws(names: Sequence[str], generator: torch.Generator) -> Iterator[Change]:
    """An endless stream of random changes.

    Args:
        names: as in `draw`.
        generator: as in `draw`.
    """
    while True:
        yield draw(names, generator)


def _colour(images: Tensor, brightness: float, saturation: float, contrast: float) -> Tensor:
    images = images + brightness * BRIGHTNESS
    grey = images.mean(1, keepdim=True)
    images = (images - grey) * ((saturation + 0.5) * SATURATION) + grey
    mean = images.mean((1, 2, 3), keepdim=True)
    return (images - mean) * (contrast + CONTRAST) + mean


def _shift(images: Tensor, across: float, along: float) -> Tensor:
    """Shift by up to an eighth of the side in each direction; new pixels are zero, the mean grey."""
    side = images.shape[-1]
    most = int(side * SHIFT + 0.5)
    dx, dy = (round(2 * each * most) for each in (across, along))
    padded = torch.nn.functional.pad(images, (most,) * 4)
    return padded[..., most + dy : most + dy + side, most + dx : most + dx + side]


def _cutout(images: Tensor, across: float, along: float) -> Tensor:
    """Set a square of half the side to zero."""
    side = images.shape[-1]
    half = int(side * HOLE / 2 + 0.5)
    column, row = (int((each + 0.5) * side) for each in (across, along))
    mask = torch.ones(side, side, device=images.device, dtype=images.dtype)
    mask[max(0, row - half) : row + half, max(0, column - half) : column + half] = 0
    return images * mask


def _warp(images: Tensor, matrix: list[list[float]]) -> Tensor:
    theta = torch.tensor(matrix, device=images.device, dtype=images.dtype).expand(len(images), 2, 3)
    grid = torch.nn.functional.affine_grid(theta, list(images.shape), align_corners=True)
    return torch.nn.functional.grid_sample(images, grid, align_corners=True)
