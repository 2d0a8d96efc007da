"""Shamir's secret sharing: `threshold` shares give the secret, fewer say nothing about it.

Source: Shamir 1979, "How to Share a Secret". Modulo a prime, so that a hundred secrets take
milliseconds; the sharing over bit polynomials in Flower's helpers takes minutes for that.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cache

from fedsurrogate.common.errors import SurrogateError

PRIME = 2**130 - 5
SECRET_BYTES, SHARE_BYTES = 16, 17


def split(secret: bytes, threshold: int, count: int) -> dict[int, bytes]:
    """Shares of a secret: values of a random polynomial whose constant term is the secret.

    Args:
        secret: 16 bytes.
        threshold: number of shares that give the secret.
        count: number of shares.

    Returns:
        Shares of 17 bytes by point, 1 to count.

    Example:
        >>> shares = split(b"sixteen bytes...", threshold=2, count=3)
        >>> combine({1: shares[1], 3: shares[3]})
        b'sixteen bytes...'
    """
    polynomial = [
        int.from_bytes(secret, "big"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    shares = {}
    for point in range(1, count + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * point + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from some of its shares.

    Args:
        shares: `threshold` of them, by point.

    Returns:
        The secret, 16 bytes.

    Raises:
        SurrogateError: if these are not shares of one secret.
    """
    weights = _at_zero(tuple(sorted(shares)))
    value = (
        sum(weights[point] * int.from_bytes(share, "big") for point, share in shares.items())
        % PRIME
    )
    if value >= 2 ** (8 * SECRET_BYTES):
        raise SurrogateError("shares that do not fit together")
    return value.to_bytes(SECRET_BYTES, "big")


@cache
def _at_zero(points: tuple[int, ...]) -> dict[int, int]:
    """Lagrange's weights of the values at these points in the value at zero."""
    weights = {}
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weights[point] = above * pow(below, -1, PRIME) % PRIME
    return weights
