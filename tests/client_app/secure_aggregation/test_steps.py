"""What a site checks before it takes part in secure aggregation, at each limit; and what makes an exact sum
another one: every setting, every limit of the site and every record that decides what it adds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.governance.policy import PUBLIC_KINDS, Policy
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.secure_aggregation import (
    _check_colluding,
    _check_local,
    _check_peers,
    sum_keys,
    sum_list,
    sum_open,
    sum_shares,
)
from fedsurrogate.common.errors import PolicyError, SurrogateError
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import SumRules, local_epsilon

few = settings(max_examples=60, deadline=None)
SUM: dict[str, Any] = {"secure-aggregation": True, "classes": "a,b"}
EXACT = SUM | {"fedpft.covariance": "gram"}
PRIVATE = SUM | {"epsilon": 4.0, "delta": 1e-5}


@few
@given(
    members=st.integers(2, 40),
    colluding=st.integers(0, 20),
    least=st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.9]),
)
def test_the_number_of_sites_that_may_collude_counts_and_not_their_share(
    members: int, colluding: int, least: float
) -> None:
    rules = SumRules(members, min(colluding, members), members, members)
    policy = Policy(smallest_colluding=least)
    if rules.colluding >= math.floor(least * members + 1e-9):
        _check_colluding(policy, rules)
    else:
        with pytest.raises(PolicyError, match="smallest-colluding"):
            _check_colluding(policy, rules)


@pytest.mark.parametrize("members", [3, 10])
@pytest.mark.parametrize("colluding", [0, 1])
def test_a_sites_own_noise_must_be_enough_at_exactly_its_limit(
    members: int, colluding: int
) -> None:
    run, rules = parse_run(PRIVATE), SumRules(members, colluding, members, members)
    assert run.mechanism is not None
    assert run.mechanism.name == DISTRIBUTED_SUMS
    own = local_epsilon(4.0, run.mechanism, rules)
    assert own > 4.0
    for limit in (0.0, own, own + 1e-6):
        _check_local(Policy(local_epsilon=limit), run, rules)
    strict = Policy(local_epsilon=own - 1e-6)
    with pytest.raises(PolicyError, match="local-epsilon"):
        _check_local(strict, run, rules)
    _check_local(strict, parse_run(EXACT), rules)
    # Where all may collude there is no honest noise; SumRules.check refuses such a sum.
    _check_local(strict, run, replace(rules, colluding=members))


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("peers", ["", "peers.toml"])
def test_a_site_that_needs_a_secure_aggregation_knows_the_keys_of_the_others(
    needed: bool, peers: str
) -> None:
    node = parse_node_config({"site": "north", "peers": peers})
    if needed and not peers:
        with pytest.raises(PolicyError, match="names no peers"):
            _check_peers(Policy(require_secure_aggregation=needed), node)
    else:
        _check_peers(Policy(require_secure_aggregation=needed), node)


@pytest.mark.parametrize(
    ("flat", "named", "right"),
    [(EXACT, "", True), (EXACT, "x", False), (EXACT, None, False), ({"classes": "a,b"}, "", False)],
)
def test_a_step_is_of_the_run_that_it_names(
    flat: dict[str, Any], named: str | None, right: bool, tmp_path: Path
) -> None:
    run = parse_run(flat)
    node = parse_node_config({"site": "north", "state-dir": str(tmp_path), "data": "digits"})
    info: dict[str, object] = {} if named is None else {"run": named or run.digest}
    step = SiteRequest(run, node, "north", info=info | {"sum": "0" * 32})
    if right:
        assert len(sum_keys(step, Policy())) > 100
        return
    for work in (sum_keys, sum_shares, sum_list, sum_open):
        with pytest.raises(SurrogateError, match=r"a request for run|secure-aggregation"):
            work(step, Policy())


# Sums without noise, and the kinds of digests that each has.
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "statistics": (EXACT, {"training", "numbers"}),
    "updates": (SUM | {"method": "fedavg"}, {"training", "numbers at models"}),
    "survey": (SUM | {"counting.kind": "survey"}, {"training"}),
    "evaluation": (
        SUM | {"counting.kind": "evaluation", "counting.digest": "0" * 64},
        {"held-out"},
    ),
    "number": (
        {
            "secure-aggregation": True,
            "task": "regression",
            "value-columns": "x",
            "target-range": "0,9",
        },
        {"training", "numbers"},
    ),
}
# A change, and the digests that it changes.
CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "classes": ({"classes": "a,c"}, {"training", "held-out"}),
    "seed": ({"seed": 7}, {"training"}),
    "test-fraction": ({"test-fraction": 0.31}, {"training"}),
    "alpha": ({"alpha": 0.77}, {"training"}),
    "classes-per-site": ({"classes-per-site": 1}, {"training"}),
    "site-column": ({"site-column": "hospital"}, {"training"}),
    "secure-aggregation-range": ({"secure-aggregation-range": 3.5}, {"numbers", "numbers at models"}),
    "secure-aggregation-records": ({"secure-aggregation-records": 77}, {"numbers", "numbers at models"}),
    "features.power-transform": ({"features.power-transform": 0.4}, {"numbers", "numbers at models"}),
    "target-range": ({"target-range": "0,8"}, {"training"}),
    "device": ({"device": "cpu"}, set()),
    "deadline": ({"deadline": 77}, set()),
}  # fmt: skip
LIMITS = SiteLimits(smallest_class=3, smallest_cell=4)


def digests(run: Run, limits: SiteLimits = LIMITS, public: bytes = b"map") -> dict[str, str]:
    return secure_aggregation.settings_in(run, limits, public)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_exactly_the_settings_that_decide_what_a_site_adds_make_another_sum(
    kind: str, change: str
) -> None:
    flat, about = KINDS[kind]
    more, changed = CHANGES[change]
    of_target = "task" in flat
    if (change == "target-range") != of_target and change in ("classes", "target-range"):
        return
    before = digests(parse_run(flat))
    assert before.keys() == about
    after = digests(parse_run(flat | more))
    assert after.keys() == about
    assert {what for what in about if before[what] != after[what]} == changed & about


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_the_site_and_the_public_map_make_another_sum(kind: str) -> None:
    run, about = parse_run(KINDS[kind][0]), KINDS[kind][1]
    before = digests(run)
    counted = kind in ("survey", "evaluation")
    records = about & {"training", "held-out"}
    for limits, matters in (
        (replace(LIMITS, smallest_class=5), not counted),
        (replace(LIMITS, smallest_cell=5), counted),
        (replace(LIMITS, rank=5), False),
    ):
        after = digests(run, limits)
        differ = {what for what in about if before[what] != after[what]}
        assert differ == (records if matters else set())
    after = digests(run, LIMITS, b"another")
    differ = {what for what in about if before[what] != after[what]}
    assert differ == about & {"numbers"}, "a model is another one in every round"


def test_order_of_classes_makes_no_other_sum_and_one_with_noise_is_remembered_by_nothing() -> None:
    assert digests(parse_run(EXACT)) == digests(parse_run(EXACT | {"classes": "b,a"}))
    assert digests(parse_run(PRIVATE)) == {}


def test_a_survey_of_a_target_is_not_its_sum() -> None:
    number = KINDS["number"][0]
    survey = number | {"counting.kind": "survey"}
    one, other = (
        digests(parse_run(flat), SiteLimits(smallest_class=3, smallest_cell=3))["training"]
        for flat in (number, survey)
    )
    assert one != other


@few
@given(
    now=st.tuples(*[st.sampled_from(["x", "y"])] * 3, st.integers(1, 2), st.integers(1, 2)),
    then=st.tuples(*[st.sampled_from(["x", "y"])] * 3, st.integers(1, 2), st.integers(1, 2)),
    kind=st.sampled_from(["none", "survey", "evaluation"]),
)
def test_records_are_the_same_where_files_column_selection_and_limit_are(
    now: tuple[Any, ...], then: tuple[Any, ...], kind: str
) -> None:
    counting: Any = SimpleNamespace(kind=kind)
    held_out = kind == "evaluation"

    def found(key: str, column: str, selected: str, least: int, cell: int) -> dict[str, str]:
        features: Any = SimpleNamespace(key=key, selected=selected)
        return secure_aggregation.records_in(
            features, column, counting, SiteLimits(smallest_class=least, smallest_cell=cell)
        )

    one, other = found(*now), found(*then)
    assert one.keys() == {"held-out" if held_out else "training"}
    # Of the two limits one counts.
    counts = 3 if kind == "none" else 4
    assert (one == other) == ((*now[:3], now[counts]) == (*then[:3], then[counts]))


@pytest.mark.parametrize("data", ["parquet", *PUBLIC_KINDS])
@pytest.mark.parametrize("mechanism", [DISTRIBUTED_SUMS, "dp-sgd", ""])
def test_only_distributed_noise_or_public_data_free_a_site_of_the_rule(
    data: str, mechanism: str
) -> None:
    node: Any = SimpleNamespace(data=data)
    assert secure_aggregation.applies(mechanism, node) == (
        data == "parquet" and mechanism != DISTRIBUTED_SUMS
    )
