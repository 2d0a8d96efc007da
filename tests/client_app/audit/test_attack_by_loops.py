"""The likelihood ratios of the attack, its answers and its intervals, record by record with plain
loops over generated releases, of which some lack a record's class.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score

from benchmarks._gaussian_bound import gaussian_bound
from fedsurrogate.client_app.audit.membership import (
    AttackResult,
    Excess,
    NearestRecords,
    Trials,
    allowed_auc,
    answers,
    distinct,
    guess,
    largest_excess,
    lira,
    proven_epsilon,
    success,
)
from fedsurrogate.client_app.audit.output import claim_broken, limit_broken
from fedsurrogate.client_app.audit.release_audit import ReleaseAudit
from fedsurrogate.client_app.governance.policy import Policy

Numbers = NDArray[np.float64]
few = settings(max_examples=25, deadline=None)


@st.composite
def attacked(draw: st.DrawFn) -> Trials:
    """Pairs of releases, complementary or not. Some records can be told apart, some scores are
    minus infinity, and some records are members of all of a few releases.
    """
    drawn = np.random.default_rng(draw(st.integers(0, 10**6)))
    pairs, records = draw(st.integers(2, 6)), draw(st.integers(2, 7))
    half = drawn.random((pairs, records)) < draw(st.sampled_from([0.5, 0.9]))
    members = np.stack([half, ~half], 1).reshape(2 * pairs, records)
    if draw(st.booleans()):
        # Of independent releases, a record is in some more than out of them.
        members = drawn.random(members.shape) < 0.7
    apart = drawn.choice([0.0, 3.0], records)
    scores = drawn.normal(size=members.shape) * drawn.uniform(0.1, 5, records) + apart * members
    missing = draw(st.sampled_from([0.0, 0.2, 1.0]))
    scores[drawn.random(scores.shape) < missing] = -np.inf
    return Trials(scores, members)


def finite(scores: Numbers) -> Numbers:
    """What is missing lies two ranges of the others below them."""
    known = [float(each) for each in scores.ravel() if math.isfinite(each)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    below = low - 2.0 * max(high - low, 1.0)
    return np.array([[each if math.isfinite(each) else below for each in row] for row in scores])


def groups(scores: Numbers, members: NDArray[np.bool_], n: int) -> tuple[list[float], list[float]]:
    """Scores of record n with it, and without it."""
    pairs = list(zip(scores[:, n].tolist(), members[:, n].tolist(), strict=True))
    return [score for score, inside in pairs if inside], [s for s, inside in pairs if not inside]


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def deviations(scores: Numbers, members: NDArray[np.bool_]) -> list[float]:
    """Of a record's scores around its two means; four records of the average one are its prior."""
    count, own = len(scores), []
    for n in range(scores.shape[1]):
        both = groups(scores, members, n)
        own.append(sum(sum((s - mean(each)) ** 2 for s in each) for each in both) / count)
    usual = sum(own) / len(own)
    least = 1e-12 * (1 + float(np.var(scores)))
    return [math.sqrt(max((count * each + 4 * usual) / (count + 2), least)) for each in own]


def ratio_of(scores: Numbers, members: NDArray[np.bool_], attack: Numbers) -> list[float]:
    """Log likelihood ratios of the scores of one attacked release, from shadow models."""
    widths = deviations(scores, members)
    sides: list[list[tuple[float, float, int]]] = []
    for side in (0, 1):
        rows = []
        for n, width in enumerate(widths):
            values = [score / width for score in groups(scores, members, n)[side]]
            square = mean([value**2 for value in values]) - mean(values) ** 2
            rows.append((mean(values), max(square, 0.0), max(1, len(values))))
        usual = mean([row[1] for row in rows])
        sides.append(
            [
                (m, (count * spread + 4 * usual) / (count + 3) + 1e-12, count)
                for m, spread, count in rows
            ]
        )
    inside, outside = sides
    apart = [one[0] - other[0] for one, other in zip(inside, outside, strict=True)]
    errors = [
        one[1] / one[2] + other[1] / other[2] for one, other in zip(inside, outside, strict=True)
    ]
    usual = mean(apart)
    true = max(mean([(each - usual) ** 2 for each in apart]) - mean(errors), 0.0)
    found = []
    for n, width in enumerate(widths):
        (m1, v1, c1), (m0, v0, c0) = inside[n], outside[n]
        # The difference of a record's two means is drawn to that of all records.
        between = (true * apart[n] + errors[n] * usual) / (true + errors[n])
        middle = (c1 * m1 + c0 * m0) / (c1 + c0)
        m1, m0 = middle + c0 / (c1 + c0) * between, middle - c1 / (c1 + c0) * between
        score = float(attack[n]) / width
        one, other = (
            -0.5 * math.log(v) - (score - m) ** 2 / (2 * v) for m, v in ((m1, v1), (m0, v0))
        )
        found.append(one - other)
    return found


