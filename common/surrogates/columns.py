"""The frame of features: for each column an offset that is subtracted, and a scale that divides.

Tables travel at 16 bits with one scale. A column that is far from zero, or much larger or smaller
than others, would leave the others nothing but rounding. In a frame all columns have the same size.
A header has a frame in bytes, so that headers stay comparable; most have none.

The public map of a secure sum: features x become projection @ (x - centre) before all else. No
site's data are in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.ranges import ranges

# Sizes of the numbers in a frame, beyond which a difference in single precision is not finite.
LARGEST, SMALLEST = 1e37, 1e-37
# Of the offset and the scale of one column.
BYTES = 8


@dataclass(frozen=True)
class Frame:
    """Offsets and scales of d columns.

    Attributes:
        offset: (d,), float64, of numbers in single precision.
        scale: (d,), the same, zero or more; zero for a column that does not vary, which is only
            shifted.

    Example:
        >>> frame = Frame(torch.tensor([100.0, 5.0]), torch.tensor([10.0, 0.0]))
        >>> frame.apply(torch.tensor([[120.0, 5.0]])).tolist()
        [[2.0, 0.0]]
        >>> Frame.of(frame.packed()).scale.tolist()
        [10.0, 0.0]
    """

    offset: Tensor
    scale: Tensor

    @property
    def divisor(self) -> Tensor:
        """What divides each column, (d,): its scale, or one if it does not vary."""
        return torch.where(self.scale > 0, self.scale, 1.0)

    def apply(self, features: Tensor) -> Tensor:
        """Features (n, d) in this frame, in single precision.

        Raises:
            SurrogateError: for features of another dimension.
        """
        self.check(features.shape[1])
        to = features.device
        return (features.float() - self.offset.float().to(to)) / self.divisor.float().to(to)

    def check(self, dimension: int) -> None:
        """Raise SurrogateError unless the frame is of features of this dimension."""
        if len(self.offset) != dimension:
            raise SurrogateError(
                f"a frame of {len(self.offset)} columns for features of dimension {dimension}"
            )

    def packed(self) -> bytes:
        """All offsets, then all scales, as 32-bit numbers, little endian."""
        return torch.cat([self.offset, self.scale]).numpy().astype("<f4").tobytes()

    @classmethod
    def of(cls, packed: bytes) -> Frame:
        """Parse bytes of `packed`.

        Raises:
            SurrogateError: for bytes that are no frame.
        """
        whole = np.frombuffer(packed[: len(packed) // BYTES * BYTES], dtype="<f4")
        with np.errstate(invalid="ignore"):
            numbers = torch.from_numpy(whole.astype(np.float64))
        offset, scale = numbers.chunk(2) if packed else (numbers, numbers)
        sound = (offset.abs() <= LARGEST) & (scale <= LARGEST)
        if not packed or len(packed) % BYTES or not sound.all():
            raise SurrogateError(f"{len(packed)} bytes that are no frame of columns")
        if not ((scale == 0) | (scale >= SMALLEST)).all():
            raise SurrogateError("a frame of columns with a scale below zero, or too small")
        return cls(offset, scale)


def in_frame(features: Tensor, frame: bytes) -> Tensor:
    """Features in the frame of a header.

    Args:
        features: (n, d).
        frame: in bytes; empty for none.

    Returns:
        Features (n, d), float32; unchanged without a frame.
    """
    return Frame.of(frame).apply(features) if frame else features


def public_frame(text: str, dimension: int, private: bool) -> bytes:
    """The frame in which public ranges of columns become [-1, 1].

    Args:
        text: of `features.ranges`; empty for none.
        dimension: d.
        private: whether features are clipped: a record whose features all lie in their ranges then
            has norm one at most.

    Returns:
        The frame in bytes; empty without ranges.

    Raises:
        ConfigError: for ranges of another number of columns, or beyond single precision.

    Example:
        >>> frame = Frame.of(public_frame("0,10; 4,8", 2, private=False))
        >>> frame.offset.tolist(), frame.scale.tolist()
        ([5.0, 6.0], [5.0, 2.0])
    """
    given = ranges(text)
    if not given:
        return b""
    if len(given) not in (1, dimension):
        raise ConfigError(
            f"features.ranges has {len(given)} ranges for {dimension} features; give one for each, "
            "in their order, or one for all"
        )
    low, high = torch.tensor(given, dtype=torch.float64).expand(dimension, 2).T
    widest = math.sqrt(dimension) if private else 1.0
    frame = Frame(low / 2 + high / 2, widest * (high / 2 - low / 2))
    within = (frame.offset.abs() <= LARGEST) & (frame.scale >= SMALLEST) & (frame.scale <= LARGEST)
    if not within.all():
        raise ConfigError(
            f"features.ranges = {text[:100]!r} is beyond {SMALLEST:g} to {LARGEST:g}, the numbers of "
            "single precision; use other units"
        )
    return frame.packed()


def common_frame(frames: Sequence[bytes]) -> bytes:
    """The frame of all sites together: the median offset and scale of each column.

    A frame that few sites have is no reason to change what the others sent: it could be a lie.

    Args:
        frames: of the sites; empty for one without.

    Returns:
        The frame; empty if most sites have none.

    Example:
        >>> wide, far = (Frame(torch.tensor([x]), torch.tensor([1.0])).packed() for x in (1.0, 9.0))
        >>> common_frame([wide, wide, far]) == wide, common_frame([far, b"", b""])
        (True, b'')
    """
    known = [Frame.of(frame) for frame in frames if frame]
    if not known or 2 * len(known) < len(frames):
        return b""
    scales = torch.stack([frame.scale for frame in known])
    scale = scales.masked_fill(scales == 0, torch.nan).nanmedian(0).values.nan_to_num(0.0)
    offset = torch.stack([frame.offset for frame in known]).median(0).values
    # Numbers of single precision stay so: a median is one of them.
    return Frame(offset.clamp(-LARGEST, LARGEST), scale.clamp_max(LARGEST)).packed()


@dataclass(frozen=True)
class PublicMap:
    """The map from features x to projection @ (x - centre).

    Attributes:
        projection: (k, d); None if there is none.
        centre: (d,); None if there is none.

    Example:
        >>> public = PublicMap(torch.tensor([[1.0, 1.0]]), torch.tensor([1.0, 2.0]))
        >>> public.apply(torch.tensor([[1.0, 2.0], [4.0, 6.0]])).tolist()
        [[0.0], [7.0]]
    """

    projection: Tensor | None = None
    centre: Tensor | None = None

    def apply(self, features: Tensor) -> Tensor:
        """The mapped features.

        Args:
            features: (n, d).

        Returns:
            Features (n, k); (n, d) without a projection.

        Raises:
            SurrogateError: for a map of another dimension. The error depends on the request and the
                backbone only.
        """
        for what, part in (("centre", self.centre), ("projection", self.projection)):
            if part is not None and part.shape[-1] != features.shape[1]:
                raise SurrogateError(
                    f"a {what} of {part.shape[-1]} dimensions; features here have "
                    f"{features.shape[1]}"
                )
        if self.centre is not None:
            features = features - self.centre.to(features)
        if self.projection is None:
            return features
        matrix = self.projection.to(features)
        # One record at a time: the rounding of a product of matrices may depend on the other
        # records.
        return (
            torch.stack([matrix @ row for row in features])
            if len(features)
            else features.new_zeros(0, len(matrix))
        )
