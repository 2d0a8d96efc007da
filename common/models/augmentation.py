"""Differentiable augmentation (Zhao & Bilen 2021): one random change per batch, the same for real
and synthetic images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

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
