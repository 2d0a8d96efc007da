"""Shares of a privacy budget: what they spend together is the claim, or they are refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.methods.sums import class_sums_plan
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.common.privacy.mechanism import NoisyRounds, NoisySums
from fedsurrogate.common.settings import Settings

SHARES = st.dictionaries(
    st.sampled_from(["counts", "sums", "squares"]), st.floats(-0.2, 1.0) | st.just(0.0), min_size=1
)


@settings(max_examples=50, deadline=None)
@given(SHARES, st.sampled_from([0.5, 2.0]))
def test_noise_by_any_shares_spends_at_most_the_claim_or_is_refused(
    shares: dict[str, float], epsilon: float
) -> None:
    recipe = NoisySums("sums", epsilon, 1e-5, shares)
    if min(shares.values()) <= 0 or math.fsum(shares.values()) > 1 + 1e-9:
        with pytest.raises(ValueError, match="above 0, sum 1"):
            recipe.mechanism()
        return
    noise = recipe.mechanism().noise
    spent = epsilon_spent([GaussianEvent(sigma / bound) for sigma, bound in noise.values()], 1e-5)
    assert spent <= epsilon * (1 + 1e-6)


@pytest.mark.parametrize("name", ["step_shares", "first_shares"])
def test_shares_of_a_round_above_the_budget_are_refused(name: str) -> None:
    recipe = NoisyRounds(
        "distributed", 2.0, 1e-5, 1.0, 3, first_share=0.1, **{name: {"a": 0.6, "b": 0.6}}
    )
    with pytest.raises(ValueError, match="above 0, sum 1"):
        recipe.mechanism()


@pytest.mark.parametrize("names", [("counts",), ("counts", "sums", "squares")])
def test_shares_of_other_statistics_than_those_sent_are_refused(names: tuple[str, ...]) -> None:
    own = Settings(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="counts, sums"):
        class_sums_plan(own, "a:b", shares=dict.fromkeys(names, 0.2))
