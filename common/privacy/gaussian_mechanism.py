"""The Gaussian mechanism on sums over units, a unit being a record or a patient that is added or
removed; and exact samples of the discrete Gaussian distribution, its noise.

A release is a set of sums over units. One unit changes each sum by at most its `bound`. This bound
is the sensitivity, so no sensitivity is set by hand.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError
from .exact_sums import FINE, ROUNDED, IntegerSum, toward_zero
from .mechanism import Mechanism
from .shares import ALL, MOST, REMOVED, OwnParts

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
# Floating point tells whether a point is below the curve unless it lies this close; errors there are
# far smaller.
UNSURE = 2.0**-40
DIGITS = Context(prec=80)
# Numbers beyond so many standard deviations, less than one in 1e37, are not drawn.
FARTHEST = 13
# Boxes of an envelope, as many as seven bits tell apart; the area of each, with which they reach the top
# of the curve; and how many edges of the last box are longer than a standard deviation. Edges have
# so many bits after the point.
BOXES, AREA, LAST, BITS = 128, Decimal("0.009971254664"), 4, 24
# The sum of n discrete Gaussians reveals no more than a continuous Gaussian whose variance is
# smaller by n + 1 times this. That numbers beyond FARTHEST are left out is far below the 1e-30 here.
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
        Marsaglia & Tsang 2000, "The ziggurat method", on whole numbers and without an error of
        floating point.

    Example:
        >>> discrete_gaussian(variance=16, count=8, source=seeded(bytes(32))).tolist()
        [-4, -1, -6, 2, 3, 0, -7, -1]
    """
    # One key for all bytes of a draw: a new cipher for each of some thirty pieces takes longer than
    # the bytes.
    source = source or seeded(bytes(secret_bytes(32)))
    batches: list[Integers] = []
    missing = count
    while missing > 0:
        drawn = _accepted(envelope_of(variance), missing + missing // 16 + 64, source)[:missing]
        batches.append(drawn)
        missing -= len(drawn)
    return np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)


