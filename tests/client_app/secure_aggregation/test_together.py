"""A site completes an exact sum of labels only if no difference of its sums can be that of few sites:
whatever the label sets, the sites that take part, those that may collude, and the policy.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.secure_aggregation import _check_together
from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.secure_aggregation.rules import SumRules
from fedsurrogate.common.targets.labels import Labels

SITES = ("s0", "s1", "s2", "s3", "s4", "s5")


@given(
    sets=st.lists(st.sampled_from(["a", "b", "a,b"]), min_size=6, max_size=6),
    there=st.integers(2, 6),
    colluding=st.integers(0, 3),
    smallest=st.integers(2, 6),
)
@settings(max_examples=200, deadline=None)
def test_every_set_needs_enough_of_the_sites_that_take_part(
    sets: list[str], there: int, colluding: int, smallest: int
) -> None:
    known = tuple((site, tuple(own.split(","))) for site, own in zip(SITES, sets, strict=True))
    target, rules = Labels(("a", "b"), sets=known), SumRules(6, colluding, 4, 4)
    policy = Policy(smallest_sum=smallest)
    present = sets[:there]
    annotators = [sum(name in own.split(",") for own in present) for name in "ab"]
    alike = [present.count(own) for own in set(present)]
    # A label that nobody there annotates adds nothing that could be told apart.
    least = min(*(each for each in annotators if each), *alike)
    enough = least >= max(2 + colluding, smallest)
    if enough:
        _check_together(policy, target, SITES[:there], rules)
    else:
        with pytest.raises(PolicyError, match="smallest-sum"):
            _check_together(policy, target, SITES[:there], rules)
    _check_together(policy, target, None, rules)
    _check_together(policy, None, SITES[:there], rules)
