"""The Gaussian mechanism on sums over units. A unit is a record or a patient; one unit is added or
removed.

A release is a set of sums over units. One unit changes each sum by at most its `bound`. This bound
is the sensitivity, so no sensitivity is set by hand.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from common.privacy.exact_sums import FINE, toward_zero
from common.privacy.mechanism import Mechanism

# Released values are rounded to this share of the noise's standard deviation. Otherwise the last
# bits of a float would disclose information about the data (Mironov 2012). Rounding adds 1e-11 of
# the variance.
GRID = 2.0**-16


@dataclass(frozen=True)
class BoundedSum:
    """A sum over units.

    Attributes:
        name: of the statistic.
        value: the sum, of any shape.
        bound: largest norm of what one unit adds to `value`; this is the sensitivity.
        share: this statistic's part of the budget 1 / noise_multiplier^2. The shares of a release
            sum to one.
    """

    name: str
    value: Tensor
    bound: float
    share: float


@dataclass(frozen=True)
class Noisy:
    """A released statistic.

    Attributes:
        name: of the statistic.
        value: the sum with noise, in the shape of the sum, float64.
        sigma: standard deviation of the noise in every entry.
        sensitivity: largest norm of what one unit adds to the sum.
    """

    name: str
    value: Tensor
    sigma: float
    sensitivity: float

    def signal_to_noise(self) -> float:
        """Ratio of the norms of signal and noise, estimated from the noisy value alone:
        sqrt(|v|^2 / (n sigma^2) - 1), or 0 if the root is of a negative number.
        """
        return math.sqrt(max(0.0, float(self.value.double().square().mean()) / self.sigma**2 - 1))


def release(statistics: Sequence[BoundedSum], noise_multiplier: float) -> list[Noisy]:
    """Add noise to several sums at once. Together they cost one GaussianEvent(noise_multiplier).

    A statistic of sensitivity D and share s gets noise sigma = noise_multiplier D / sqrt(s).
    Divided by their sigmas, all sums together change by at most sqrt(sum of s) / noise_multiplier
    in Euclidean norm, as the calibration assumes.

    Args:
        statistics: the sums, with shares that sum to one.
        noise_multiplier: of the whole release as one Gaussian mechanism.

    Returns:
        The released statistics in the same order. Values are rounded to `GRID` of their sigma.

    Raises:
        ConfigError: for shares that do not sum to one.

    Example:
        >>> counts = BoundedSum("counts", torch.tensor([40.0, 60.0]), bound=1.0, share=0.25)
        >>> sums = BoundedSum("sums", torch.zeros(2, 3), bound=1.0, share=0.75)
        >>> [(noisy.name, round(noisy.sigma, 2)) for noisy in release([counts, sums], 4.0)]
        [('counts', 8.0), ('sums', 4.62)]
    """
    if abs(sum(statistic.share for statistic in statistics) - 1) > 1e-9:
        raise ConfigError("the budget shares of the statistics in one release must sum to one")
    released = []
    for statistic in statistics:
        sigma = noise_multiplier * statistic.bound / math.sqrt(statistic.share)
        grid = sigma * GRID
        noisy = statistic.value.double().cpu() + sigma * system_normals(statistic.value.shape)
        released.append(
            Noisy(statistic.name, (noisy / grid).round() * grid, sigma, statistic.bound)
        )
    return released


def with_noise(sums: Mapping[str, Tensor], mechanism: Mechanism) -> list[Noisy]:
    """Add the noise of a run's mechanism to its sums; together they cost one of its events.

    Args:
        sums: by name; those that the mechanism names, of units that add at most its sensitivity.
        mechanism: of the run.

    Returns:
        The released statistics, in the order of the mechanism.

    Raises:
        ConfigError: for sums of other names than the mechanism's.
    """
    if sums.keys() != mechanism.noise.keys():
        raise ConfigError(
            f"sums {', '.join(sums)}; the mechanism has noise for {', '.join(mechanism.noise)}"
        )
    multiplier = mechanism.noise_multiplier
    bounded = [
        BoundedSum(name, sums[name], bound, (multiplier * bound / sigma) ** 2)
        for name, (sigma, bound) in mechanism.noise.items()
    ]
    return release(bounded, multiplier)


def system_normals(shape: Sequence[int]) -> Tensor:
    """Standard normals from a cryptographic generator with a new key from the operating system; not
    repeatable.

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
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = bytearray(count)
    Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor().update_into(
        bytes(count), stream
    )
    return stream


def clip(features: Tensor, norm: float) -> tuple[Tensor, float]:
    """Scale features to norm at most one: x / max(|x|, norm).

    The bound holds for any input: entries are first divided by the largest one, because squares of
    tiny or huge entries would underflow or overflow.

    Args:
        features: (n, d), any floating point. A feature that is not finite becomes zero.
        norm: that features are divided by if theirs is not larger; 0 gives every feature unit norm.

    Returns:
        The scaled features (n, d), and the share of features whose norm was larger than `norm`.

    Example:
        >>> clipped, share = clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), norm=1.0)
        >>> [[round(entry, 3) for entry in row] for row in clipped.tolist()], share
        ([[0.6, 0.8], [0.3, 0.4]], 0.5)
    """
    limits = torch.finfo(features.dtype)
    largest = features.abs().amax(1, keepdim=True).clamp_min(limits.tiny)
    scaled = features / largest
    # In double precision: for a hundred thousand entries, a norm in single precision is off by a
    # ten-thousandth.
    lengths, largest = (
        torch.linalg.vector_norm(scaled, dim=1, keepdim=True, dtype=torch.float64),
        largest.double(),
    )
    # The bound must hold in exact arithmetic. The margin covers the rounding of quotient, factor
    # and product, each by half an epsilon, and the rounding of the later sum by up to 1e-8 (see
    # ExactSum).
    factors = (1 - max(1e-6, 2 * limits.eps)) / lengths.maximum(norm / largest).clamp_min(
        torch.finfo(torch.float64).tiny
    )
    shortened = (lengths * largest > norm).double()
    clipped = scaled * factors.to(features)
    return clipped.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), float(shortened.mean()) if len(
        features
    ) else 0.0


def unit_weights(units: Sequence[str] | None, count: int) -> Tensor:
    """Weight of every record: one, or one over its patient's records, so that a patient weighs one.

    Args:
        units: the patient of each record; None where a record is the unit.
        count: number of records, used without units.

    Returns:
        Weights (count,), float64, rounded toward zero, because seven times the float nearest to 1/7
        may exceed one.

    Example:
        >>> unit_weights(["ann", "bob", "ann"], 3).tolist()
        [0.5, 1.0, 0.5]
    """
    if units is None:
        return torch.ones(count, dtype=torch.float64)
    seen: dict[str, int] = {}
    index = torch.tensor([seen.setdefault(unit, len(seen)) for unit in units], dtype=torch.int64)
    return toward_zero(1 / index.bincount().double(), FINE)[index]
