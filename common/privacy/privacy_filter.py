"""The privacy filter: decides which releases are still allowed when each is chosen after seeing all
earlier results.

Composition theorems for parameters fixed in advance do not cover such an adaptive coordinator. For
sampled Gaussian mechanisms this matters: the privacy loss distributions of two mechanisms may
cross, so an adversary who sees the first result can choose the mechanism that is worse from then on
(test_adaptive_filter.py computes it). A filter is a rule that refuses releases, so that the
accepted ones satisfy the total for any strategy (Rogers, Roth, Ullman & Vadhan 2016).

**Theorem.** The releases that `PrivacyFilter` accepts are together (epsilon,
delta_total)-differentially private under fully adaptive composition. It accepts a history if one of
two rules accepts it:

1. *exact*, at (epsilon, delta). It has two forms. The very first release decides which one, before
  any result is seen:
   - the first run has only Gaussian releases: a history of Gaussian releases is accepted while the
     sum of 1 / noise_multiplier^2 is at most mu^2, where one release of noise 1 / mu is exactly
     (epsilon, delta)-private. Valid under full adaptivity by Smith & Thakurta 2022, "Fully Adaptive
     Composition for Gaussian Differential Privacy" (also Koskela, Tobaben & Honkela 2023,
     "Individual Privacy Accounting with Gaussian Differential Privacy");
   - the first run samples: only a history that follows the plan of this one run is accepted. Its
     noise, rates and their order are fixed, so composition by privacy loss distributions holds, and
     stopping early is post-processing.
2. *Renyi*, at (epsilon, delta_total - delta): a history is accepted while the sum of its Renyi
   divergences of one order is at most the budget of that order (Feldman & Zrnic 2021, "Individual
   Privacy Accounting via a Renyi Filter"). The policy alone fixes the order. The conversion is that
   of Canonne, Kamath & Steinke 2020, proposition 12.

Each rule alone is a valid filter. Both together cost the sum of their deltas. Proof: for
neighbouring data D, D' let P, Q be the distributions of transcripts, and E the transcripts whose
whole history rule 1 accepts. Rule 2 accepts every other transcript, because both rules accept every
prefix of a history that they accept. On E the process is the same as one in which rule 1 alone
halts the same adversary: same requests, same acceptances. So P(S and E) <= e^epsilon Q(S and E) +
delta for every set S, and likewise P(S without E) <= e^epsilon Q(S without E) + (delta_total -
delta). The theorem is the sum of both inequalities.

Why one order, not several: an order chosen afterwards would need such a sum over all orders. Half
of delta for each of two orders costs 5 to 8 % of the releases, while the best single order gains at
most 4 % over the fixed one (noise 1 to 40, rates 0.01 to 0.1, totals 1 to 8; at total 1, noise
below 1.4 loses more). The fixed order is the one that allows most Gaussian releases. Compared with
loss distributions, the rule costs 7 to 14 % of the releases at the same delta, up to 23 % with
noise below 1.

Interleaved runs need no extra argument: all releases are checked in one order, the order of the
ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    epsilon_spent,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)

# The largest order that a filter may use. Larger ones would help only for totals below 0.003.
LARGEST_ORDER = 10_000


@dataclass(frozen=True)
class PrivacyFilter:
    """A filter for the total (epsilon, delta_total).

    Attributes:
        epsilon: of the total.
        delta: for the exact rule.
        delta_total: of the total; what it has above `delta` is for the Renyi rule.

    Raises:
        ConfigError: for a delta_total that leaves nothing for the Renyi rule.

    Example:
        >>> total = PrivacyFilter(epsilon=1.0, delta=1e-5, delta_total=2e-5)
        >>> round(total.spent([GaussianEvent(8.0)], exact=True), 3)
        0.434
        >>> round(total.spent([GaussianEvent(8.0)], exact=False), 3)
        0.475
    """

    epsilon: float
    delta: float
    delta_total: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < self.delta_total < 1:
            raise ConfigError(
                f"delta-total = {self.delta_total:g}: must lie above delta = {self.delta:g}, the "
                "part for exact accounting, and below 1"
            )

    @property
    def order(self) -> int:
        """The fixed order of the Renyi rule. It depends on the policy, never on the history."""
        return best_order(self.epsilon, self.delta_total - self.delta)

    def spent(self, events: Sequence[GaussianEvent], exact: bool) -> float:
        """Epsilon spent by a history; the history is accepted while this is at most `epsilon`.

        Args:
            events: the history, in its order.
            exact: whether rule 1 applies.

        Returns:
            By rule 1, the true epsilon at `delta`. By rule 2, the epsilon of one Gaussian release
            that takes the same share of its budget: zero for no releases, `epsilon` for the whole
            budget, and increasing in between. The smaller one where both apply.
        """
        chosen = tuple(events)
        if not chosen:
            return 0.0
        renyi = self.of_share(self.renyi_share(chosen))
        return min(renyi, composed(chosen, self.delta)) if exact else renyi

    def renyi_share(self, events: Iterable[GaussianEvent]) -> float:
        """Share of the Renyi budget that these releases take. Above one, they are refused."""
        budget = renyi_budget(self.epsilon, self.delta_total - self.delta, self.order)
        taken = sum(event.count * renyi_divergence(event, self.order) for event in events)
        return taken / budget if budget > 0 else math.inf if taken else 0.0

    def gaussian_share(self, events: Iterable[GaussianEvent]) -> float:
        """Share of mu^2 that Gaussian releases take; infinite if one of them is sampled."""
        precision = sum(
            e.count / e.noise_multiplier**2 if e.sample_rate == 1 else math.inf for e in events
        )
        return precision * gaussian_noise_multiplier(self.epsilon, self.delta) ** 2

    def of_share(self, share: float) -> float:
        """Epsilon at `delta` of one Gaussian release that takes this share of the total's
        precision.
        """
        if not 0 < share < math.inf:
            return share
        return gaussian_epsilon(
            gaussian_noise_multiplier(self.epsilon, self.delta) / math.sqrt(share), self.delta
        )


def renyi_divergence(event: GaussianEvent, order: int) -> float:
    """Renyi divergence of one Gaussian release, with or without Poisson sampling, for add/remove.

    A is written as 1 + a sum of positive terms, so no digits cancel: log(1 + sum_k>=2 C(order, k)
    q^k (1 - q)^(order - k) (exp(k (k - 1) / (2 noise^2)) - 1)).

    Args:
        event: the release; its count is not used.
        order: an integer, at least 2.

    Source:
        Mironov, Talwar & Zhang 2019, section 3.3, whose theorem covers both directions.

    Example:
        >>> renyi_divergence(GaussianEvent(2.0), order=8)
        1.0
    """
    noise, rate = event.noise_multiplier, event.sample_rate
    if rate == 1:
        return order / (2 * noise**2)
    import numpy as np
    from scipy.special import gammaln, logsumexp

    k = np.arange(2, order + 1)
    exponent = k * (k - 1) / (2 * noise**2)
    choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = (
        choose
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
        + exponent
        + np.log(-np.expm1(-exponent))
    )
    return float(np.logaddexp(0.0, logsumexp(terms))) / (order - 1)


def renyi_budget(epsilon: float, delta: float, order: float) -> float:
    """The largest Renyi divergence of this order that implies (epsilon, delta).

    Args:
        epsilon: implied.
        delta: implied.
        order: of the divergence, above one.

    Returns:
        The divergence; negative if there is none.

    Source:
        Canonne, Kamath & Steinke 2020, "The Discrete Gaussian for Differential Privacy",
        proposition 12, solved for the divergence.
    """
    return epsilon + (math.log(delta) + math.log(order)) / (order - 1) - math.log1p(-1 / order)


@cache
def best_order(epsilon: float, delta: float) -> int:
    """The order whose budget allows the most Gaussian releases. Each release takes order / (2
    noise^2) of it.
    """
    return max(
        range(2, LARGEST_ORDER + 1), key=lambda order: renyi_budget(epsilon, delta, order) / order
    )


@cache
def composed(events: tuple[GaussianEvent, ...], delta: float) -> float:
    """`epsilon_spent` with a cache: an accountant of privacy loss distributions takes seconds."""
    return epsilon_spent(events, delta)
