"""Whole numbers modulo 2^32, in memory and as bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def words(values: NDArray[np.int64]) -> Words:
    """Whole numbers modulo 2^32.

    Args:
        values: int64, of any shape.

    Returns:
        The numbers, uint32, in the same shape.

    Example:
        >>> words(np.array([5, -1])).tolist()
        [5, 4294967295]
        >>> unpack_words(pack_words(words(np.array([5, -1])))).tolist()
        [5, 4294967295]
    """
    return values.astype(np.uint64).astype(np.uint32)


def pack_words(values: Words) -> bytes:
    """Four bytes for each number, little endian."""
    return values.astype("<u4").tobytes()


def unpack_words(data: bytes) -> Words:
    """The numbers of `pack_words`."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)
