"""Rules of secure aggregation, as settings make them and as no one should: accepted where they protect."""

from dataclasses import astuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.secure_aggregation.rules import MOST_MEMBERS, MOST_SPARED, SumRules

NUMBERS = st.integers(0, 8)
SIZES = st.integers(0, 9) | st.sampled_from(
    [MOST_SPARED, MOST_SPARED + 1, MOST_MEMBERS, MOST_MEMBERS + 1]
)


@settings(max_examples=200)
@given(
    members=SIZES,
    colluding=NUMBERS,
    apart=st.integers(-1, 1),
    away=st.integers(-1, 2),
    few=st.booleans(),
    smallest=st.integers(2, 5),
)
@example(members=4, colluding=2, apart=0, away=0, few=True, smallest=2)
def test_rules_are_accepted_exactly_where_the_coordinator_can_learn_one_sum_of_enough_sites(
    members: int, colluding: int, apart: int, away: int, few: bool, smallest: int
) -> None:
    """apart: how far the threshold is from the smallest safe one. few, away: how many sites a sum
    has aparts the colluding ones, or how many are lost.
    """
    least = colluding + away if few else members - away
    rules = SumRules(members, colluding, (members + colluding) // 2 + 1 + apart, least)
    protects = (
        2 <= members <= MOST_MEMBERS
        and rules.least >= smallest
        and rules.threshold <= members
        # Two lists: colluding sites sign both, and each honest site one of them.
        and 2 * (rules.threshold - colluding) > members - colluding
        # Some honest site is in every sum.
        and rules.least > colluding
    )
    if protects:
        rules.check(smallest)
    else:
        with pytest.raises(PolicyError):
            rules.check(smallest)


@settings(max_examples=100)
@given(
    members=st.integers(2, 60) | st.sampled_from([MOST_SPARED, MOST_SPARED + 1]),
    colluding=st.floats(0, 0.99),
    dropouts=st.floats(0, 0.99),
)
def test_the_rules_of_shares_protect_and_ask_for_no_more_sites_than_needed(
    members: int, colluding: float, dropouts: float
) -> None:
    rules = SumRules.of(members, colluding, dropouts)
    rules.check(min(2, rules.least))
    assert rules.colluding <= colluding * members + 1e-6 < rules.colluding + 1 + 1e-6
    weaker = SumRules.of(members, colluding, dropouts, rules.threshold - 1)
    with pytest.raises(PolicyError, match=f"at least {rules.threshold}"):
        weaker.check(min(2, weaker.least))
    lost = members - rules.least
    assert lost <= dropouts * members + 1e-6
    # Either as many may be lost as the settings say, or every site of the threshold is needed.
    assert rules.least == rules.threshold or lost + 1 > dropouts * members - 1e-6
    kept = members if members <= MOST_SPARED else rules.least
    assert astuple(rules.lasting) == (members, rules.colluding, rules.threshold, kept)
