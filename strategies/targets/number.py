"""Heads for numbers: a ridge from the sums of records, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.targets.strength import (
    Directions,
    Fitted,
    Outcomes,
    cross_validated,
    expected,
)
from fedsurrogate.strategies.targets.sums import CodedSums

# Share of the noise's largest eigenvalue that is added to every variance of the features. Of five
# values the best for logarithms of sizes and for seven columns of features of images, by records
# that were hidden from the fit but not from this choice.
ADDED = 0.2


@dataclass(frozen=True)
class NumberHead:
    """Predictions z W^T + b in the unit of the numbers.

    Attributes:
        weight: W, (r, d), float64.
        bias: b, (r,), float64.
        deviation: standard deviation of a new record's error, (r,): 1.96 of it make a prediction
            interval of 95 %.
        explained: expected share of the variance that a new record's prediction explains, (r,).
        strength: of the ridge, (r,); NaN with noise, where each direction has its own.
    """

    weight: Tensor
    bias: Tensor
    deviation: Tensor
    explained: Tensor
    strength: Tensor


def number_head(sums: CodedSums, low: Sequence[float], high: Sequence[float]) -> NumberHead:
    """The ridge of numbers on features, T + kappa I, whose strength kappa follows from the sums.

    Args:
        sums: of the code (1, u), u the numbers scaled from [low, high] to [-1, 1]; with products.
        low: lower end of the range of each number, (r,).
        high: upper end of each, (r,).

    Returns:
        The head.

    Raises:
        RunError: for a number that does not vary, or for sums in which noise leaves no variance.
    """
    middle, half = _range(low, high)
    cross, variance = _moments(sums)
    fitted = _fitted(sums, cross, variance)
    means = sums.code[1:] / _records(sums)
    weight = half[:, None] * fitted.weight
    bias = middle + half * (means - fitted.weight @ sums.mean)
    # The variance is itself known with noise only, and too short an interval is worse.
    deviation = half * (fitted.error + _noise_of_variance(sums)).sqrt()
    return NumberHead(weight, bias, deviation, 1 - fitted.error / variance, fitted.strength)


def _range(low: Sequence[float], high: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Middle and half width of each range, (r,)."""
    lower, upper = (torch.tensor(list(each), dtype=torch.float64) for each in (low, high))
    if not bool((lower < upper).all()):
        raise ValueError(f"ranges from {list(low)} to {list(high)}: low must lie below high")
    return (lower + upper) / 2, (upper - lower) / 2


def _records(sums: CodedSums) -> float:
    """The number of records by the code's first row, at least one."""
    return max(float(sums.code[0]), 1.0)


def _moments(sums: CodedSums) -> tuple[Tensor, Tensor]:
    """Covariances of the numbers with the features (r, d), and variances of the numbers (r,)."""
    if sums.products is None or len(sums.products) != len(sums.code) - 1:
        raise ValueError("numbers need the products of all their pairs")
    records = _records(sums)
    means = sums.code[1:] / records
    variance = sums.products.diagonal() / records - means.square()
    noises = _noise_of_variance(sums).tolist()
    for index, (each, noise) in enumerate(zip(variance.tolist(), noises, strict=True)):
        if not each > max(noise, 1e-12):
            why = f"which is within the noise of {noise:.2g}" if noise else "so it does not vary"
            raise RunError(
                f"number {index + 1} has the variance {each:.2g} in its range of [-1, 1], {why}: "
                "nothing can be learned"
            )
    cross = sums.sums[1:] / records - torch.outer(means, sums.mean)
    return cross, variance


def _noise_of_variance(sums: CodedSums) -> Tensor:
    """Standard deviation of the noise in the variance of each number, (r,)."""
    means = sums.code[1:] / _records(sums)
    if sums.noise is None or sums.products is None:
        return torch.zeros_like(means)
    squares = sums.products.diagonal() / _records(sums)
    of_mean = 2 * means * sums.noise.code[1:]
    of_count = (squares - 2 * means.square()) * sums.noise.code[0]
    total = sums.noise.products**2 + of_mean.square() + of_count.square()
    return total.sqrt() / _records(sums)


def _fitted(sums: CodedSums, cross: Tensor, variance: Tensor) -> Fitted:
    records = _records(sums)
    each = torch.full_like(variance, records)
    if sums.noise is None:
        directions = Directions.of(sums.covariance, sums.rounding)
        return cross_validated(
            directions, Outcomes(cross, variance, each, torch.zeros_like(variance))
        )
    directions = Directions.of_noisy(sums.covariance, sums.noise.squares / records, ADDED)
    means = sums.code[1:] / records
    noise = (sums.noise.sums[1:].square() + (means * sums.noise.sums[0]).square()).sqrt() / records
    return expected(directions, Outcomes(cross, variance, each, noise))
