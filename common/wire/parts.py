"""Numbers that need more than the 11 bits of a half, as sums of tensors at 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsurrogate.common.targets.target import names_of_parts
from fedsurrogate.common.wire.float16 import pack, unpack


def in_parts(name: str, whole: Tensor, parts: int) -> dict[str, Tensor]:
    """A tensor in parts that 16 bits hold exactly. Each adds 11 bits to the precision, relative to
    the largest number.

    Args:
        name: of the tensor.
        whole: finite, of any shape.
        parts: their number.

    Returns:
        The parts by name, float32.

    Example:
        >>> number = torch.tensor([1 / 3], dtype=torch.float64)
        >>> parts = in_parts("third", number, 3)
        >>> float(abs(joined("third", parts, 3) - number)) < 1e-9
        True
    """
    rest, found = whole.double(), {}
    for each in names_of_parts(name, parts):
        part = unpack(pack(rest), each, tuple(rest.shape))
        found[each] = part
        rest = rest - part
    return found


def joined(name: str, tensors: Mapping[str, Tensor], parts: int) -> Tensor:
    """The tensor of which `in_parts` made the parts, float64."""
    return torch.stack([tensors[each].double() for each in names_of_parts(name, parts)]).sum(0)
