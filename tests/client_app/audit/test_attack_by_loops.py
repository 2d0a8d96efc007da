"""The likelihood ratios of the attack, its answers and its intervals, record by record with plain
loops over generated releases, of which some lack a record's class.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from fedsurrogate.client_app.audit.membership import Trials, answers, distinct, guess, lira, success
from fedsurrogate.common.errors import ConfigError

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


@pytest.mark.parametrize("seed", [0, 3])
def test_intervals_draw_pairs_of_releases_and_records(seed: int) -> None:
    drawn = np.random.default_rng(7)
    half = drawn.random((4, 30)) < 0.5
    members = np.stack([half, ~half], 1).reshape(8, 30)
    scores = drawn.normal(size=members.shape) + members
    found, again = success(scores, members, seed), np.random.default_rng(seed)
    areas = []
    for _ in range(100):
        pairs, records = again.integers(0, 4, 4).tolist(), again.integers(0, 30, 30).tolist()
        rows = [row for side in (0, 1) for row in (2 * pair + side for pair in pairs)]
        cells = [(row, record) for row in rows for record in records]
        truth, ratios = ([table[cell] for cell in cells] for table in (members, scores))
        areas.append(roc_auc_score(truth, ratios))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(areas, [0.025, 0.975])))
    false = [rate for rate, _ in found.curve]
    assert false == pytest.approx([10 ** (-4 + 4 * at / 59) for at in range(60)])
    if seed == 0:
        assert success(scores, members) == found


@pytest.mark.parametrize("releases", [0, 2, 3, 4])
def test_an_attack_needs_four_releases_of_one_shape(releases: int) -> None:
    scores, members = np.zeros((releases, 3)), np.zeros((releases, 3), dtype=bool)
    if releases < 4:
        with pytest.raises(ConfigError, match=f"{releases} trials"):
            Trials(scores, members)
        return
    assert Trials(scores, members).scores is scores
    with pytest.raises(ConfigError, match="one shape"):
        Trials(scores, members[:, :2])
