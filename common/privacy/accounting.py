"""Privacy accounting: the exact cost of one Gaussian release and of all together, which releases
the filter still allows, and what a person should know of a large budget.

Neighbouring data sets differ by adding or removing one UNIT: a record, or a patient with all
records of that patient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..errors import ConfigError

Unit = Literal["record", "patient"]


@dataclass(frozen=True)
class GaussianEvent:
    """A release: `count` times the Gaussian mechanism.

    Attributes:
        noise_multiplier: standard deviation of the noise in multiples of the sensitivity.
        sample_rate: below one, each time on a Poisson sample of the units (DP-SGD).
        count: how many times.

    Raises:
        ConfigError: unless noise_multiplier is positive, sample_rate in (0, 1], count at least 1.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        if not (
            0 < self.noise_multiplier < math.inf and 0 < self.sample_rate <= 1 and self.count >= 1
        ):
            raise ConfigError(
                f"{self}: noise_multiplier must be positive, sample_rate in (0, 1], count at least "
                "1"
            )


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The exact delta of one Gaussian release at `epsilon`, for adding or removing one unit.

    Args:
        noise_multiplier: standard deviation of the noise in multiples of the sensitivity.
        epsilon: zero or more.

    Source:
        Balle & Wang 2018, theorem 8, with sensitivity 1.

    Example:
        >>> f"{gaussian_delta(noise_multiplier=4.0, epsilon=1.0):.1e}"
        '2.9e-06'
    """
    from scipy.special import log_ndtr

    mu = 1 / noise_multiplier
    first, second = (
        float(log_ndtr(mu / 2 - epsilon / mu)),
        epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)),
    )
    # exp(first) - exp(second), without loss of digits when they are close.
    return 0.0 if second >= first else -math.exp(first) * math.expm1(second - first)


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon of one Gaussian release at `delta`: the inverse of `gaussian_delta`, never
    below it.

    Args:
        noise_multiplier: standard deviation of the noise in multiples of the sensitivity.
        delta: in (0, 1).

    Raises:
        ConfigError: for another delta.

    Example:
        >>> round(gaussian_epsilon(noise_multiplier=4.0, delta=1e-5), 3)
        0.926
    """
    _check_delta(delta)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    # At epsilon = mu^2 / 2 + mu t, delta is below Phi(-t), which is zero in floating point for t =
    # 40.
    largest = 0.5 / noise_multiplier**2 + 40 / noise_multiplier
    return _smallest(
        lambda epsilon: gaussian_delta(noise_multiplier, epsilon) <= delta, 0.0, largest
    )


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """The smallest noise that makes one Gaussian release (epsilon, delta)-DP.

    Args:
        epsilon: positive and finite.
        delta: in (0, 1).

    Returns:
        Standard deviation of the noise in multiples of the sensitivity.

    Raises:
        ConfigError: for another epsilon or delta.

    Source:
        Balle & Wang 2018, analytic calibration.

    Example:
        >>> round(gaussian_noise_multiplier(epsilon=1.0, delta=1e-5), 3)
        3.731
    """
    _check_delta(delta)
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon = {epsilon:g}: must be a positive number")
    # At noise z = 1 / delta, delta(0) = 2 Phi(1 / (2 z)) - 1 < 1 / (z sqrt(2 pi)) is below the
    # requested delta.
    return _smallest(lambda noise: gaussian_delta(noise, epsilon) <= delta, 1e-6, 1 / delta)


