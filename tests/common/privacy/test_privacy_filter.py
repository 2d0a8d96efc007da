"""The filter never allows more than its total, for any strategy, and is exact for Gaussian
histories.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    PrivacyFilter,
    best_order,
    epsilon_spent,
    gaussian_noise_multiplier,
    renyi_budget,
    renyi_divergence,
)
from tests.attacks.privacy.adaptive import adaptive_delta, least_noise

RATES = st.sampled_from([1.0, 0.5, 0.2, 0.05, 0.01, 1e-3, 1e-4])
TOTALS = st.builds(
    lambda epsilon, delta, more: PrivacyFilter(epsilon, delta, delta * more),
    st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]),
    st.sampled_from([1e-3, 1e-5, 1e-6]),
    st.sampled_from([1.5, 2.0, 4.0]),
)
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
@given(TOTALS, st.lists(st.floats(0.5, 50), min_size=1, max_size=6))
def test_gaussian_histories_are_counted_exactly(total: PrivacyFilter, noises: list[float]) -> None:
    events = [GaussianEvent(noise) for noise in noises]
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


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.3, 30),
    st.sampled_from([1.0, 0.5, 0.1, 0.01, 1e-4]),
    st.sampled_from([2, 3, 6, 18, 64]),
)
def test_renyi_divergences_are_those_of_the_accountant(
    noise: float, rate: float, order: int
) -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant([order])
    gaussian = GaussianDpEvent(noise)
    accountant.compose(gaussian if rate == 1 else PoissonSampledDpEvent(rate, gaussian))
    wanted = float(accountant._rdp[0])
    assert renyi_divergence(GaussianEvent(noise, rate), order) == pytest.approx(
        wanted, rel=1e-6, abs=1e-12
    )


@pytest.mark.parametrize("order", [6, 18, 64])
def test_the_conversion_is_that_of_the_accountant(order: int) -> None:
    from dp_accounting.rdp import compute_epsilon

    assert compute_epsilon([order], [renyi_budget(4.0, 1e-5, order)], 1e-5)[0] == pytest.approx(4.0)


def test_the_order_is_the_policy_s_and_loses_little() -> None:
    """For Gaussian releases, the Renyi rule allows more than four fifths of the amount under exact
    composition.
    """
    for epsilon in (0.5, 1.0, 4.0, 8.0):
        order = best_order(epsilon, 1e-5)
        allowed = 2 * renyi_budget(epsilon, 1e-5, order) / order
        assert 0.8 < allowed * gaussian_noise_multiplier(epsilon, 1e-5) ** 2 < 1
    assert best_order(4.0, 1e-5) == 6


def test_a_total_too_small_for_the_renyi_rule_allows_no_sampled_release() -> None:
    tiny = PrivacyFilter(1e-4, 1e-6, 2e-6)
    assert tiny.spent([GaussianEvent(1e6, 0.01)], exact=False) == math.inf
    assert tiny.spent([], exact=False) == 0


@pytest.mark.parametrize("delta_total", [1e-5, 5e-6, 1.0, 0.0])
def test_delta_total_leaves_something_for_either_rule(delta_total: float) -> None:
    with pytest.raises(ConfigError, match="delta-total"):
        PrivacyFilter(4.0, 1e-5, delta_total)


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


@given(TOTALS, EVENTS)
def test_a_release_of_many_steps_costs_what_its_steps_cost(
    total: PrivacyFilter, events: list[GaussianEvent]
) -> None:
    for event in events:
        once = total.renyi_share([GaussianEvent(event.noise_multiplier, event.sample_rate)])
        assert total.renyi_share([event]) == pytest.approx(event.count * once)
        if event.sample_rate == 1:
            alone = total.gaussian_share([GaussianEvent(event.noise_multiplier)])
            assert total.gaussian_share([event]) == pytest.approx(event.count * alone)
    assert total.renyi_share(events) == pytest.approx(sum(total.renyi_share([e]) for e in events))
