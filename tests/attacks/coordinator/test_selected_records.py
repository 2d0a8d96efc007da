"""A coordinator selects which records each site adds to secure aggregation, or rounds down how many sites
may collude.
"""

from __future__ import annotations

from typing import Any

import pytest

from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.secure_aggregation import _check_colluding
from fedsurrogate.common.errors import ConfigError, PolicyError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import context_of, rules_of

RUN: dict[str, Any] = {"fedpft.covariance": "gram", "classes": "a,b", "secure-aggregation": True}


@pytest.mark.parametrize(
    "other",
    [
        {"test-fraction": 0.21},
        {"partition": "iid"},
        {"alpha": 0.2},
        {"classes-per-site": 1},
        {"site-column": "x"},
    ],
)
def test_sites_with_other_records_share_no_secrets(other: dict[str, Any]) -> None:
    """With 97 % of the others' records for tests, their small classes were left out, and the sum
    was one site's own.
    """
    assert context_of(parse_run(RUN | other), "s") != context_of(parse_run(RUN), "s")


def test_a_sum_over_few_records_of_every_site_is_refused() -> None:
    """Only the site with most of a class kept enough of it."""
    with pytest.raises(
        ConfigError, match=r"test-fraction = 0\.94: in secure aggregation at most 0\.5"
    ):
        parse_run(RUN | {"test-fraction": 0.94})


@pytest.mark.parametrize("members", [3, 6, 9, 12])
def test_a_share_of_colluding_sites_is_not_rounded_below_the_policys(members: int) -> None:
    """0.333 passes for a third, but is one site less of six: two that collude then opened two
    lists.
    """
    _check_colluding(Policy(), rules_of(parse_run(RUN).settings, members))
    with pytest.raises(PolicyError, match="it must be against"):
        _check_colluding(
            Policy(), rules_of(parse_run(RUN | {"colluding": 0.333}).settings, members)
        )
