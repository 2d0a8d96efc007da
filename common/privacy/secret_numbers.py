"""Random numbers that cannot be repeated: from a cryptographic generator with a new key from the
operating system. A simulation may ask for numbers that can (`repeatable`).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

import torch
from torch import Tensor

# Draws a key of 32 bytes; None draws from the operating system.
_keys: ContextVar[Callable[[], bytes] | None] = ContextVar("keys", default=None)


@contextmanager
def repeatable(seed: str) -> Iterator[None]:
    """Numbers that this thread draws meanwhile follow from a seed. They are not private: for simulations
    that are to be repeated.

    Args:
        seed: what tells these numbers from those of other sites and rounds.
    """
    draws = count()
    before = _keys.set(lambda: hashlib.sha256(f"{next(draws)} {seed}".encode()).digest())
    try:
        yield
    finally:
        _keys.reset(before)


def system_normals(shape: Sequence[int]) -> Tensor:
    """Standard normals. They are no noise of a release: their last digits are those of floating
    point.

    Args:
        shape: of the result.

    Returns:
        Normals of this shape, float64: the Box-Muller transform of 53-bit uniforms.
    """
    count = math.prod(shape)
    half = (count + 1) // 2
    uniform = system_uniforms(2 * max(1, half))
    radius, angle = (-2 * uniform[:half].log()).sqrt(), 2 * math.pi * uniform[half : 2 * half]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].reshape(tuple(shape))


def system_uniforms(count: int) -> Tensor:
    """Uniforms in (0, 1) with 53 bits (float64), from the same generator."""
    raw = torch.frombuffer(secret_bytes(8 * max(1, count)), dtype=torch.int64)
    return ((raw >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)[:count]


def secret_bytes(count: int) -> bytearray:
    """ChaCha20 keystream under a key that is used once: several times as fast as random bytes from
    the operating system.
    """
    key = draw() if (draw := _keys.get()) else os.urandom(32)
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = bytearray(count)
    Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update_into(
        bytes(count), stream
    )
    return stream
