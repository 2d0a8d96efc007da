"""True privacy loss, by quadrature, if an adversary chooses the second mechanism after seeing the
first result.

One step is the Gaussian mechanism on a Poisson sample (rate 1: on all), seen with the record as P =
(1 - q) N(0, z^2) + q N(1, z^2) and without it as Q = N(0, z^2). The hockey-stick divergence of one
step has a closed form, because the privacy loss log(1 - q + q exp((2 x - 1) / (2 z^2))) grows with
x. So a strategy of two steps needs one integral, over the first result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr

from fedsurrogate.common.privacy.accounting import GaussianEvent

Array = np.ndarray[Any, np.dtype[np.float64]]


def one(event: GaussianEvent) -> tuple[float, float]:
    """Noise and sampling rate of a step; several Gaussian steps are one step with less noise."""
    assert event.count == 1 or event.sample_rate == 1
    return event.noise_multiplier / math.sqrt(event.count), event.sample_rate


def loss(event: GaussianEvent, x: Array) -> Array:
    """log P(x) / Q(x)."""
    noise, rate = one(event)
    exponent = (2 * x - 1) / (2 * noise**2)
    return exponent if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)


def hockey_stick(event: GaussianEvent, epsilon: Array, adding: bool) -> Array:
    """sup over S of P(S) - e^epsilon Q(S); with `adding` of Q(S) - e^epsilon P(S). Any real
    epsilon.
    """
    noise, rate = one(event)
    level = -epsilon if adding else epsilon
    # The set is {loss > epsilon}, or {loss < -epsilon}: all results on one side of x.
    above = np.expm1(level) + rate
    x = noise**2 * np.log(np.maximum(above, 1e-300) / rate) + 0.5
    if adding:
        without, with_ = (
            ndtr(x / noise),
            (1 - rate) * ndtr(x / noise) + rate * ndtr((x - 1) / noise),
        )
        return np.where(above <= 0, 0.0, without - np.exp(epsilon) * with_)
    found = rate * ndtr((1 - x) / noise) - above * ndtr(-x / noise)
    return np.where(above <= 0, -np.expm1(level), found)


def adaptive_delta(
    first: GaussianEvent, seconds: Sequence[GaussianEvent], epsilon: float, adding: bool = False
) -> float:
    """True delta at epsilon if `first` is released, and then the worst of `seconds` given its
    result.
    """
    noise, rate = one(first)
    x = np.linspace(-12 * noise, 1 + 12 * noise, 20_001)
    without = np.exp(-((x / noise) ** 2) / 2)
    with_ = (1 - rate) * without + rate * np.exp(-(((x - 1) / noise) ** 2) / 2)
    density = (without if adding else with_) / (noise * math.sqrt(2 * math.pi))
    left = epsilon + loss(first, x) if adding else epsilon - loss(first, x)
    worst = np.max([hockey_stick(second, left, adding) for second in seconds], axis=0)
    return float(np.trapezoid(density * worst, x))


def adaptive_epsilon(first: GaussianEvent, seconds: Sequence[GaussianEvent], delta: float) -> float:
    """True epsilon at delta of the same attack, for the worse of adding and removing a record."""

    def too_much(epsilon: float) -> bool:
        return (
            max(adaptive_delta(first, seconds, epsilon, adding) for adding in (False, True)) > delta
        )

    return bisect(too_much, 0.0, 50.0)


def least_noise(holds: Callable[[float], bool]) -> float:
    """The smallest noise multiplier for which the monotone `holds` is true, to a few digits; never
    one where it fails.
    """
    return bisect(lambda noise: not holds(noise), 0.05, 1e4)


def bisect(low_side: Callable[[float], bool], low: float, high: float) -> float:
    """The point where `low_side` becomes false, approached from above."""
    for _ in range(40):
        middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
        low, high = (middle, high) if low_side(middle) else (low, middle)
    return high
