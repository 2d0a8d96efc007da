"""Matrices as whole numbers of 8 or 4 bits, with a scale for each column."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogate_pb2 import Levels
from fedsurrogate.common.wire.float16 import pack, unpack

# The largest entry that a level stands for, as a share of a column's largest one. At 4 bits, fine
# steps for the many small entries are worth more than the few large ones, which are cut.
REACH = {8: 1.0, 4: 0.6}


def pack_levels(matrix: Tensor, bits: int) -> Levels:
    """Encode a matrix: entries are multiples of their column's scale over 2^(bits - 1) - 1.

    Args:
        matrix: (n, m).
        bits: of an entry, 8 or 4.

    Example:
        >>> matrix = torch.tensor([[1.0, 10.0], [-0.5, 5.0]])
        >>> levels = pack_levels(matrix, bits=8)
        >>> len(levels.data), bool((unpack_levels(levels, (2, 2)) - matrix).abs().max() < 0.05)
        (4, True)
    """
    most = 2 ** (bits - 1) - 1
    scales = pack((REACH[bits] * matrix.double().abs().amax(0)).clamp_min(1e-30), logarithm=True)
    exact = unpack(scales, "scales", (matrix.shape[1],)).double()
    levels = (
        (matrix.double() / exact * most)
        .round()
        .clamp(-most, most)
        .to(torch.int8)
        .numpy()
        .reshape(-1)
    )
    if bits == 4:
        pairs = (
            (np.append(levels, np.zeros(levels.size % 2, dtype=np.int8)) + 8)
            .astype(np.uint8)
            .reshape(-1, 2)
        )
        levels = pairs[:, 0] << 4 | pairs[:, 1]
    return Levels(shape=list(matrix.shape), bits=bits, scales=scales, data=levels.tobytes())


def unpack_levels(levels: Levels, shape: tuple[int, ...]) -> Tensor:
    """Decode a matrix of `pack_levels`.

    Args:
        levels: the message.
        shape: that the matrix must have, (n, m).

    Returns:
        The matrix, float32.

    Raises:
        SurrogateError: for another shape, or numbers of bits other than 8 and 4.
    """
    bits, count = levels.bits, shape[0] * shape[1]
    if bits not in REACH:
        raise SurrogateError(f"loadings of {bits} bits; 8 or 4 are allowed next to 16")
    if tuple(levels.shape) != tuple(shape) or len(levels.data) != (count * bits + 7) // 8:
        raise SurrogateError(
            f"loadings of shape {tuple(levels.shape)[:4]} in {len(levels.data)} bytes, expected "
            f"{shape}"
        )
    if not levels.scales.logarithm:
        raise SurrogateError("scales of loadings must travel as logarithms")
    scales = unpack(levels.scales, "scales of loadings", (shape[1],))
    if bits == 8:
        numbers = np.frombuffer(levels.data, dtype=np.int8)
    else:
        pairs = np.frombuffer(levels.data, dtype=np.uint8)
        numbers = np.stack([pairs >> 4, pairs & 15], 1).reshape(-1)[:count].astype(np.int8) - 8
    shares: Tensor = torch.from_numpy(numbers.astype(np.float32)).reshape(shape) / (
        2 ** (bits - 1) - 1
    )
    return shares * scales
