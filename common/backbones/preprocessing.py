"""Preprocessing of an image to the input tensor of a backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.errors import DataError


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
        if self.crop:
            # Resizing only the box that the crop keeps gives the same pixels in three quarters of
            # the time.
            resample = Image.Resampling[self.interpolation.upper()]
            image = image.resize(
                (self.crop, self.crop), resample, box=self._box(*image.size), reducing_gap=3.0
            )
        if self.grey:
            image = image.convert("L")
        pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"), dtype=np.float32)
        std = np.array(self.std, dtype=np.float32)
        pixels *= 1 / (255 * std)
        pixels -= np.array(self.mean, dtype=np.float32) / std
        return torch.from_numpy(pixels).permute(2, 0, 1)

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
