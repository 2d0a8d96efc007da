"""The privacy filter: what may still leave when every release is chosen after seeing the results of all before it.

Composition theorems for parameters fixed in advance say nothing about such a coordinator. For sampled Gaussian
mechanisms the difference is real: privacy loss distributions of two mechanisms may cross, so an adversary who sees the
first result picks the one that is worse from there on (test_adaptive_filter.py computes it). A filter is a
rule that refuses a release so that everything released before satisfies the total, whatever the strategy (Rogers, Roth,
Ullman & Vadhan 2016).

**Theorem.** Releases that `PrivacyFilter` accepts are together (epsilon, delta_total)-differentially private under fully
adaptive composition. It accepts a history if one of two rules does:

1. *exact*, at (epsilon, delta). Which of two forms it has is decided by the first release of all, so before anything was
   seen:
   - the first run has Gaussian releases only: a history of Gaussian releases is accepted while the sum of
     1 / noise_multiplier^2 is at most mu^2, where one release of noise 1 / mu is exactly (epsilon, delta)-private. Valid
     under full adaptivity by Smith & Thakurta 2022, "Fully Adaptive Composition for Gaussian Differential Privacy" (also
     Koskela, Tobaben & Honkela 2023, "Individual Privacy Accounting with Gaussian Differential Privacy");
   - the first run samples: only a history that follows the plan of that one run is accepted. Its noise, rates and their
     order are fixed, so composition by privacy loss distributions holds, and stopping early is post-processing.
2. *Renyi*, at (epsilon, delta_total - delta): while the sum of the Renyi divergences of one order, fixed by the policy
   alone, is at most the budget of that order (Feldman & Zrnic 2021, "Individual Privacy Accounting via a Renyi Filter"). The
   conversion is that of Canonne, Kamath & Steinke 2020, proposition 12.

Each rule alone is a valid filter. Both together cost the sum of their deltas. For neighbouring data D, D' let P, Q be the
distributions of transcripts, and E the transcripts whose whole history rule 1 accepts; every other transcript is accepted by
rule 2, because both rules accept every prefix of what they accept. On E the process is the same as one in which rule 1 alone
halts the same adversary: same requests, same acceptances. So P(S and E) <= e^epsilon Q(S and E) + delta for every set S, and
likewise P(S without E) <= e^epsilon Q(S without E) + (delta_total - delta). The sum of both lines is the theorem.

One order is used and not several: an order chosen after the fact would need such a sum over all of them, and half of
delta for each of two orders costs 5 to 8 % of the releases, while the best single order gains at most 4 % over the fixed
one (noise 1 to 40, rates 0.01 to 0.1, totals 1 to 8; at total 1 noise below 1.4 loses more). It is the order that allows
most Gaussian releases. Against loss distributions the rule costs 7 to 14 % of the releases at the same delta, up to 23 %
with noise below 1.

Interleaved runs need no argument of their own: releases have one order, that of the ledger, and each is judged in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from common.errors import ConfigError
from common.privacy.accounting import GaussianEvent, epsilon_spent, gaussian_epsilon, gaussian_noise_multiplier

# Orders that a filter may use. Larger ones would serve totals below 0.003 only.
LARGEST_ORDER = 10_000


@dataclass(frozen=True)
class PrivacyFilter:
    """The total (epsilon, delta_total); `delta` of it is for the exact rule, the rest for the Renyi rule.

    Raises ConfigError for delta_total that leaves the Renyi rule nothing.
    """

    epsilon: float
    delta: float
    delta_total: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < self.delta_total < 1:
            raise ConfigError(
                f"delta-total = {self.delta_total:g}: must lie above delta = {self.delta:g}, the part for exact accounting, "
                "and below 1"
            )

    @property
    def order(self) -> int:
        """The fixed order of the Renyi rule: a function of the policy, never of the history."""
        return best_order(self.epsilon, self.delta_total - self.delta)

    def spent(self, events: Sequence[GaussianEvent], exact: bool) -> float:
        """Epsilon that a history takes of the total; it is accepted while this is at most `epsilon`.

        exact: whether rule 1 applies. By rule 1 it is the true epsilon at `delta`; by rule 2 that of one Gaussian release
        which takes the same share of its budget, so it is zero for nothing, `epsilon` for everything, and grows between.
        """
        chosen = tuple(events)
        if not chosen:
            return 0.0
        renyi = self.of_share(self.renyi_share(chosen))
        return min(renyi, composed(chosen, self.delta)) if exact else renyi

    def renyi_share(self, events: Iterable[GaussianEvent]) -> float:
        """The share of the Renyi budget that these releases take; above one they are refused."""
        budget = renyi_budget(self.epsilon, self.delta_total - self.delta, self.order)
        taken = sum(event.count * renyi_divergence(event, self.order) for event in events)
        return taken / budget if budget > 0 else math.inf if taken else 0.0

    def gaussian_share(self, events: Iterable[GaussianEvent]) -> float:
        """The share of mu^2 that Gaussian releases take; infinite with a sampled one among them."""
        precision = sum(e.count / e.noise_multiplier**2 if e.sample_rate == 1 else math.inf for e in events)
        return precision * gaussian_noise_multiplier(self.epsilon, self.delta) ** 2

    def of_share(self, share: float) -> float:
        """Epsilon at `delta` of one Gaussian release that takes this share of the total's precision."""
        if not 0 < share < math.inf:
            return share
        return gaussian_epsilon(gaussian_noise_multiplier(self.epsilon, self.delta) / math.sqrt(share), self.delta)


def renyi_divergence(event: GaussianEvent, order: int) -> float:
    """Renyi divergence of a whole `order` >= 2 of one Gaussian release, on a Poisson sample or not, add/remove.

    Mironov, Talwar & Zhang 2019, section 3.3, whose theorem covers both directions. A is written as 1 + a sum of positive
    terms, so nothing cancels: log(1 + sum_k>=2 C(order, k) q^k (1 - q)^(order - k) (exp(k (k - 1) / (2 noise^2)) - 1)).
    """
    noise, rate = event.noise_multiplier, event.sample_rate
    if rate == 1:
        return order / (2 * noise**2)
    import numpy as np
    from scipy.special import gammaln, logsumexp

    k = np.arange(2, order + 1)
    exponent = k * (k - 1) / (2 * noise**2)
    choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = choose + k * math.log(rate) + (order - k) * math.log1p(-rate) + exponent + np.log(-np.expm1(-exponent))
    return float(np.logaddexp(0.0, logsumexp(terms))) / (order - 1)


def renyi_budget(epsilon: float, delta: float, order: float) -> float:
    """The largest Renyi divergence of this order that implies (epsilon, delta); negative where none does.

    Canonne, Kamath & Steinke 2020, "The Discrete Gaussian for Differential Privacy", proposition 12, solved for the
    divergence.
    """
    return epsilon + (math.log(delta) + math.log(order)) / (order - 1) - math.log1p(-1 / order)


@cache
def best_order(epsilon: float, delta: float) -> int:
    """The order whose budget allows most Gaussian releases, each of which takes order / (2 noise^2) of it."""
    return max(range(2, LARGEST_ORDER + 1), key=lambda order: renyi_budget(epsilon, delta, order) / order)


@cache
def composed(events: tuple[GaussianEvent, ...], delta: float) -> float:
    """`epsilon_spent`, kept: an accountant of loss distributions takes seconds."""
    return epsilon_spent(events, delta)
