"""The filter never allows more than its total, for any strategy, and is exact for Gaussian
histories.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    PrivacyFilter,
    best_order,
    epsilon_spent,
    gaussian_noise_multiplier,
    renyi_budget,
)
from tests.attacks.privacy.adaptive import adaptive_delta, least_noise

RATES = st.sampled_from([1.0, 0.5, 0.2, 0.05, 0.01, 1e-3, 1e-4])
TOTALS = st.builds(
    lambda epsilon, delta, more: PrivacyFilter(epsilon, delta, delta * more),
    st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]),
    st.sampled_from([1e-3, 1e-5, 1e-6]),
    st.sampled_from([1.5, 2.0, 4.0]),
)
GAUSSIAN = st.builds(GaussianEvent, st.floats(0.5, 50), count=st.integers(1, 4))
EVENTS = st.lists(
    st.builds(GaussianEvent, st.floats(0.3, 50), RATES, st.sampled_from([1, 3, 100])),
    min_size=1,
    max_size=5,
)


def applies(first: GaussianEvent, second: GaussianEvent) -> bool:
    """Whether rule 1 applies to two releases of different runs; it applies to Gaussian releases
    only.
    """
    return first.sample_rate == second.sample_rate == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(TOTALS, RATES, st.floats(0.05, 0.95), st.lists(RATES, min_size=1, max_size=4, unique=True))
def test_no_strategy_of_two_steps_gets_more_than_the_total(
    total: PrivacyFilter, rate: float, part: float, rates: list[float]
) -> None:
    first = GaussianEvent(
        least_noise(lambda z: total.renyi_share([GaussianEvent(z, rate)]) <= part), rate
    )

    def largest(q: float) -> GaussianEvent:
        """The largest second release, which uses the whole remaining budget."""

        def allowed(noise: float) -> bool:
            second = GaussianEvent(noise, q)
            gaussian = applies(first, second) and total.gaussian_share([first, second]) <= 1
            return gaussian or total.renyi_share([first, second]) <= 1

        return GaussianEvent(least_noise(allowed), q)

    seconds = [largest(q) for q in {1.0, *rates}]
    for adding in (False, True):
        assert adaptive_delta(first, seconds, total.epsilon, adding) <= total.delta_total


@settings(max_examples=100, deadline=None)
@given(TOTALS, st.lists(GAUSSIAN, min_size=1, max_size=6))
def test_gaussian_histories_are_counted_exactly(
    total: PrivacyFilter, events: list[GaussianEvent]
) -> None:
    exact = epsilon_spent(events, total.delta)
    assert total.spent(events, exact=True) <= exact
    if total.delta_total <= 2 * total.delta:
        assert total.spent(events, exact=True) == exact
    assert math.isclose(
        total.of_share(total.gaussian_share(events)), exact, rel_tol=1e-6, abs_tol=1e-9
    )


@settings(max_examples=100, deadline=None)
@given(TOTALS, EVENTS, st.randoms(use_true_random=False))
def test_more_releases_never_cost_less_and_their_order_does_not_matter(
    total: PrivacyFilter, events: list[GaussianEvent], random: object
) -> None:
    counted = [total.spent(events[:count], exact=False) for count in range(len(events) + 1)]
    assert counted == sorted(counted)
    shuffled = list(events)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert math.isclose(
        total.spent(shuffled, exact=False), counted[-1], rel_tol=1e-9, abs_tol=1e-12
    )
    assert (total.renyi_share(events) <= 1) == (counted[-1] <= total.epsilon * (1 + 1e-9))


def test_the_order_is_the_policy_s_and_loses_little() -> None:
    """For Gaussian releases, the Renyi rule allows more than four fifths of the amount under exact
    composition.
    """
    for epsilon in (0.5, 1.0, 4.0, 8.0):
        order = best_order(epsilon, 1e-5)
        allowed = 2 * renyi_budget(epsilon, 1e-5, order) / order
        assert 0.8 < allowed * gaussian_noise_multiplier(epsilon, 1e-5) ** 2 < 1
    assert best_order(4.0, 1e-5) == 6


@given(TOTALS, EVENTS)
def test_the_renyi_rule_has_the_divergence_of_all_releases_and_its_own_part_of_delta(
    total: PrivacyFilter, events: list[GaussianEvent]
) -> None:
    """The accountant adds up the divergences of all `count` releases of each event, and turns them
    into epsilon at what the exact rule leaves of delta. Whatever the filter accepts is within the
    total there, and what it refuses is not.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    accountant = RdpAccountant([total.order])
    for event in events:
        once = GaussianDpEvent(event.noise_multiplier)
        each = once if event.sample_rate == 1 else PoissonSampledDpEvent(event.sample_rate, once)
        accountant.compose(SelfComposedDpEvent(each, event.count))
    divergence, left = float(accountant._rdp[0]), total.delta_total - total.delta
    share = total.renyi_share(events)
    assert compute_epsilon([total.order], [divergence / share], left)[0] == pytest.approx(
        total.epsilon, rel=1e-6
    )
    spent = compute_epsilon([total.order], [divergence], left)[0]
    if not math.isclose(share, 1, rel_tol=1e-6):
        assert (spent <= total.epsilon) == (share <= 1)
