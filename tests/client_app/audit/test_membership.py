from typing import Any

import numpy as np
import pytest

from fedsurrogate.client_app.audit.membership import Trials, answers, lira, success

RECORDS = 500


def halves(count: int, drawn: np.random.Generator) -> Any:
    """Complementary random halves of the records (count, n)."""
    found = np.zeros((count, RECORDS), dtype=bool)
    for first in range(0, count, 2):
        found[first, drawn.permutation(RECORDS)[: RECORDS // 2]] = True
        found[first + 1] = ~found[first]
    return found


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
