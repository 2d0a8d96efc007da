"""Lower bounds on the epsilon of Gaussian noise from one run: higher than those for any mechanism.

Source: Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-Differential Privacy in One Run", arXiv
2410.22235, which takes the whole trade-off of false alarms and misses instead of one (epsilon,
delta).
"""

from collections.abc import Sequence
from statistics import NormalDist

from torch import Tensor

from fedsurrogate.client_app.audit.membership import LARGEST, Guesses, guess
from fedsurrogate.common.privacy.accounting import gaussian_epsilon


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
