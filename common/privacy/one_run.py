"""Lower bounds on epsilon from one run: canaries are records that are each in the data by a coin
toss.

Source: Steinke, Nasr & Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv
2305.08846, theorem 5.2. An attacker says for some canaries whether they were in the data. Under
(epsilon, delta) differential privacy for adding or removing one record, too many right answers are
unlikely, however the attacker works.

`gaussian_bound` takes the whole trade-off of false alarms and misses of Gaussian noise instead of
one (epsilon, delta): Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-Differential Privacy in One
Run", arXiv 2410.22235. Its bound is for claims that come from Gaussian noise, and higher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from fedsurrogate.common.errors import ConfigError

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


def gaussian_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Largest epsilon of Gaussian noise that these answers refute.

    For claims that come from Gaussian noise, where it is higher than `epsilon_bound`.

    Args:
        guesses: the answers of the attacker.
        delta: at which epsilon is bounded.
        confidence: of the bound.

    Returns:
        The bound; 0 if there is none.

    Source:
        Mahloujifar, Melis & Chaudhuri 2024.

    Example:
        >>> round(gaussian_bound(Guesses(canaries=1000, guessed=100, right=95), delta=1e-5), 2)
        3.32
    """
    from fedsurrogate.common.privacy.accounting import gaussian_epsilon

    low, high = 0.0, LARGEST
    while high - low > 1e-4:
        middle = (low + high) / 2
        refuted = _impossible(guesses, middle, 1 - confidence)
        low, high = (middle, high) if refuted else (low, middle)
    return gaussian_epsilon(1 / low, delta) if low > 0 else 0.0


def _impossible(guesses: Guesses, mu: float, tail: float) -> bool:
    """Whether so many right answers have a probability below `tail` under Gaussian noise of
    standard deviation 1 / mu.

    p_j is the probability of j right answers of c, for m canaries. Let right = sum of j / m p_j and
    wrong = sum of (c - j) / m p_j over j >= i: the probabilities that a random canary gets a right
    or a wrong answer and that at least i answers are right. Privacy gives right(i + 1) <=
    F(wrong(i)), with F the largest rate of true alarms for a rate of false ones. From an assumed
    tail at the observed number, both grow as i falls to 0. If their sum exceeds c / m, the tail is
    smaller than assumed.
    """
    normal, c, m = NormalDist(), guesses.guessed, guesses.canaries
    right, wrong = tail * guesses.right / m, tail * (c - guesses.right) / m
    for i in range(guesses.right - 1, -1, -1):
        before, wrong = (
            wrong,
            max(wrong, normal.cdf(normal.inv_cdf(right) - mu) if right > 0 else 0.0),
        )
        right += i / (c - i) * (wrong - before)
        if right + wrong > c / m:
            return True
    return False


def best_count(scores: Tensor, included: Tensor, delta: float, shares: Sequence[float]) -> int:
    """The number of answers with the highest bound.

    For the run after this one: on the same run the choice would have seen the answers.

    Args:
        scores: of the canaries, (m,).
        included: whether each canary was in the data, (m,), bool.
        delta: at which epsilon is bounded.
        shares: the numbers of answers to choose from, as shares of the canaries.

    Returns:
        The number of answers, at least two.
    """
    counts = [max(2, round(share * len(scores))) for share in shares]
    return max(counts, key=lambda count: gaussian_bound(guess(scores, included, count), delta))
