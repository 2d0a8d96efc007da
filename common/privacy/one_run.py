"""Lower bounds on epsilon from one run: canaries are records that are each in the data by a coin
toss.

Source: Steinke, Nasr & Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv
2305.08846, theorem 5.2. An attacker says for some canaries whether they were in the data. Under
(epsilon, delta) differential privacy for adding or removing one record, too many right answers are
unlikely, however the attacker works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import ConfigError

# Largest epsilon that a bound can have.
LARGEST = 50.0


@dataclass(frozen=True)
class Guesses:
    """The answers of an attacker.

    Attributes:
        canaries: number of all canaries that were tossed for.
        guessed: number of answers given.
        right: number of answers that are true.

    Raises:
        ConfigError: unless 0 <= right <= guessed <= canaries.
    """

    canaries: int
    guessed: int
    right: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.guessed <= self.canaries:
            raise ConfigError(
                f"{self.right} right of {self.guessed} guesses for {self.canaries} canaries is "
                "impossible"
            )


def guess(scores: Tensor, included: Tensor, count: int) -> Guesses:
    """Guess "in" for the count / 2 canaries with the highest scores, and "out" for as many
    with the lowest.

    There is no guess for the scores between: a wrong guess costs more than a right one gains.

    Args:
        scores: of the canaries, (m,).
        included: whether each canary was in the data, (m,), bool.
        count: number of answers.

    Returns:
        The answers, counted.

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.9, 0.1, 0.5, 0.8])
        >>> guess(scores, torch.tensor([True, False, True, False]), count=2)
        Guesses(canaries=4, guessed=2, right=2)
    """
    order = scores.argsort()
    half = max(1, min(count, len(scores)) // 2)
    right = included[order[-half:]].sum() + (~included[order[:half]]).sum()
    return Guesses(len(scores), 2 * half, int(right))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of so many right answers or more under (epsilon, delta).

    Args:
        guesses: the answers of the attacker.
        epsilon: of the claim, for adding or removing one record.
        delta: of the claim.

    Returns:
        The bound, at most one.

    Source:
        Steinke, Nasr & Jagielski 2023, theorem 5.2.
    """
    from scipy.stats import binom

    rate = 1 / (1 + math.exp(-epsilon))
    tail, alpha, summed = float(binom.sf(guesses.right - 1, guesses.guessed, rate)), 0.0, 0.0
    if delta > 0:
        masses = binom.pmf(range(guesses.right), guesses.guessed, rate)
        for i in range(1, guesses.right + 1):
            summed += float(masses[guesses.right - i])
            alpha = max(alpha, summed / i)
    return min(1.0, tail + 2 * guesses.canaries * alpha * delta)


def epsilon_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Largest epsilon that these answers refute: a lower bound of the true one.

    Args:
        guesses: the answers of the attacker.
        delta: at which epsilon is bounded.
        confidence: of the bound.

    Returns:
        The bound, at most `LARGEST`; 0 if there is none.

    Example:
        >>> round(epsilon_bound(Guesses(canaries=1000, guessed=100, right=95), delta=1e-5), 2)
        2.17
    """
    low, high = 0.0, LARGEST
    if p_value(guesses, low, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        refuted = p_value(guesses, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low
