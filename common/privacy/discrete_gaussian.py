"""Exact samples of the discrete Gaussian distribution, the noise of every release and of secure
sums, and its cost in privacy; from random numbers that cannot be repeated: of a cryptographic generator
with a new key from the operating system. A simulation may ask for numbers that can (`repeatable`).

Source: Canonne, Kamath & Steinke 2020, "The Discrete Gaussian for Differential Privacy", algorithms
1 to 3, for many samples at once. A coin of probability exp(-x) is decided in floating point where
that is certain, and otherwise with 80 digits.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Context, Decimal
from fractions import Fraction
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
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


Integers = NDArray[np.int64]
# Random bytes, as many as asked for.
Source = Callable[[int], bytes | bytearray]
# Floating point decides a coin unless its uniform number lies this close to the probability; errors
# there are far smaller.
UNSURE = 2.0**-40
DIGITS = Context(prec=80)
# The sum of n discrete Gaussians reveals no more than a continuous Gaussian whose variance is
# smaller by n + 1 times this.
#
# Proof. Each of the n <= 1000 has variance s >= 16; let v = n s. Take the Gaussian of variance r =
# v - t, t = 16 n + 8. Its variance is 8 larger than that of the claim, so it reveals less, and r >=
# 8. Rounded, it is a function of integer + Gaussian, because rounding commutes with adding
# integers. Adding independent integer noise is again a function of the result. It is left to show
# that the sum is this rounded Gaussian plus integer noise. On the frequencies |w| <= pi, by Poisson
# summation, one discrete Gaussian has the characteristic function exp(-s w^2 / 2) (1 + x) / const,
# and the rounded one exp(-r w^2 / 2) (1 + y) sin(w / 2) / (w / 2). x and |y| are at most exp(-2 pi
# s (pi - |w|)) and exp(-2 pi r (pi - |w|)), up to far smaller terms. The quotient is main (1 + x)^n
# / (1 + y) with main = exp(-t w^2 / 2) (w / 2) / sin(w / 2). The probabilities of main are g - g''
# / 24 + ..., g the density of variance t: positive up to 23 standard deviations for t >= 24. The
# rest is below 1e-30. Near w = pi, (1 + x)^n is up to 2^n, so a t that does not grow with n would
# fail; here 2^n main is below (1e-31)^n 1e-15. For |w| < pi - 0.1, n x < 0.05; n x main and y main
# are below 1e-40.
CONTINUOUS = 16


def discrete_gaussian(variance: int, count: int, source: Source | None = None) -> Integers:
    """Independent integers k with probabilities proportional to exp(-k^2 / (2 variance)).

    Args:
        variance: of the distribution.
        count: number of integers.
        source: random bytes; by default a keystream under a new key of the operating system. From
            other bytes every machine gets the same integers, because coins near the rounding of
            floating point are decided exactly.

    Returns:
        Integers (count,), int64.

    Source:
        Canonne, Kamath & Steinke 2020, algorithm 3.

    Example:
        >>> discrete_gaussian(variance=16, count=8, source=seeded(bytes(32))).tolist()
        [3, -2, -5, 1, -5, 3, -1, -5]
    """
    # One key for all bytes of a draw: a new cipher for each of some thirty pieces takes longer than
    # the bytes.
    source = source or seeded(bytes(secret_bytes(32)))
    batches: list[Integers] = []
    missing = count
    while missing > 0:
        drawn = _accepted(variance, 2 * missing + 64, source)[:missing]
        batches.append(drawn)
        missing -= len(drawn)
    return np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)


def seeded(seed: bytes) -> Source:
    """A ChaCha20 keystream of a seed of 32 bytes, from its beginning."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return lambda count: stream.update(bytes(count))


def _accepted(variance: int, count: int, source: Source) -> Integers:
    """Samples of a discrete Laplace distribution that are kept with the ratio of both distributions
    (algorithm 3).
    """
    scale = math.isqrt(variance) + 1
    candidates = _discrete_laplace(scale, count, source)
    sizes = np.abs(candidates)
    excess = (sizes - variance / scale) ** 2 / float(2 * variance)

    def exact(at: int) -> Fraction:
        return Fraction((int(sizes[at]) * scale - variance) ** 2, 2 * variance * scale**2)

    return candidates[_coins(excess, exact, source)]


def _discrete_laplace(scale: int, count: int, source: Source) -> Integers:
    """Integers with probabilities proportional to exp(-|k| / scale) (algorithm 2); fewer than
    `count`.
    """
    uniform = _below(scale, count, source)
    uniform = uniform[_coins(uniform / scale, lambda at: Fraction(int(uniform[at]), scale), source)]
    turns = np.zeros(len(uniform), dtype=np.int64)
    going = np.arange(len(uniform))
    while len(going):
        going = going[_coins(np.ones(len(going)), lambda at: Fraction(1), source)]
        turns[going] += 1
    sizes = uniform + scale * turns
    negative = _below(2, len(sizes), source) == 1
    kept = ~(negative & (sizes == 0))
    signed: Integers = np.where(negative, -sizes, sizes)[kept]
    return signed


def _coins(
    exponents: NDArray[np.float64], exact: Callable[[int], Fraction], source: Source
) -> NDArray[np.bool_]:
    """Independent coins of probability exp(-x). exact: the exponent at an index as a fraction."""
    drawn = _words(len(exponents), source)
    above = drawn * 2.0**-64 - np.exp(-exponents)
    heads: NDArray[np.bool_] = above < 0
    for at in np.flatnonzero(np.abs(above) <= UNSURE).tolist():
        exponent = exact(at)
        finer = (int(drawn[at]) << 128) + int.from_bytes(source(16), "big")
        power = DIGITS.exp(
            DIGITS.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))
        )
        heads[at] = DIGITS.divide(Decimal(finer), Decimal(2**192)) < power
    return heads


def _below(limit: int, count: int, source: Source) -> Integers:
    """Uniform integers from 0 to limit - 1."""
    most = 2**64 // limit * limit
    drawn = _words(count, source)
    while most < 2**64 and len(wrong := np.flatnonzero(drawn >= np.uint64(most))):
        drawn[wrong] = _words(len(wrong), source)
    return (drawn % np.uint64(limit)).astype(np.int64)


def _words(count: int, source: Source) -> NDArray[np.uint64]:
    return np.frombuffer(source(8 * max(1, count)), dtype="<u8")[:count].astype(np.uint64)
