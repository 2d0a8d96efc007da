"""Preprocessing of an image to the input tensor of a backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import DataError


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the input of a backbone: resize, cut the centre square, subtract `mean`,
    divide by `std`.

    Attributes:
        resize: pixels of the shorter side.
        crop: pixels of the centre square's side; 0 keeps the image.
        interpolation: of the resizing.
        mean: of each channel.
        std: of each channel.
        squash: resize the whole image to the square instead.
        grey: drop colour.
    """

    resize: int = 0
    crop: int = 0
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    squash: bool = False
    grey: bool = False

    def __call__(self, image: Image.Image) -> Tensor:
        """Return (3, height, width) float32, stored channels last."""
        return self.normalised(self.pixels(image))

    def pixels(self, image: Image.Image) -> Tensor:
        """The image before it is normalised, a quarter of the bytes.

        Returns:
            (3, height, width) uint8, stored channels last.
        """
        if self.crop:
            # Resizing only the box that the crop keeps gives the same pixels in three quarters of
            # the time.
            resample = Image.Resampling[self.interpolation.upper()]
            image = image.resize(
                (self.crop, self.crop), resample, box=self._box(*image.size), reducing_gap=3.0
            )
        if self.grey:
            image = image.convert("L")
        pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def normalised(self, pixels: Tensor) -> Tensor:
        """What a backbone takes.

        Both steps round each number by itself, so the result has the same bits on every device.

        Args:
            pixels: (..., 3, height, width) uint8, on any device.

        Returns:
            In the same shape, float32, on the same device.
        """
        scale, offset = _scale_and_offset(self.mean, self.std, pixels.device)
        return pixels.float().mul_(scale).sub_(offset)

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        if self.squash:
            return 0.0, 0.0, float(width), float(height)
        shorter = min(width, height)
        sides: list[tuple[float, float]] = []
        for side in (width, height):
            resized = side * self.resize // shorter
            start = round((resized - self.crop) / 2)
            sides.append((start * side / resized, (start + self.crop) * side / resized))
        (left, right), (top, bottom) = sides
        return left, top, right, bottom


@lru_cache(64)
def _scale_and_offset(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and mean / std of each channel, (3, 1, 1) float32; once a device, because a copy
    of a few bytes to a GPU takes as long as the work.
    """
    deviations = np.array(std, dtype=np.float32)
    columns = 1 / (255 * deviations), np.array(mean, dtype=np.float32) / deviations
    scale, offset = (torch.from_numpy(each)[:, None, None].to(device) for each in columns)
    return scale, offset


@dataclass(frozen=True)
class OwnTransform:
    """The transform of an own backbone.

    Attributes:
        function: from an RGB image to a tensor (channels, height, width).
        resize: 0, because only the function knows the size that it needs; so images are never
            decoded smaller.
    """

    function: Callable[[Any], Any]
    resize: int = 0

    def __call__(self, image: Image.Image) -> Tensor:
        """Return (channels, height, width) float32.

        Raises:
            DataError: for anything else than such a tensor.
        """
        prepared = self.function(image)
        if not isinstance(prepared, Tensor) or prepared.ndim != 3:
            what = (
                f"shape {tuple(prepared.shape)}"
                if isinstance(prepared, Tensor)
                else type(prepared).__name__
            )
            raise DataError(
                f"the transform of the backbone returns {what}; it must be a tensor (channels, "
                "height, width)"
            )
        return prepared.detach().float()
