"""The Gaussian mechanism on sums over units. A unit is a record or a patient; one unit is added or
removed.

A release is a set of sums over units. One unit changes each sum by at most its `bound`. This bound
is the sensitivity, so no sensitivity is set by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.discrete_gaussian import CONTINUOUS, discrete_gaussian
from fedsurrogate.common.privacy.exact_sums import FINE, ROUNDED, IntegerSum, toward_zero
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.own_mean import ALL, MOST, REMOVED, OwnParts

# The largest standard deviation in steps; larger noise is drawn in coarse steps. Samples reach 60
# times as far in e^60 draws, which fits into 64 bits.
MOST_STEPS = 2.0**56
# Covers the rounding of multipliers and roots, and of shares that sum to one only nearly.
SLACK = Fraction(1, 10**8)
# Numbers of noise drawn at a time, so that the sampler's arrays stay in the processor's cache.
DRAWN = 2**15


@dataclass(frozen=True)
class BoundedSum:
    """A sum over units.

    Attributes:
        name: of the statistic.
        sum: the sum as integers, of any shape.
        bound: largest norm of what one unit adds to `value`; this is the sensitivity. The sum has
            shortened each unit to it, see `ExactSum`.
        twice: which entries stand for two equal ones, bool in the shape of the sum, as those beside
            the diagonal of a symmetric matrix do; None for no entry. `value` has them times
            sqrt(2). So they need half of the variance, and the sum itself stays in integers.
    """

    name: str
    sum: IntegerSum
    bound: float
    twice: Tensor | None = None

    def __post_init__(self) -> None:
        if self.sum.bound > self.bound * ROUNDED:
            raise ValueError(
                f"{self.name}: a unit may add {self.sum.bound:g}, but the noise is for {self.bound:g}"
            )

    @property
    def value(self) -> Tensor:
        """The sum, float64."""
        return self._scaled(self.sum)

    def noisy(self, sigma: float, rounding: float = 0.0) -> Noisy:
        """The sum with discrete Gaussian noise on its integers.

        It reveals no more than continuous Gaussian noise of this sigma, whatever follows from that
        noise: the result is a function of the sum with continuous noise and of random numbers that
        are independent of the data, up to a probability of 1e-30 a number (see CONTINUOUS of
        common/privacy/discrete_gaussian.py). So all accounting of Gaussian mechanisms holds, on
        Poisson samples, composed, and when the next release depends on this one.

        Args:
            sigma: standard deviation of the noise in every entry.
            rounding: largest norm by which roundings outside of this sum may move it; the noise
                grows as if it were a part of the sensitivity.

        Raises:
            ConfigError: for noise so large that no digit would be left.
        """
        total = self.sum
        if sigma > MOST_STEPS * total.step:
            total = total.coarsened()
            rounding += math.sqrt(2 * total.fine.numel()) * total.step
        if sigma > MOST_STEPS * total.step:
            raise ConfigError(
                f"noise of {sigma:.3g} on {self.name}, of which one unit adds at most "
                f"{self.bound:g}: nothing would be left; set a larger epsilon"
            )
        steps = Fraction(sigma) / Fraction(total.step) * (1 + Fraction(rounding / self.bound))
        steps *= 1 + SLACK
        shape = total.fine.shape
        if self.twice is None:
            drawn = _drawn(_variance(steps, 1), shape.numel()).reshape(shape)
        else:
            drawn = torch.zeros(shape, dtype=torch.int64)
            for parts, of in ((1, ~self.twice), (2, self.twice)):
                drawn[of] = _drawn(_variance(steps, parts), int(of.sum()))
        return Noisy(self.name, self._scaled(total.plus(drawn)), sigma, self.bound)

    def _scaled(self, sum_: IntegerSum) -> Tensor:
        value = sum_.value
        return value if self.twice is None else torch.where(self.twice, math.sqrt(2), 1.0) * value


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


def with_noise(sums: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
    """Add the noise of a run's mechanism to its sums; together they cost one of its events.

    Args:
        sums: those that the mechanism names, of units that add at most its sensitivity.
        mechanism: of the run.

    Returns:
        The released statistics, in the order of the mechanism.

    Raises:
        ConfigError: for sums of other names than the mechanism's.

    Example:
        >>> from fedsurrogate.common.privacy.mechanism import NoisySums
        >>> people = IntegerSum.of(torch.tensor([40.0, 60.0]), bound=1.0)
        >>> mechanism = NoisySums("counts", 1.0, 1e-5, {"people": 1.0}).mechanism()
        >>> [(noisy.name, round(noisy.sigma, 2)) for noisy in with_noise(
        ...     [BoundedSum("people", people, bound=1.0)], mechanism
        ... )]
        [('people', 3.73)]
    """
    named = {each.name: each for each in sums}
    if named.keys() != mechanism.noise.keys():
        raise ConfigError(
            f"sums {', '.join(named)}; the mechanism has noise for {', '.join(mechanism.noise)}"
        )
    return [
        replace(named[name], bound=bound).noisy(sigma)
        for name, (sigma, bound) in mechanism.noise.items()
    ]


def _variance(steps: Fraction, parts: int) -> int:
    """The variance of the noise, in squared steps, over the number of equal entries of one."""
    return math.ceil(steps**2 / parts) + 2 * CONTINUOUS


def _drawn(variance: int, count: int) -> Tensor:
    """Independent discrete Gaussians (count,), int64."""
    parts = [
        torch.from_numpy(discrete_gaussian(variance, min(DRAWN, count - start)))
        for start in range(0, count, DRAWN)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


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
    clipped, longer = _clipped(features, norm)
    return clipped, float(longer.mean()) if len(features) else 0.0


def clip_rows(features: Tensor, norm: float) -> Tensor:
    """The scaled features of `clip` alone, which a graph can compute."""
    return _clipped(features, norm)[0]


def _clipped(features: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """As `clip`, with a one for each feature whose norm was larger (n, 1)."""
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
    longer = (lengths * largest > norm).double()
    clipped = scaled * factors.to(features)
    return clipped.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), longer


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


def weigh_own_mean(features: Tensor, weight: OwnParts) -> Tensor:
    """Each feature with a smaller mean over its own columns, and with its length beside.

    It is a fixed map of one record, so it costs no budget, and the bound after `clip` holds as
    before.

    Args:
        features: (n, d), any floating point.
        weight: REMOVED takes the mean away, ALL leaves features as they are. In between, a mean longer
            than MOST times the rest of its feature is shortened to that. With a weight of the length r,
            in square roots of d, that weight times (r^2 - 1) / (r^2 + 1) of the length takes the place
            of what the feature has along `public_signs`.

    Returns:
        Features (n, d).

    Example:
        >>> weigh_own_mean(torch.tensor([[1.0, 2.0, 6.0]]), REMOVED).tolist()
        [[-2.0, -1.0, 3.0]]
        >>> kept = weigh_own_mean(torch.tensor([[1.0, 2.0, 6.0]]), OwnParts(0.1))
        >>> [round(entry, 3) for entry in kept[0].tolist()]
        [-1.7, -0.7, 3.3]
    """
    if weight == ALL or not len(features):
        return features
    # One record at a time, as in `PublicMap.apply`: how a sum rounds may depend on other records.
    return _weighed(features, weight, lambda of, rows: torch.stack([of(row) for row in rows]))


def weigh_rows(features: Tensor, weight: OwnParts) -> Tensor:
    """As `weigh_own_mean`, of all records at once, as a graph needs it: equal up to rounding."""
    return _weighed(features, weight, lambda of, rows: of(rows))


def _weighed(
    features: Tensor, weight: OwnParts, each: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Tensor:
    """As `weigh_own_mean`; `each` gives a number of every row (n,)."""
    if weight == ALL:
        return features
    means = each(lambda row: row.double().mean(-1), features)[:, None]
    rest = features - means.to(features)
    if weight == REMOVED:
        return rest
    lengths = each(lambda row: torch.linalg.vector_norm(row.double(), dim=-1), rest)[:, None]
    unit = lengths / math.sqrt(rest.shape[1])
    added = (weight.mean * means).maximum(-MOST * unit).minimum(MOST * unit)
    if weight.length:
        signs = public_signs(rest.shape[1]).to(rest.device)
        along = each(lambda row: row.double() @ signs, rest)[:, None]
        size = 1 - 2 / (1 + unit.square())
        added = added + (weight.length * size * lengths - along) * signs
    return rest + added.to(rest)


def public_signs(dimension: int) -> Tensor:
    """A direction without a mean, along which features hardly ever differ: signs of the sequence of
    Thue and Morse.

    Args:
        dimension: d, two or more. The last entry of an odd number is zero.

    Returns:
        (d,), float64, of norm one.

    Example:
        >>> (2 * public_signs(4)).tolist()
        [1.0, -1.0, -1.0, 1.0]
    """
    count = dimension // 2 * 2
    signs = [1 - 2 * (place.bit_count() % 2) for place in range(count)] + [0] * (dimension - count)
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(count)
