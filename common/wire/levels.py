"""Matrices as whole numbers of 8 bits, with a scale for each column."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogate_pb2 import Levels
from fedsurrogate.common.wire.float16 import pack, unpack

BITS, MOST = 8, 127


def pack_levels(matrix: Tensor) -> Levels:
    """Encode a matrix: entries are multiples of their column's scale over 127.

    Args:
        matrix: (n, m).

    Example:
        >>> matrix = torch.tensor([[1.0, 10.0], [-0.5, 5.0]])
        >>> levels = pack_levels(matrix)
        >>> len(levels.data), bool((unpack_levels(levels, (2, 2)) - matrix).abs().max() < 0.05)
        (4, True)
    """
    scales = pack(matrix.double().abs().amax(0).clamp_min(1e-30), logarithm=True)
    exact = unpack(scales, "scales", (matrix.shape[1],)).double()
    levels = (matrix.double() / exact * MOST).round().clamp(-MOST, MOST).to(torch.int8)
    data = levels.numpy().tobytes()
    return Levels(shape=list(matrix.shape), bits=BITS, scales=scales, data=data)


def unpack_levels(levels: Levels, shape: tuple[int, ...]) -> Tensor:
    """Decode a matrix of `pack_levels`.

    Args:
        levels: the message.
        shape: that the matrix must have, (n, m).

    Returns:
        The matrix, float32.

    Raises:
        SurrogateError: for another shape, or numbers of other than 8 bits.
    """
    if levels.bits != BITS:
        raise SurrogateError(f"loadings of {levels.bits} bits; {BITS} are allowed next to 16")
    if tuple(levels.shape) != tuple(shape) or len(levels.data) != shape[0] * shape[1]:
        raise SurrogateError(
            f"loadings of shape {tuple(levels.shape)[:4]} in {len(levels.data)} bytes, expected "
            f"{shape}"
        )
    if not levels.scales.logarithm:
        raise SurrogateError("scales of loadings must travel as logarithms")
    scales = unpack(levels.scales, "scales of loadings", (shape[1],))
    numbers = np.frombuffer(levels.data, dtype=np.int8).astype(np.float32)
    shares: Tensor = torch.from_numpy(numbers).reshape(shape) / MOST
    return shares * scales