def epsilon_spent(
    events: Iterable[GaussianEvent], delta: float, replace_one: bool = False
) -> float:
    """Epsilon at `delta` of all releases together.

    Gaussian releases compose exactly: n of them equal one whose 1 / noise_multiplier^2 is the sum
    of theirs, without any discretisation. If there are releases on Poisson samples, dp-accounting's
    accountant of privacy loss distributions composes all.

    Args:
        events: the releases.
        delta: in (0, 1).
        replace_one: use the stronger relation, in which one unit is replaced; otherwise one unit is
            added or removed.

    Returns:
        Epsilon; infinite if no finite one holds. No events cost nothing.

    Raises:
        ConfigError: for another delta, or Poisson samples with `replace_one`.

    Example:
        Four releases equal one with half of their noise:

        >>> round(epsilon_spent([GaussianEvent(noise_multiplier=4.0, count=4)], delta=1e-5), 3)
        1.993
        >>> round(epsilon_spent([GaussianEvent(noise_multiplier=2.0)], delta=1e-5), 3)
        1.993
        >>> epsilon_spent([], delta=1e-5)
        0.0
    """
    _check_delta(delta)
    merged, sampled = _merge(events)
    if sampled:
        return pld_epsilon([*merged, *sampled], delta, replace_one)
    return (
        gaussian_epsilon(merged[0].noise_multiplier / (2 if replace_one else 1), delta)
        if merged
        else 0.0
    )