def seeded(seed: bytes) -> Source:
    """A ChaCha20 keystream of a seed of 32 bytes, from its beginning."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return lambda count: stream.update(bytes(count))


@dataclass(frozen=True)
class Envelope:
    """Boxes of one area, one upon another, that together cover exp(-k^2 / (2 variance)) for whole
    numbers k from 0 to FARTHEST standard deviations.

    Attributes:
        variance: of the distribution.
        area: of a box. Its height is the area over its width.
        widths: how many numbers a box holds, from 0 on, (BOXES,), uint64; the lowest box first.
        last: the largest word of 64 bits of the last whole turn of a width, (BOXES,), uint64.
        inside: for a number up to this, the whole height of the box is below the curve, (BOXES,), int64.
    """

    variance: int
    area: Decimal
    widths: NDArray[np.uint64]
    last: NDArray[np.uint64]
    inside: Integers

    @cached_property
    def heights(self) -> NDArray[np.float64]:
        """Of the boxes, (BOXES,)."""
        return float(self.area) / self.widths

    @cached_property
    def floors(self) -> NDArray[np.float64]:
        """Height of all boxes below each, (BOXES,)."""
        return np.concatenate([[0.0], np.cumsum(self.heights)[:-1]])

    def covers(self, box: int, share: Decimal, size: int) -> bool:
        """Whether a point of a box, at a share of its height, is below the curve at `size`; with all digits."""
        below = DIGITS.divide(share, Decimal(int(self.widths[box])))
        for width in self.widths[:box].tolist():
            below = DIGITS.add(below, DIGITS.divide(Decimal(1), Decimal(width)))
        curve = DIGITS.exp(DIGITS.divide(Decimal(-(size**2)), Decimal(2 * self.variance)))
        return DIGITS.multiply(self.area, below) < curve


@cache
def _edges() -> tuple[int, ...]:
    """Right edges z of BOXES boxes of the area AREA, the lowest first, and zero, times 2^BITS and
    rounded up. Up to an edge, the boxes below it are as high as exp(-z^2 / 2).
    """
    edges, height = [Decimal(FARTHEST)], Decimal(0)
    with localcontext(Context(prec=30)):
        while len(edges) < BOXES:
            height += AREA / edges[-1]
            edges.append((-2 * height.ln()).sqrt())
        return *(int(each * 2**BITS) + 1 for each in edges), 0


@lru_cache(256)
def envelope_of(variance: int) -> Envelope:
    """The envelope of a variance, from whole numbers alone, so it is the same on every machine.

    Proof. Let s be the standard deviation, z the edge of a box, and w the numbers in it: z s < w <= z s + 1
    <= z (s + LAST), as z >= 1 / LAST. So a box is at least AREA (1 + 2^-20) / z high. A number that is not in
    it is above z s, and is in all boxes below it, which together reach exp(-z^2 / 2); that edges are
    rounded up takes less than 2^-20 of a height. All boxes together reach above one. Up to a box whose
    next one has the edge y, boxes are at most (1 + 2^-20) (s + 1 + LAST) / s times as high as exp(-y^2 /
    2). The curve is higher where k^2 <= variance y^2 - variance 2^-19 - 2 s (1 + LAST).
    """
    edges, deviation = _edges(), math.isqrt(variance) + 1
    widths = [(math.isqrt(variance * edge**2) >> BITS) + 1 for edge in edges[:-1]]
    if widths[0] > 2**63:
        raise ValueError(f"variance = {variance}: its numbers do not fit into 64 bits")
    room = (variance >> 19) + 1 + 2 * deviation * (1 + LAST)
    squares = [(variance * (edge - 1) ** 2 >> 2 * BITS) - room for edge in edges[1:]]
    return Envelope(
        variance,
        DIGITS.multiply(DIGITS.multiply(AREA, Decimal(1 + 2.0**-20)), Decimal(deviation + LAST)),
        np.array(widths, dtype=np.uint64),
        np.array([2**64 // width * width - 1 for width in widths], dtype=np.uint64),
        np.array([math.isqrt(each) if each >= 0 else -1 for each in squares], dtype=np.int64),
    )


def _accepted(envelope: Envelope, count: int, source: Source) -> Integers:
    """Of `count` points of the envelope those below the curve, as numbers with signs."""
    first = np.frombuffer(source(count), dtype=np.uint8)
    box, negative = first & (BOXES - 1), first >= BOXES
    sizes = _below(envelope.widths[box], envelope.last[box], source)
    # Zero has no sign, and would else count twice.
    kept = ~(negative & (sizes == 0))
    near = np.flatnonzero(kept & (sizes > envelope.inside[box]))
    kept[near] = _below_curve(envelope, box[near], sizes[near], source)
    signed: Integers = np.where(negative, -sizes, sizes)[kept]
    return signed


def _below(limits: NDArray[np.uint64], last: NDArray[np.uint64], source: Source) -> Integers:
    """Uniform integers from 0 to each limit - 1. Words after the last whole turn are drawn again: a box
    that lost its point with them would count less.
    """
    drawn = _words(len(limits), source)
    wrong = np.flatnonzero(drawn > last)
    while len(wrong):
        drawn[wrong] = _words(len(wrong), source)
        wrong = wrong[drawn[wrong] > last[wrong]]
    return (drawn % limits).astype(np.int64)


def _below_curve(
    envelope: Envelope, box: NDArray[Any], sizes: Integers, source: Source
) -> NDArray[np.bool_]:
    """Which points at random heights of their boxes are below the curve."""
    drawn, key = _words(len(box), source), bytes(source(32))
    height = envelope.floors[box] + envelope.heights[box] * (drawn * 2.0**-64)
    above = height - np.exp(-np.square(sizes, dtype=np.float64) / float(2 * envelope.variance))
    found: NDArray[np.bool_] = above < 0
    for at in np.flatnonzero(np.abs(above) <= UNSURE).tolist():
        # Not the next bytes of the source: machines may differ in which points are unsure.
        bits = hashlib.sha256(key + at.to_bytes(8, "big")).digest()[:16]
        finer = (int(drawn[at]) << 128) + int.from_bytes(bits, "big")
        share = DIGITS.divide(Decimal(finer), Decimal(2**192))
        found[at] = envelope.covers(int(box[at]), share, int(sizes[at]))
    return found


def _words(count: int, source: Source) -> NDArray[np.uint64]:
    return np.frombuffer(source(8 * max(1, count)), dtype="<u8")[:count].astype(np.uint64)


# The largest standard deviation in steps; larger noise is drawn in coarse steps. Numbers are at
# most FARTHEST times as large, which fits into 64 bits.
MOST_STEPS = 2.0**56
# Covers the rounding of multipliers and roots, and of shares that sum to one only nearly.
SLACK = Fraction(1, 10**8)
# Numbers of noise drawn at a time, so that the sampler's arrays stay in the processor's cache.
DRAWN = 2**15
# Records whose numbers are added up at a time, for the same reason.
SUMMED = 64


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
        common/privacy/gaussian_mechanism.py). So all accounting of Gaussian mechanisms holds, on
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


def weigh_mean_over_columns(features: Tensor, weight: OwnParts) -> Tensor:
    """Each feature with a smaller mean over its own columns, and with its length beside.

    It is a fixed map of one record, so it costs no budget, and the bound after `clip` holds as
    before.

    Args:
        features: (n, d), any floating point.
        weight: REMOVED takes the mean away, ALL leaves features as they are. In between, a mean longer
            than MOST times the rest of its feature is shortened to that. With a weight of the length r,
            in square roots of d, that weight times (r^2 - 1) / (r^2 + 1) of the length takes the place
            of what the feature has along `public_signs`. With a steady mean, features are divided by r,
            which in few columns varies by chance; the mean is first multiplied by 2^tanh(log2 r), about r
            where r is near one, and so is MOST where this is above one.

    Returns:
        Features (n, d).

    Example:
        >>> weigh_mean_over_columns(torch.tensor([[1.0, 2.0, 6.0]]), REMOVED).tolist()
        [[-2.0, -1.0, 3.0]]
        >>> kept = weigh_mean_over_columns(torch.tensor([[1.0, 2.0, 6.0]]), OwnParts(0.1))
        >>> [round(entry, 3) for entry in kept[0].tolist()]
        [-1.7, -0.7, 3.3]
    """
    if weight == ALL or not len(features):
        return features
    return _weighed(features, weight, _sums)


def weigh_rows(features: Tensor, weight: OwnParts) -> Tensor:
    """As `weigh_mean_over_columns`, of all records at once, as a graph needs it: equal up to rounding."""
    return _weighed(features, weight, lambda of, rows: of(rows).sum(1, keepdim=True))


def _sums(of: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The sum (n, 1) of what follows from each number of a row. To the last bit, that of a record depends
    on no other: NumPy adds up each row of such an array by itself, kernels of torch several at once.
    """
    parts = [of(part).cpu().contiguous().numpy().sum(1) for part in torch.split(rows, SUMMED)]
    return torch.from_numpy(np.concatenate(parts))[:, None].to(rows.device)


