"""Whether attacks contradict a claim: mechanisms of known epsilon, and attacks that point the wrong
way.
"""

import math
from typing import Any

import numpy as np
import pytest

from client_app.audit.claim_check import largest_excess, proven_epsilon
from client_app.audit.membership import Trials, answers
from common.privacy.one_run import gaussian_bound

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


def test_a_claim_that_allows_everything_has_no_excess() -> None:
    assert largest_excess(*responses(0.0, 4), 12.0, DELTA) is None


def test_what_is_proven_holds_for_mechanisms_without_gaussian_noise() -> None:
    """Gaussian noise of the same (epsilon, delta) shows less than randomised response, so its bound
    is too high here.
    """
    trials = Trials(*responses(1.0, 32))
    assert gaussian_bound(answers(trials, share=1.0), DELTA) > 1.5
    assert 0.5 < proven_epsilon(trials, DELTA) < 1.0
