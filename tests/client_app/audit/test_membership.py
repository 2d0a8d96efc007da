import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from fedsurrogate.client_app.audit.membership import Trials, answers, distinct, lira, success

RECORDS = 500


def halves(count: int, drawn: np.random.Generator) -> Any:
    """Complementary random halves of the records (count, n)."""
    found = np.zeros((count, RECORDS), dtype=bool)
    for first in range(0, count, 2):
        found[first, drawn.permutation(RECORDS)[: RECORDS // 2]] = True
        found[first + 1] = ~found[first]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_lira_on_a_noisy_sum_has_the_power_of_the_optimal_test(noise: float) -> None:
    drawn = np.random.default_rng(1)
    members = halves(64, drawn)
    # Records are orthogonal and of length one, so a record's product with the noisy sum has mean 1
    # or 0 and this noise.
    scores = members + noise * drawn.normal(size=members.shape)
    found = success(lira(Trials(scores, members)), members)
    best = float(norm.cdf(1 / (noise * math.sqrt(2))))
    error = (found.high - found.low) / (2 * 1.96)
    assert abs(found.auc - best) < 2 * error
    rate = float(norm.cdf(norm.ppf(0.01) + 1 / noise))
    assert abs(found.rate_at_one_percent - rate) < 0.025
    assert np.median(distinct(Trials(scores, members))) == pytest.approx(1 / noise, rel=0.2)


def test_scores_without_information_are_a_guess() -> None:
    drawn = np.random.default_rng(2)
    members = halves(32, drawn)
    found = success(lira(Trials(drawn.normal(size=members.shape), members)), members)
    assert found.low < 0.5 < found.high
    assert found.rate_at_one_percent < 0.02


@pytest.mark.parametrize("count", [8, 16, 64])
def test_noise_that_a_release_shares_tells_nothing_of_its_members(count: int) -> None:
    """Scores without information, plus one number for each release. A release's complement among
    the shadow models gave an AUC of 0.2 to 0.4, or above 0.6: where it is unusual, it shows whose
    scores shift with which label.
    """
    drawn = np.random.default_rng(count)
    members = halves(count, drawn)
    for common in (drawn.normal(size=(count, 1)), drawn.standard_t(1.5, size=(count, 1))):
        trials = Trials(10 * common + drawn.normal(size=members.shape), members)
        found = success(lira(trials), members)
        assert abs(found.auc - 0.5) < 0.05
        answered = answers(trials)
        assert abs(answered.right / answered.guessed - 0.5) < 0.15


def test_the_answer_about_a_release_depends_on_neither_its_members_nor_its_complement() -> None:
    drawn = np.random.default_rng(4)
    members = halves(8, drawn)
    scores = members + drawn.normal(size=members.shape)
    changed, others = members.copy(), scores.copy()
    changed[2:4], others[3] = halves(2, drawn), drawn.normal(size=RECORDS)
    assert (lira(Trials(scores, members))[2] == lira(Trials(others, changed))[2]).all()


def test_a_class_that_is_missing_gives_its_only_record_away() -> None:
    drawn = np.random.default_rng(3)
    members = halves(8, drawn)
    scores = drawn.normal(size=members.shape)
    scores[:, 0] = np.where(members[:, 0], 5.0, -np.inf)
    ratios = lira(Trials(scores, members))
    assert (ratios[:, 0] > 0).tolist() == members[:, 0].tolist()
    assert distinct(Trials(scores, members)).argmax() == 0
