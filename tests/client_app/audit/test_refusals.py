"""What an audit says of a claim and of a policy, word for word, at each limit and just beyond it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from fedsurrogate.client_app.audit.membership import (
    AttackResult,
    Excess,
    NearestRecords,
    allowed_auc,
    largest_excess,
)
from fedsurrogate.client_app.audit.output import claim_broken, limit_broken
from fedsurrogate.client_app.audit.release_audit import ReleaseAudit
from fedsurrogate.client_app.governance.policy import Policy

RATES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
# Low, middle and high.
RESULTS = st.lists(RATES, min_size=3, max_size=3).map(
    lambda ends: AttackResult(sorted(ends)[1], min(ends), max(ends), 0.0, 0.0, ())
)
NO_DATA = NearestRecords(0.5, 0.1, 0.0, ())


def audit(results: list[AttackResult], excess: list[Excess | None], **more: Any) -> ReleaseAudit:
    names = ["first", "second"][: len(results)]
    found = dict(zip(names, results, strict=True))
    made = ReleaseAudit(
        method="fedpft",
        mechanism="none",
        epsilon=0.0,
        records=40,
        of=50,
        releases=8,
        attack=found.pop("first"),
        attack_name="first",
        others=found,
        allowed=1.0,
        excess=dict(zip(names, excess, strict=False)),
        proven=0.0,
        per_class={},
        nearest=None,
        standing_out=(),
        standing_out_count=0,
        seconds=1.0,
    )
    return replace(made, **more)


EXCESSES = st.one_of(
    st.none(),
    st.sampled_from([-0.1, 0.0, 1e-9, 0.2]).map(
        lambda low: Excess(low + 0.1, low, 0.5, 0.75, 0.125)
    ),
)


@settings(max_examples=150)
@given(
    results=st.lists(RESULTS, min_size=1, max_size=2),
    excess=st.lists(EXCESSES, min_size=2, max_size=2),
    allowed=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
    proven=st.sampled_from([0.0, 2.0, 2.25]),
    epsilon=st.sampled_from([0.0, 2.0]),
)
def test_each_proof_against_a_claim_is_named(
    results: list[AttackResult],
    excess: list[Excess | None],
    allowed: float,
    proven: float,
    epsilon: float,
) -> None:
    found = audit(results, excess, allowed=allowed, proven=proven, epsilon=epsilon)
    proofs = []
    for name, each, more in zip(["first", "second"], results, excess, strict=False):
        if each.low > allowed or each.high < 1 - allowed:
            proofs.append(
                f"{name}: AUC {each.auc:.3f} ({each.low:.3f} to {each.high:.3f}), {allowed:.3f} is "
                "allowed"
            )
        if more is not None and more.low > 0:
            proofs.append(
                f"{name}: 75.00% right at 12.50% false, {100 * more.excess:.2f}% more than allowed"
            )
    if proven > epsilon:
        proofs.append(f"the attack proves an epsilon above {proven:.2f}")
    expected = ""
    if proofs and epsilon:
        expected = (
            f"more than epsilon = 2 allows ({'; '.join(proofs)}). Do not release; report this as an "
            "error of the software"
        )
    assert claim_broken(found) == expected
    if expected:
        assert limit_broken(found, Policy()) == expected


@settings(max_examples=150)
@given(
    results=st.lists(RESULTS, min_size=1, max_size=2),
    most=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
    least=st.sampled_from([0.0, 0.5, 0.50001, 1.0]),
    nearest=st.sampled_from([None, NO_DATA]),
    epsilon=st.sampled_from([0.0, 2.0]),
)
def test_a_policys_limit_is_compared_with_the_far_end_of_each_attack(
    results: list[AttackResult],
    most: float,
    least: float,
    nearest: NearestRecords | None,
    epsilon: float,
) -> None:
    found = audit(results, [None, None], nearest=nearest, epsilon=epsilon)
    expected = ""
    for name, each in reversed(list(zip(["first", "second"], results, strict=False))):
        if max(each.high, 1 - each.low) > most:
            expected = (
                f"{name} reaches an AUC of {each.auc:.3f} ({each.low:.3f} to {each.high:.3f}); the "
                f"policy has largest-attack-auc = {most:g}"
            )
    limit = f"smallest-nearest-ratio = {least:g} in the policy"
    if not expected and least and nearest is None and not epsilon:
        expected = (
            "method = 'fedpft' sends no means, so their distance from records is unknown; " + limit
        )
    if not expected and nearest is not None and least > 0.5:
        expected = f"the means are nearer to the records used than to others (0.50 of the distance); {limit}"
    policy = Policy(largest_attack_auc=most, smallest_nearest_ratio=least)
    assert limit_broken(found, policy) == expected


@settings(max_examples=60)
@given(epsilon=st.floats(0.01, 8), delta=st.sampled_from([0.0, 1e-5, 0.1, 0.5]))
def test_the_area_that_a_claim_allows_is_that_under_its_trade_off(
    epsilon: float, delta: float
) -> None:
    """True positives are at most min(1, e^eps a + delta, 1 - e^-eps (1 - delta - a))."""
    places = np.linspace(0, 1, 200_001)
    most = np.minimum(math.exp(epsilon) * places + delta, 1.0)
    most = np.minimum(most, 1 - math.exp(-epsilon) * np.maximum(1 - delta - places, 0))
    assert allowed_auc(epsilon, delta) == pytest.approx(float(most.mean()), abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pairs=st.integers(2, 5),
    records=st.sampled_from([1, 3, 20, 120]),
    epsilon=st.sampled_from([0.0, 0.5, 2.0]),
    delta=st.sampled_from([0.0, 1e-5, 0.2, 1.0]),
    odd=st.booleans(),
    told=st.sampled_from([0.0, 1.0, -2.0]),
)
def test_the_largest_excess_is_that_of_all_thresholds_by_loops(
    seed: int, pairs: int, records: int, epsilon: float, delta: float, odd: bool, told: float
) -> None:
    drawn = np.random.default_rng(seed)
    half = drawn.random((pairs, records)) < 0.5
    members = np.stack([half, ~half], 1).reshape(2 * pairs, records)
    # Some scores are equal.
    scores = np.round(drawn.normal(size=members.shape) + told * members, 1)
    if odd:
        # A release without its complement counts for thresholds only.
        members = np.concatenate([members, half[:1]])
        scores = np.concatenate([scores, drawn.normal(size=(1, records))])
    found = largest_excess(scores, members, epsilon, delta)
    ranked = sorted(scores.ravel().tolist())
    places = [max(1, round(share * len(ranked))) for share in (0.001, 0.01, 0.1, 0.5)]
    width = float(student.ppf(1 - 0.01 / 32, pairs - 1))
    rows = []
    for place in places:
        for named in (scores >= ranked[len(ranked) - place], scores <= ranked[place - 1]):
            for inside in (members, ~members):
                true, false = [], []
                for pair in range(pairs):
                    cells = [
                        (bool(named[row, n]), bool(inside[row, n]))
                        for row in (2 * pair, 2 * pair + 1)
                        for n in range(records)
                    ]
                    true.append(sum(a and b for a, b in cells) / records)
                    false.append(sum(a and not b for a, b in cells) / records)
                right, wrong = sum(true) / pairs, sum(false) / pairs
                if math.exp(epsilon) * wrong + delta >= 1:
                    continue
                each = [t - math.exp(epsilon) * f - delta for t, f in zip(true, false, strict=True)]
                middle = sum(each) / pairs
                least = right * (1 - right) + math.exp(2 * epsilon) * wrong * (1 - wrong)
                spread = max(float(np.var(each, ddof=1)) / pairs, least / (pairs * records))
                error = width * math.sqrt(spread)
                rows.append((middle - error, middle, middle + error, right, wrong))
    if not rows:
        assert found is None
        return
    assert found is not None
    best = max(row[0] for row in rows)
    values = (found.low, found.excess, found.high, found.true_rate, found.false_rate)
    assert found.low == pytest.approx(best, abs=1e-9)
    assert any(values == pytest.approx(row, abs=1e-9) for row in rows)