@few
@given(attacked())
def test_ratios_are_of_normal_densities_from_the_releases_of_the_other_pairs(
    trials: Trials,
) -> None:
    scores, found = finite(trials.scores), lira(trials)
    for k, row in enumerate(found):
        others = [j for j in range(len(scores)) if j // 2 != k // 2]
        wanted = ratio_of(scores[others], trials.members[others], scores[k])
        np.testing.assert_allclose(row, wanted, rtol=1e-6, atol=1e-6)


@few
@given(attacked())
def test_a_record_is_distinct_by_its_two_means_in_deviations(trials: Trials) -> None:
    scores = finite(trials.scores)
    widths = deviations(scores, trials.members)
    for n, own in enumerate(distinct(trials).tolist()):
        one, other = groups(scores, trials.members, n)
        assert own == pytest.approx((mean(one) - mean(other)) / widths[n], rel=1e-6, abs=1e-6)


@few
@given(attacked(), st.sampled_from([0.05, 0.2, 0.6, 1.0]))
def test_answers_are_about_one_release_of_each_later_pair(trials: Trials, share: float) -> None:
    pairs = len(trials.scores) // 2
    shadows = list(range(2 * (pairs // 2)))
    later = list(range(2 * (pairs // 2), 2 * pairs, 2))
    # The complements of what is attacked are not even looked at.
    seen = finite(trials.scores[shadows + later])
    ratios = [
        ratio_of(seen[: len(shadows)], trials.members[shadows], row) for row in seen[len(shadows) :]
    ]
    flat, tosses = np.concatenate(ratios), trials.members[later].ravel()
    # Where two ratios are equal, rounding decides which one is answered.
    wanted = guess(
        torch.from_numpy(flat), torch.from_numpy(tosses), max(2, round(share * len(flat)))
    )
    found = answers(trials, share)
    assert (found.canaries, found.guessed) == (len(flat), wanted.guessed)
    if len(np.unique(flat.round(6))) == len(flat):
        assert found == wanted
    if share == 0.2:
        assert answers(trials) == found


def test_intervals_draw_pairs_of_releases_and_records() -> None:
    drawn = np.random.default_rng(7)
    half = drawn.random((4, 30)) < 0.5
    members = np.stack([half, ~half], 1).reshape(8, 30)
    scores = drawn.normal(size=members.shape) + members
    found, areas = success(scores, members), []
    times = [
        np.random.default_rng(at).multinomial(most, np.full(most, 1 / most), 100)
        for at, most in enumerate((4, 30))
    ]
    for each in zip(*times, strict=True):
        pairs, records = (np.repeat(np.arange(len(own)), own).tolist() for own in each)
        rows = [row for side in (0, 1) for row in (2 * pair + side for pair in pairs)]
        cells = [(row, record) for row in rows for record in records]
        truth, ratios = ([table[cell] for cell in cells] for table in (members, scores))
        areas.append(roc_auc_score(truth, ratios))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(areas, [0.025, 0.975])))
    false = [rate for rate, _ in found.curve]
    assert false == pytest.approx([10 ** (-4 + 4 * at / 59) for at in range(60)])


RECORDS, DELTA = 500, 1e-5


def responses(epsilon: float, pairs: int, seed: int = 0) -> Any:
    """Scores (K, n) of randomised response, which is epsilon-private and no more, and members (K,
    n) of complements.
    """
    drawn = np.random.default_rng(seed)
    half = drawn.random((pairs, RECORDS)) < 0.5
    members = np.stack([half, ~half], 1).reshape(2 * pairs, RECORDS)
    honest = drawn.random(members.shape) < 1 / (1 + math.exp(-epsilon))
    return np.where(honest, members, ~members) + 1e-3 * drawn.random(members.shape), members


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("pairs", [4, 32])
def test_a_mechanism_with_twice_its_epsilon_is_found_also_by_an_attack_turned_round(
    pairs: int, turned: bool
) -> None:
    scores, members = responses(2.0, pairs)
    found = largest_excess(-scores if turned else scores, members, 1.0, DELTA)
    assert found is not None
    assert found.low > 0
    assert found.true_rate > math.e * found.false_rate


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_a_mechanism_that_uses_all_of_its_epsilon_keeps_its_claim(epsilon: float) -> None:
    """Its excess is zero at every threshold. An interval misses it with a probability of 1 % at
    most.
    """
    found = [largest_excess(*responses(epsilon, 16, seed), epsilon, DELTA) for seed in range(20)]
    assert sum(each is not None and each.low > 0 for each in found) <= 1
    assert all(each is not None and each.high > 0 for each in found)


def given_away(share: float, seed: int, pairs: int = 32) -> Any:
    """Scores that give a share of all places in the releases of a pair away, as members, and tell
    nothing of the others.
    """
    scores, members = responses(0.0, pairs, seed)
    scores, drawn = np.random.default_rng(seed).random(scores.shape), np.random.default_rng(seed)
    for pair in range(pairs):
        both = members[2 * pair : 2 * pair + 2]
        known = drawn.permutation(np.flatnonzero(both))[: round(share * both.size)]
        scores[2 * pair : 2 * pair + 2].flat[known] += 1
    return scores, members


@settings(max_examples=15)
@given(st.floats(0.001, 0.5), st.floats(0, 8), st.integers(0, 10**6))
def test_records_that_are_given_away_are_found_however_few_at_any_epsilon(
    share: float, epsilon: float, seed: int
) -> None:
    found = largest_excess(*given_away(share, seed), epsilon, DELTA)
    assert found is not None
    assert found.low > 0


def test_a_claim_that_allows_everything_has_no_excess() -> None:
    assert largest_excess(*responses(0.0, 4), 12.0, DELTA) is None


def test_what_is_proven_holds_for_mechanisms_without_gaussian_noise() -> None:
    """Gaussian noise of the same (epsilon, delta) shows less than randomised response, so its bound
    is too high here.
    """
    trials = Trials(*responses(1.0, 32))
    assert gaussian_bound(answers(trials, share=1.0), DELTA) > 1.5
    assert 0.5 < proven_epsilon(trials, DELTA) < 1.0


RATES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
# Low, middle and high.
RESULTS = st.lists(RATES, min_size=3, max_size=3).map(
    lambda ends: AttackResult(sorted(ends)[1], min(ends), max(ends), 0.0, 0.0, ())
)
NO_DATA = NearestRecords(0.5, 0.1, 0.0, ())


def audit(
    results: list[AttackResult],
    lows: list[float | None],
    allowed: float,
    proven: float,
    **more: Any,
) -> ReleaseAudit:
    found = dict(zip(("first", "second"), results, strict=False))
    excess = {
        name: None if low is None else Excess(low + 0.1, low, 0.5, 0.75, 0.125)
        for name, low in zip(found, lows, strict=False)
    }
    first, facts = found.pop("first"), {"per_class": {}, "standing_out": (), "seconds": 1.0}
    counts = {"records": 40, "of": 50, "releases": 8, "standing_out_count": 0}
    made = {"attack": first, "attack_name": "first", "others": found, "excess": excess}
    names = {"method": "fedpft", "mechanism": "none", "allowed": allowed, "proven": proven}
    return ReleaseAudit(**facts, **counts, **made, **names, **more)  # type: ignore[arg-type]


@settings(max_examples=300)
@given(
    results=st.lists(RESULTS, min_size=1, max_size=2),
    lows=st.lists(st.sampled_from([None, -0.1, 0.0, 1e-9, 0.2]), min_size=2, max_size=2),
    allowed=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
    proven=st.sampled_from([0.0, 2.0, 2.25]),
    epsilon=st.sampled_from([0.0, 2.0]),
    nearest=st.sampled_from([None, NO_DATA]),
    limits=st.tuples(
        st.sampled_from([0.5, 0.75, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 0.50001, 1.0])
    ),
)
def test_each_proof_against_the_claim_and_each_limit_of_the_policy_refuses_by_its_name(
    results: list[AttackResult],
    lows: list[float | None],
    allowed: float,
    proven: float,
    epsilon: float,
    nearest: NearestRecords | None,
    limits: tuple[float, float],
) -> None:
    found = audit(results, lows, allowed, proven, epsilon=epsilon, nearest=nearest)
    proofs = [
        f"{name}: AUC {each.auc:.3f} "
        for name, each in found.attacks.items()
        if each.low > allowed or each.high < 1 - allowed
    ]
    some = zip(found.attacks, lows, strict=False)
    proofs += [f"{name}: 75.00% right at 12.50% false" for name, low in some if (low or 0) > 0]
    proofs += [f"an epsilon above {proven:.2f}"] if proven > epsilon else []
    broken = claim_broken(found)
    assert bool(broken) == bool(proofs and epsilon)
    assert not broken or all(each in broken for each in proofs)
    most, least = limits
    refused = limit_broken(found, Policy(largest_attack_auc=most, smallest_nearest_ratio=least))
    # The far end of each interval is compared.
    beyond = any(max(each.high, 1 - each.low) > most for each in results)
    unknown, near = nearest is None and not epsilon, nearest is not None and least > 0.5
    if broken:
        assert refused == broken
    elif beyond:
        assert f"largest-attack-auc = {most:g}" in refused
    elif least and (unknown or near):
        assert f"smallest-nearest-ratio = {least:g}" in refused
        assert ("sends no means" in refused) == unknown
    else:
        assert refused == ""


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
