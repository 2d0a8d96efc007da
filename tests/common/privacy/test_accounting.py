"""Privacy accounting, compared with multi-precision arithmetic, dp-accounting, and known values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    calibrate,
    epsilon_spent,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    pld_epsilon,
    rdp_epsilon,
)

TEN = [GaussianEvent(2.0, count=10)]
ROUND = GaussianEvent(1.0, sample_rate=0.0256, count=200)


def exact_delta(noise: float, epsilon: float) -> mpf:
    """Theorem 8 of Balle & Wang with a hundred digits."""
    with mp.workdps(100):
        mu, e = 1 / mpf(noise), mpf(epsilon)
        return mp.ncdf(mu / 2 - e / mu) - mp.exp(e) * mp.ncdf(-mu / 2 - e / mu)


@pytest.mark.parametrize("delta", [1e-10, 1e-6, 1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("epsilon", [0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 20, 50])
def test_the_calibration_is_tight(epsilon: float, delta: float) -> None:
    noise = gaussian_noise_multiplier(epsilon, delta)
    assert float(abs(exact_delta(noise, epsilon) / mpf(delta) - 1)) < 1e-9
    assert gaussian_epsilon(noise, delta) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_delta(noise, epsilon) <= delta


@pytest.mark.parametrize("noise", [0.1, 1.0, 30.0, 1e6])
def test_noise_that_needs_no_epsilon_for_its_delta_costs_none(noise: float) -> None:
    assert gaussian_epsilon(noise, gaussian_delta(noise, 0.0)) == 0


def test_the_classical_formula_breaks_its_promise_at_large_epsilon() -> None:
    classical = math.sqrt(2 * math.log(1.25 / 1e-5)) / 10
    assert gaussian_epsilon(classical, 1e-5) == pytest.approx(10.39, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", [pld_epsilon, epsilon_spent])
def test_ten_releases_cost_what_is_known(accountant: object) -> None:
    assert accountant(TEN, 1e-5) == pytest.approx(7.51, abs=0.005)  # type: ignore[operator]
    # dp-accounting's RDP accountant gives 8.08 here, as if only the name of the relation had
    # changed.
    assert accountant(TEN, 1e-5, replace_one=True) == pytest.approx(17.86, abs=0.005)  # type: ignore[operator]


def test_releases_on_poisson_samples_cost_what_is_known() -> None:
    assert epsilon_spent([ROUND], 1e-5) == pytest.approx(2.38, abs=0.005)
    assert rdp_epsilon([ROUND], 1e-5) == pytest.approx(2.79, abs=0.005)
    with pytest.raises(ConfigError, match="add/remove only"):
        pld_epsilon([ROUND], 1e-5, replace_one=True)


@pytest.mark.slow
def test_the_two_kinds_compose_with_each_other() -> None:
    half = GaussianEvent(1.0, sample_rate=0.0256, count=100)
    both = epsilon_spent([half, *TEN, half], 1e-5)
    assert both == pytest.approx(pld_epsilon([*TEN, ROUND], 1e-5), rel=1e-6)
    assert max(7.51, 2.38) < both < 7.51 + 2.38


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.5, 30.0), min_size=1, max_size=6))
def test_exact_composition_agrees_with_the_accountant_and_stays_below_renyi(
    noises: list[float],
) -> None:
    events = [GaussianEvent(noise) for noise in noises]
    spent = epsilon_spent(events, 1e-5)
    assert spent == pytest.approx(pld_epsilon(events, 1e-5), rel=2e-3, abs=2e-4)
    assert spent <= rdp_epsilon(events, 1e-5)
    assert epsilon_spent([*events, GaussianEvent(5.0)], 1e-5) > spent


def test_sampled_releases_are_calibrated_to_the_budget() -> None:
    noise = calibrate(1.0, 1e-4, sample_rate=256 / 1613, count=1500)
    assert noise == pytest.approx(19.4, abs=0.4)
    assert 0.99 < epsilon_spent([GaussianEvent(noise, 256 / 1613, 1500)], 1e-4) <= 1.0


# FedLAP-DP: sigma 1, 256 of 10,000 records, 200 noisy gradients a round, delta 1e-5; the paper's
# epsilon by rounds.
PAPER_ROUNDS = {1: 2.79, 7: 6.72, 15: 10.18, 17: 10.93, 27: 14.30}


def paper_conversion(rounds: int) -> float:
    """Theorem 5.8 of FedLAP-DP with Opacus' accountant and the orders of the paper's code."""
    from opacus.accountants.analysis import rdp

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    spent = rdp.compute_rdp(q=0.0256, noise_multiplier=1.0, steps=200 * rounds, orders=orders)
    return float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=1e-5)[0])


@pytest.mark.parametrize(("rounds", "epsilon"), PAPER_ROUNDS.items())
def test_fedlap_budgets_of_the_paper_are_reproduced_by_its_conversion(
    rounds: int, epsilon: float
) -> None:
    assert paper_conversion(rounds) == pytest.approx(epsilon, abs=0.011)


@pytest.mark.parametrize(("rounds", "epsilon"), {1: 2.38, 7: 6.13, 15: 9.38}.items())
def test_the_tight_accountant_says_less_of_the_same_noise(rounds: int, epsilon: float) -> None:
    assert epsilon_spent([GaussianEvent(1.0, 0.0256, 200 * rounds)], 1e-5) == pytest.approx(
        epsilon, abs=0.011
    )


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.5, 5.0, 50.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_epsilon_is_the_smallest_at_which_delta_holds_from_little_noise_to_much(
    noise: float, delta: float
) -> None:
    epsilon = gaussian_epsilon(noise, delta)
    assert gaussian_delta(noise, epsilon) <= delta
    if epsilon:
        assert gaussian_delta(noise, epsilon * (1 - 1e-9)) > delta
        assert gaussian_noise_multiplier(epsilon, delta) == pytest.approx(noise, rel=1e-6)


def test_a_full_release_after_sampled_ones_gets_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uses a closed-form accountant: this tests the precision of the search, not the cost of a
    sample.
    """

    def closed_form(events: list[GaussianEvent], delta: float, replace_one: bool = False) -> float:
        return gaussian_epsilon(
            sum(e.count * (e.sample_rate / e.noise_multiplier) ** 2 for e in events) ** -0.5, delta
        )

    monkeypatch.setattr("fedsurrogate.common.privacy.accounting.pld_epsilon", closed_form)
    spent = [GaussianEvent(2.0, 0.1, 5)]
    for epsilon in (0.5, 4.0):
        noise = calibrate(epsilon, 1e-5, count=2, spent=spent)
        total = epsilon_spent([*spent, GaussianEvent(noise, count=2)], 1e-5)
        assert total <= epsilon
        assert total == pytest.approx(epsilon, rel=1e-7)


def test_a_budget_that_the_looser_bound_cannot_see_is_calibrated_all_the_same() -> None:
    noise = calibrate(0.005, 1e-5, 0.1, 3)
    assert epsilon_spent([GaussianEvent(noise, 0.1, 3)], 1e-5) <= 0.005
    assert epsilon_spent([GaussianEvent(0.99 * noise, 0.1, 3)], 1e-5) > 0.005
