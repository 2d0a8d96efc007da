"""What settings decide of secure aggregation: numbers, shapes and dimensions of each round, and a digest
that no other run has.
"""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import (
    MOST_MEMBERS,
    MOST_SPARED,
    SumRules,
    context_of,
    dimensions_of,
    local_epsilon,
    numbers_of,
    projected_dimensions,
    rules_of,
    shapes_of,
)

SUM: dict[str, Any] = {"fedpft.covariance": "gram", "secure-aggregation": True, "classes": "a,b,c"}
ROUNDS: dict[str, Any] = {"method": "dpcvae", "secure-aggregation": True, "classes": "a,b,c"}
DISTRIBUTED = SUM | {"epsilon": 4.0, "delta": 1e-5}


def test_without_a_round_the_first_is_meant_and_later_rounds_add_other_sums() -> None:
    run = parse_run(ROUNDS)

    def numbers(*round: int) -> list[tuple[str, int, float]]:
        found = numbers_of(run.plan, run.settings, 4, *round)
        return [(name, each.largest, each.step) for name, each in found.items()]

    def shapes(*round: int) -> dict[str, tuple[int, ...]]:
        return shapes_of(run.plan, 3, 64, *round)

    for made in (numbers, shapes):
        assert made() == made(1)
        assert made(1) != made(2)
        assert made(2) == made(3)


@settings(max_examples=15, deadline=None)
@given(largest=st.floats(0.5, 50), sites=st.integers(3, 60), records=st.integers(10, 10**6))
def test_the_numbers_of_an_exact_sum_hold_the_largest_sum_that_settings_allow(
    largest: float, sites: int, records: int
) -> None:
    run = parse_run(
        SUM | {"secure-aggregation-range": largest, "secure-aggregation-records": records}
    )
    found = numbers_of(run.plan, run.settings, sites)
    for each in run.plan.combination.sums_in(1):
        number = found[each.name]
        # A feature, the norm of a product of two of them, and a count.
        bound = {0: 1.0, 1: largest, 2: largest**2 * math.sqrt(2)}[each.degree]
        if each.degree:
            assert number.step * number.largest == pytest.approx(bound * records)
        else:
            assert number.step == 1
            assert number.largest >= records
        assert 0.89 * 2**31 < sites * number.largest <= 0.9 * 2**31


@settings(max_examples=15, deadline=None)
@given(epsilon=st.floats(0.5, 8), records=st.integers(100, 10**6), colluding=st.floats(0, 1))
@example(2.0, 100, 1.0)
@example(2.0, 100_000, 0.85)
@example(2.0, 100_000, 0.95)
def test_noise_decides_how_many_dimensions_are_kept(
    epsilon: float, records: int, colluding: float
) -> None:
    own = {"epsilon": epsilon, "features.records": records, "colluding": min(colluding, 0.5)}
    run = parse_run(DISTRIBUTED | own)
    assert run.mechanism is not None
    sigma, _ = run.mechanism.noise["squares"]
    exact = 7.5 * math.sqrt(records * math.sqrt(max(0.1, 1 - colluding)) / sigma)
    features = run.settings.features
    found = dimensions_of(features, colluding, run.mechanism)
    assert found == max(1, round(exact))
    assert dimensions_of(features, colluding, None) == 512
    for noise in ({"sums": (sigma, 1.0)}, {}):
        assert dimensions_of(features, colluding, replace(run.mechanism, noise=noise)) == 512
    other = replace(run.mechanism, name="sums")
    assert dimensions_of(features, colluding, other) == 512
    fixed = features.model_copy(update={"dimensions": 7})
    assert dimensions_of(fixed, colluding, run.mechanism) == 7


@settings(max_examples=15, deadline=None)
@given(
    changed=st.sampled_from(
        [
            {"test-fraction": 0.3},
            {"partition": "iid"},
            {"alpha": 7.0},
            {"classes-per-site": 3},
            {"site-column": "hospital"},
            {"colluding": 0.2},
            {"classes": "a,b"},
            {"secure-aggregation-range": 7.0},
            {"fedpft.rank": 3},
        ]
    ),
    name=st.text(max_size=5),
)
def test_keys_and_shares_are_bound_to_every_setting_that_decides_the_sum_and_to_its_name(
    changed: dict[str, Any], name: str
) -> None:
    run = parse_run(SUM)
    assert len(context_of(run, name)) == 32
    assert context_of(run, name) == context_of(parse_run(SUM), name)
    assert context_of(run, name) != context_of(run, name + "0")
    assert context_of(run, name) != context_of(parse_run(SUM | changed), name)
    # Where a site reads its records from is its own affair.
    assert context_of(run, name) == context_of(parse_run(SUM | {"deadline": 77}), name)


@settings(max_examples=8, deadline=None)
@given(epsilon=st.floats(0.5, 8), sites=st.integers(4, 40), colluding=st.floats(0, 0.4))
def test_noise_of_one_site_alone_promises_less_and_other_noise_the_same(
    epsilon: float, sites: int, colluding: float
) -> None:
    run = parse_run(DISTRIBUTED | {"epsilon": epsilon, "colluding": colluding})
    rules = rules_of(run.settings, sites)
    assert (rules.members, rules.colluding) == (sites, math.floor(colluding * sites))
    found = local_epsilon(epsilon, run.mechanism, rules)
    assert found > epsilon
    assert found == run.mechanism.epsilon_of_part(rules.lasting.honest)  # type: ignore[union-attr]
    assert local_epsilon(epsilon, None, rules) == epsilon
    # Noise of each site alone, such as of steps of DP-SGD.
    alone = replace(run.mechanism, name="dp-sgd")  # type: ignore[type-var]
    assert local_epsilon(epsilon, alone, rules) == epsilon


@pytest.mark.parametrize("given_file", ["auto", "rows.safetensors"])
@pytest.mark.parametrize("dimension", [1, 40, 63, 64, 200])
def test_features_are_projected_by_a_file_or_from_64_dimensions_on(
    given_file: str, dimension: int
) -> None:
    run = parse_run(DISTRIBUTED | {"features.projection": given_file, "features.dimensions": 50})
    projects = given_file != "auto" or dimension >= 64
    assert projected_dimensions(run, dimension) == (min(dimension, 50) if projects else 0)
    assert projected_dimensions(parse_run(SUM), dimension) == 0


def test_at_least_one_dimension_is_left_however_much_noise_there_is() -> None:
    run = parse_run(DISTRIBUTED)
    assert run.mechanism is not None
    loud = replace(run.mechanism, noise={"squares": (1e9, 1.0)})
    assert dimensions_of(run.settings.features, 0.2, loud) == 1
    quiet = replace(run.mechanism, noise={"squares": (1e-3, 1.0)})
    few = run.settings.features.model_copy(update={"records": 4})
    assert dimensions_of(few, 0.2, quiet) == round(7.5 * math.sqrt(4 * math.sqrt(0.8) / 1e-3))


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
    weaker = replace(rules, threshold=rules.threshold - 1)
    with pytest.raises(PolicyError, match=f"at least {rules.threshold}"):
        weaker.check(min(2, weaker.least))
    lost = members - rules.least
    assert lost <= dropouts * members + 1e-6
    # Either as many may be lost as the settings say, or every site of the threshold is needed.
    assert rules.least == rules.threshold or lost + 1 > dropouts * members - 1e-6
    kept = members if members <= MOST_SPARED else rules.least
    assert astuple(rules.lasting) == (members, rules.colluding, rules.threshold, kept)