def pld_epsilon(events: Iterable[GaussianEvent], delta: float, replace_one: bool = False) -> float:
    """The same as `epsilon_spent` by dp-accounting's PLD accountant for all releases.

    Args:
        events: the releases.
        delta: in (0, 1).
        replace_one: as in `epsilon_spent`.

    Raises:
        ConfigError: for Poisson samples with `replace_one`, for which the accountant has no bound.

    Source:
        Meiser & Mohammadi 2018, Koskela et al. 2020.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    chosen = list(events)
    if replace_one and any(event.sample_rate < 1 for event in chosen):
        raise ConfigError(
            "releases on Poisson samples have accounting for add/remove only, not for replace-one"
        )
    relation = (
        NeighboringRelation.REPLACE_ONE if replace_one else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    accountant = PLDAccountant(relation)
    accountant.compose(_dp_events(chosen))
    return float(accountant.get_epsilon(delta))


def rdp_epsilon(events: Iterable[GaussianEvent], delta: float) -> float:
    """A looser bound on epsilon by Renyi divergences, for add/remove only: dp-accounting's is wrong
    by two for replace-one.

    Args:
        events: the releases.
        delta: in (0, 1).
    """
    from dp_accounting.rdp import RdpAccountant

    # The accountant logs every order that it skips; the bound from the other orders is still valid.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant()
    accountant.compose(_dp_events(list(events)))
    return float(accountant.get_epsilon(delta))


def calibrate(
    epsilon: float,
    delta: float,
    sample_rate: float = 1.0,
    count: int = 1,
    spent: Sequence[GaussianEvent] = (),
) -> float:
    """The smallest noise multiplier for which `count` further releases keep the total within
    (epsilon, delta).

    Args:
        epsilon: of the total.
        delta: of the total.
        sample_rate: of the further releases; below one, each is on a Poisson sample of the units.
        count: number of further releases.
        spent: the earlier releases.

    Returns:
        Standard deviation of the noise of each further release, in multiples of the sensitivity.

    Raises:
        ConfigError: when the earlier releases alone exceed the total.

    Example:
        >>> round(calibrate(epsilon=1.0, delta=1e-5, count=4), 3)
        7.461
    """
    merged, sampled = _merge(spent)
    if sample_rate == 1 and not sampled:
        # Precisions add up, so the remaining budget has a closed form.
        left = gaussian_noise_multiplier(epsilon, delta) ** -2 - sum(
            event.noise_multiplier**-2 for event in merged
        )
        if left > 0:
            return math.sqrt(count / left)
    if spent and epsilon_spent(spent, delta) >= epsilon:
        raise ConfigError(
            f"epsilon = {epsilon:g} is spent already at delta = {delta:g}; ask for less, or raise "
            "the budget"
        )

    def tight(noise: float) -> float:
        return epsilon_spent([*spent, GaussianEvent(noise, sample_rate, count)], delta)

    if sample_rate < 1:
        # The looser bound is five times faster to evaluate: it gives the bracket for the search
        # with the tight bound.
        def loose(noise: float) -> float:
            return rdp_epsilon([*spent, GaussianEvent(noise, sample_rate, count)], delta)

        high = _smallest_below(loose, epsilon, 0.1, 1e4, 1.0) if loose(1e4) <= epsilon else 1.0
        while tight(high) > epsilon and high < 1e6:
            high *= 2
        while True:
            found = _smallest_below(tight, epsilon, high / 2, high, 0.98 * high)
            if found > 1.002 * high / 2:
                return found
            # Where little is left, the looser bound asks for more than twice the noise.
            high = found
    return _smallest(lambda noise: tight(noise) <= epsilon, 1e-3, 1e6)


def _merge(events: Iterable[GaussianEvent]) -> tuple[list[GaussianEvent], list[GaussianEvent]]:
    """All full-batch releases merged into one, and the sampled ones merged by equal settings."""
    precision = 0.0
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        if event.sample_rate == 1:
            precision += event.count / event.noise_multiplier**2
        else:
            key = (event.noise_multiplier, event.sample_rate)
            counts[key] = counts.get(key, 0) + event.count
    merged = [GaussianEvent(1 / math.sqrt(precision))] if precision else []
    return merged, [GaussianEvent(noise, rate, count) for (noise, rate), count in counts.items()]


def _dp_events(events: Sequence[GaussianEvent]) -> object:
    import dp_accounting as dp

    composed = []
    for event in events:
        once = dp.GaussianDpEvent(event.noise_multiplier)
        each = once if event.sample_rate == 1 else dp.PoissonSampledDpEvent(event.sample_rate, once)
        composed.append(dp.SelfComposedDpEvent(each, event.count))
    return dp.ComposedDpEvent(composed)


def _smallest(
    holds: Callable[[float], bool], low: float, high: float, relative: float = 0.0
) -> float:
    """The smallest number in [low, high] that `holds` accepts, by bisection. `holds` must stay true
    once it is true.
    """
    while high - low > relative * high:
        # Geometric steps if the range spans orders of magnitude.
        middle = math.sqrt(low * high) if low > 0 and high > 2 * low else (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _smallest_below(
    value: Callable[[float], float], limit: float, low: float, high: float, start: float
) -> float:
    """`_smallest` to one in a thousand, for the condition that `value`, which falls, is at most
    `limit`.

    Steps by the secant of the logarithms, from `start`, come first. They leave bisection little of
    the range to ask about.
    """
    below, above = low, high
    x, last = start, (math.inf, 0.0)
    for _ in range(6):
        here = math.log(x), math.log(max(value(x), 1e-300))
        below, above = (
            (below, min(above, x)) if here[1] <= math.log(limit) else (max(below, x), above)
        )
        slope = (here[1] - last[1]) / (here[0] - last[0])
        step = (math.log(limit) - here[1]) / (slope if -20 < slope < -0.05 else -1.0)
        # The next point lies beyond the limit, so that both sides come close.
        x, last = math.exp(here[0] + step + math.copysign(1e-4, step)), here
        if not below < x < above or above < below * 1.0004:
            break

    def holds(x: float) -> bool:
        return x >= above or (x > below and value(x) <= limit)

    return _smallest(holds, low, high, 1e-3)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(
            f"delta = {delta:g}: must lie between 0 and 1, and far below one over the number of "
            "records"
        )


# Above it the bound on what a release shows of one record is no protection by itself.
LARGE_EPSILON = 20.0


def budget_warnings(epsilon: float, delta: float, records: int = 0) -> list[str]:
    """Warnings on a budget, a sentence each.

    Args:
        epsilon: of a run; 0 without privacy.
        delta: of the run.
        records: at the site that has fewest; 0 if unknown.

    Example:
        >>> budget_warnings(8.0, 1e-5, 1500)
        []
        >>> [each.partition(":")[0] for each in budget_warnings(1000.0, 0.01, 1500)]
        ['epsilon = 1000 is above 20', 'delta = 0.01 is above 1 / 1500 records of a site']
    """
    found = []
    if epsilon > LARGE_EPSILON:
        found.append(
            f"epsilon = {epsilon:g} is above {LARGE_EPSILON:g}: a release with it may show a record; "
            "budgets of 1 to 10 are usual"
        )
    if epsilon and records and delta > 1 / records:
        found.append(
            f"delta = {delta:g} is above 1 / {records} records of a site: whole records may be shown "
            f"with that chance each; take one far below, such as {0.1 / records:.0e}"
        )
    return found


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
