"""Whether what an attack finds contradicts the claim (epsilon, delta) of the release."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsurrogate.client_app.audit.membership import Mask, Matrix, Trials, answers
from fedsurrogate.common.privacy.one_run import epsilon_bound

# Shares of all scores that the attacker names: the highest ones, and the lowest ones.
SHARES = (0.001, 0.01, 0.1, 0.5)
# Probability that the interval of an excess does not hold it.
INTERVAL_ERROR = 0.01
# Probability that `proven_epsilon` exceeds a true claim. Theorem 5.2 refutes nothing at an error
# below ten times delta.
FALSE_ALARM = 1e-3


@dataclass(frozen=True)
class Excess:
    """By how much an attack finds more than a claim allows; negative where it finds less.

    The attacker names records as members, or as others. The interval is that of the threshold with
    the largest `low`; the claim is broken if this is above 0.

    Attributes:
        excess: true_rate minus what the claim allows at this false_rate.
        low: lower end of its interval.
        high: upper end of its interval.
        true_rate: of the records that are what the attacker names, the share that it names.
        false_rate: of the records that are not, the share that it names.
    """

    excess: float
    low: float
    high: float
    true_rate: float
    false_rate: float


def allowed_auc(epsilon: float, delta: float) -> float:
    """Largest AUC of any attack on an (epsilon, delta)-DP release of one record.

    It is the area under the release's trade-off curve. No attack has less than one minus this,
    either: turned round, it would have more.

    Args:
        epsilon: of the claim; 0 for no claim.
        delta: of the claim.

    Example:
        >>> round(allowed_auc(1.0, 0.0), 3), allowed_auc(0.0, 0.0)
        (0.731, 1.0)
    """
    if not epsilon:
        return 1.0
    corner = (1 - delta) / (1 + math.exp(epsilon))
    false = np.array([0.0, corner, 1 - delta, 1.0])
    true = np.array([delta, 1 - corner, 1.0, 1.0])
    return float(np.trapezoid(true, false))


def largest_excess(ratios: Matrix, members: Mask, epsilon: float, delta: float) -> Excess | None:
    """The largest excess of TPR over e^epsilon FPR + delta, over thresholds, in both directions.

    The attacker names the records with the highest or the lowest scores, as members or as others:
    an attack that is far worse than a guess is a strong one turned round. The interval is Student's
    over the pairs, whose noise is independent, and no narrower than that of independent records. It
    holds for all thresholds and directions together (Bonferroni).

    Args:
        ratios: scores (K, n), of pairs of complementary releases, in which each record is a member
            once.
        members: (K, n), whether a release was made with a record.
        epsilon: of the claim.
        delta: of the claim.

    Returns:
        The excess; None if the claim allows everything at all these thresholds.
    """
    from scipy.stats import t as student

    order = np.sort(ratios, axis=None)
    counts = [max(1, round(share * order.size)) for share in SHARES]
    named = [ratios >= order[-number] for number in counts] + [
        ratios <= order[number - 1] for number in counts
    ]
    pairs, count = len(ratios) // 2, members.shape[1]
    width = student.ppf(1 - INTERVAL_ERROR / (4 * len(named)), pairs - 1)
    excesses = []
    for chosen in named:
        rates = [
            (chosen & mask)[: 2 * pairs].reshape(pairs, -1).sum(1) / count
            for mask in (members, ~members)
        ]
        for true, false in (rates, rates[::-1]):
            if math.exp(epsilon) * float(false.mean()) + delta >= 1:
                continue
            each = true - math.exp(epsilon) * false - delta
            spread = [rate.mean() * (1 - rate.mean()) for rate in (true, false)]
            least = (spread[0] + math.exp(2 * epsilon) * spread[1]) / (pairs * count)
            error = width * math.sqrt(max(each.var(ddof=1) / pairs, least))
            middle = float(each.mean())
            excesses.append(
                Excess(
                    middle, middle - error, middle + error, float(true.mean()), float(false.mean())
                )
            )
    return max(excesses, key=lambda each: each.low, default=None)


def proven_epsilon(trials: Trials, delta: float) -> float:
    """Epsilon that an attack refutes, with a probability of error of FALSE_ALARM at most.

    It holds for every mechanism.

    Args:
        trials: of the attack.
        delta: at which epsilon is refuted.

    Returns:
        Epsilon; 0 for none.

    Source: Steinke, Nasr & Jagielski 2023, theorem 5.2.
    """
    return epsilon_bound(answers(trials), delta, 1 - FALSE_ALARM)
