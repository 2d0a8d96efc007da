"""The estimator of one-run audits: against closed forms, and by simulation of mechanisms with a
known epsilon.
"""

import math

import pytest
import torch
from scipy.stats import beta

from benchmarks._gaussian_bound import best_count, gaussian_bound
from fedsurrogate.client_app.audit.membership import Guesses, epsilon_bound, guess
from fedsurrogate.common.privacy.accounting import gaussian_epsilon


@pytest.mark.parametrize(("right", "guessed"), [(90, 100), (700, 1000), (100, 100), (60, 80)])
def test_without_delta_the_bound_is_that_of_clopper_and_pearson(right: int, guessed: int) -> None:
    rate = float(beta.ppf(0.05, right, guessed - right + 1))
    assert epsilon_bound(Guesses(1000, guessed, right), 0.0) == pytest.approx(
        max(0.0, math.log(rate / (1 - rate))), abs=1e-3
    )


# Canaries, answers, right ones, delta; and the bounds of theorem 5.2 and of Gaussian noise with 95
# % confidence.
JAX_PRIVACY = [
    (1000, 1000, 1000, 1e-5, 5.78228, 12.33457),
    (1000, 600, 600, 1e-5, 5.27040, 10.51489),
    (1000, 100, 95, 1e-5, 2.16518, 3.32330),
    (5000, 400, 330, 1e-5, 1.32469, 1.84237),
    (2000, 2000, 1400, 1e-6, 0.76611, 1.56529),
    (10_000, 200, 200, 1e-5, 3.90911, 5.55618),
]


@pytest.mark.parametrize(
    ("canaries", "guessed", "right", "delta", "plain", "gaussian"), JAX_PRIVACY
)
def test_bounds_are_those_of_jax_privacy(
    canaries: int, guessed: int, right: int, delta: float, plain: float, gaussian: float
) -> None:
    """Values of jax_privacy 2.0.0, auditing._epsilon_one_run and _epsilon_one_run_fdp (computed
    once, 2026-11-24).
    """
    found = Guesses(canaries, guessed, right)
    assert epsilon_bound(found, delta) == pytest.approx(plain, abs=2e-4)
    assert gaussian_bound(found, delta) == pytest.approx(gaussian, abs=1e-3)


def test_as_many_right_as_wrong_prove_nothing() -> None:
    assert epsilon_bound(Guesses(1000, 500, 250), 1e-5) == 0.0


def responses(epsilon: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Randomized response: the mechanism for which the bound is tight."""
    included = torch.rand(count) < 0.5
    honest = torch.rand(count) < 1 / (1 + math.exp(-epsilon))
    return torch.where(honest, included, ~included).float() + 1e-3 * torch.rand(count), included


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomized_response_is_seldom_overestimated_and_nearly_reached(epsilon: float) -> None:
    bounds = [epsilon_bound(guess(*responses(epsilon, 2000), 2000), 0.0) for _ in range(200)]
    # 5 % are allowed; 10 of 200 are expected, and more than 20 would be as unlikely as one in a
    # thousand.
    assert sum(bound > epsilon for bound in bounds) <= 20
    assert sum(bounds) / len(bounds) > 0.75 * epsilon


def gaussian(multiplier: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    included = torch.rand(count) < 0.5
    return included.float() + multiplier * torch.randn(count), included


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("multiplier", [0.4, 1.0, 3.0])
def test_gaussian_noise_is_seldom_overestimated_and_the_bound_of_its_trade_off_is_higher(
    multiplier: float, share: float
) -> None:
    claim = gaussian_epsilon(multiplier, 1e-5)
    answers = [guess(*gaussian(multiplier, 1000), round(1000 * share)) for _ in range(100)]
    # 5 % are allowed: 5 of 100 are expected at most, and more than 13 would be as unlikely as one
    # in a thousand.
    assert sum(gaussian_bound(each, 1e-5) > claim for each in answers) <= 13
    found = answers[0]
    assert gaussian_bound(found, 1e-5) >= epsilon_bound(found, 1e-5)


def test_with_a_good_number_of_answers_the_bound_is_over_half_of_the_truth() -> None:
    claim = gaussian_epsilon(1.0, 1e-5)
    count = best_count(*gaussian(1.0, 10_000), 1e-5, (0.02, 0.05, 0.1, 0.2, 0.4))
    bounds = [gaussian_bound(guess(*gaussian(1.0, 10_000), count), 1e-5) for _ in range(10)]
    assert claim / 2 < sum(bounds) / len(bounds) <= claim


def test_a_tenth_of_the_noise_is_noticed() -> None:
    claim = gaussian_epsilon(1.5, 1e-5)
    assert epsilon_bound(guess(*gaussian(0.15, 1000), 400), 1e-5) > claim