def _weighed(
    features: Tensor,
    weight: OwnParts,
    total: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> Tensor:
    """As `weigh_mean_over_columns`; `total` gives the sum of every row, (n, 1)."""
    if weight == ALL:
        return features
    means = total(Tensor.double, features) / features.shape[1]
    rest = features - means.to(features)
    if weight == REMOVED:
        return rest
    root = math.sqrt(rest.shape[1])
    if weight.length:
        signs = public_signs(rest.shape[1]).to(rest.device)
        along = total(lambda rows: rows.double() * signs, rest)
    if weight.steady:
        kept = rest - (along * signs).to(rest) if weight.length else rest
        unit = (total(_squares, kept).sqrt() / root).clamp_min(torch.finfo(torch.float64).tiny)
        factor = unit.log2().tanh().exp2()
        most = MOST * factor.clamp_min(1)
        added = (weight.mean * factor / unit * means).maximum(-most).minimum(most)
        if weight.length:
            added = added + weight.length * (1 - 2 / (1 + unit.square())) * root * signs
        return (kept.double() / unit + added).to(rest)
    lengths = total(_squares, rest).sqrt()
    unit = lengths / root
    added = (weight.mean * means).maximum(-MOST * unit).minimum(MOST * unit)
    if weight.length:
        size = 1 - 2 / (1 + unit.square())
        added = added + (weight.length * size * lengths - along) * signs
    return rest + added.to(rest)


def _squares(rows: Tensor) -> Tensor:
    return rows.double().square()


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


def own_lines(dimension: int, weight: OwnParts) -> Tensor:
    """The directions in which `weigh_mean_over_columns` keeps the mean over columns and the length.

    Args:
        dimension: d.
        weight: neither ALL nor REMOVED.

    Returns:
        One or two orthonormal rows, (k, d), float64.
    """
    mean = torch.full((1, dimension), dimension**-0.5, dtype=torch.float64)
    return torch.cat([mean, public_signs(dimension)[None]]) if weight.length else mean
