"""Whether attacks contradict a claim: mechanisms of known epsilon, and attacks that point the wrong
way.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._gaussian_bound import gaussian_bound
from fedsurrogate.client_app.audit.membership import Trials, answers, largest_excess, proven_epsilon

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


@settings(max_examples=15)
@given(st.floats(0, 0.97), st.floats(0, 12), st.integers(0, 10**6))
def test_a_release_that_gives_all_away_breaks_every_claim_also_with_a_large_delta(
    delta: float, epsilon: float, seed: int
) -> None:
    found = largest_excess(*given_away(0.5, seed, 4), epsilon, delta)
    assert found is not None
    assert (found.true_rate, found.false_rate) == (1.0, 0.0)
    assert found.low == pytest.approx(1 - delta)


def test_a_claim_that_allows_everything_has_no_excess() -> None:
    assert largest_excess(*responses(0.0, 4), 12.0, DELTA) is None


def test_what_is_proven_holds_for_mechanisms_without_gaussian_noise() -> None:
    """Gaussian noise of the same (epsilon, delta) shows less than randomised response, so its bound
    is too high here.
    """
    trials = Trials(*responses(1.0, 32))
    assert gaussian_bound(answers(trials, share=1.0), DELTA) > 1.5
    assert 0.5 < proven_epsilon(trials, DELTA) < 1.0
