"""The battery of statistical tests finds small faults in samplers and releases, and no fault where
there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import distributions
from benchmarks._distribution_checks import Recorded, recorded, samplers
from benchmarks._distribution_tests import Outcome, failed, of_noise
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, discrete_gaussian

Sampler = Callable[[int, int], np.ndarray]
RUNS, ENTRIES = 2, 25_000


def weaker(variance: int, count: int) -> np.ndarray:
    """A standard deviation that is 3 % too small."""
    return discrete_gaussian(int(variance * 0.97**2), count)


def biased(variance: int, count: int) -> np.ndarray:
    """Noise whose mean is 3 % of its standard deviation."""
    return discrete_gaussian(variance, count) + math.isqrt(variance) * 3 // 100


def repeated(variance: int, count: int) -> np.ndarray:
    """The same noise in each run."""
    return discrete_gaussian(variance, count, gaussian_mechanism.seeded(bytes(32)))


def in_pairs(variance: int, count: int) -> np.ndarray:
    """Neighbours share a hundredth of their variance more than they should."""
    drawn, shared = discrete_gaussian(variance, count), discrete_gaussian(variance // 20, count)
    return drawn + shared + np.roll(shared, 1)


def uniform(variance: int, count: int) -> np.ndarray:
    """Another distribution of the same variance."""
    width = 2 * math.sqrt(3 * variance)
    return (np.random.default_rng(0).random(count) * width - width / 2).astype(np.int64)


def released(sampler: Sampler, patch: pytest.MonkeyPatch) -> Recorded:
    patch.setattr(gaussian_mechanism, "discrete_gaussian", sampler)
    patch.setattr(gaussian_mechanism, "DRAWN", ENTRIES)
    values = IntegerSum.of(torch.linspace(-1, 1, ENTRIES), 1.0)
    return recorded(lambda: BoundedSum("sums", values, 1.0).noisy(3.0), RUNS)


@pytest.mark.parametrize(
    ("sampler", "shown"),
    [
        (weaker, "standard deviation"),
        (biased, "bias"),
        (repeated, "covariance of runs"),
        (in_pairs, "covariance of neighbours"),
        (uniform, "distribution"),
        (discrete_gaussian, ""),
    ],
)
def test_a_fault_of_three_percent_in_a_release_is_found_and_named(
    sampler: Sampler, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = released(sampler, monkeypatch)
    (parts,) = found.residuals.values()
    assert {each.sigma for each in found.released} == {3.0}
    tests = list(of_noise("sums", np.stack(parts)))
    assert len(tests) == 5
    wrong = {each.test for each in failed(tests, distributions.CHANCE)}
    assert (shown in wrong) if shown else not wrong


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(1e-4, 0.2))
def test_the_correction_rejects_what_each_number_of_true_claims_allows(
    probabilities: list[float], chance: float
) -> None:
    """Holm by its definition: the smallest is compared with chance / m, the next with chance /
    (m - 1), until one is larger. Never less than Bonferroni, never more than no correction.
    """
    tests = [Outcome(str(at), "", 1, p) for at, p in enumerate(probabilities)]
    rejected = {each.name for each in failed(tests, chance)}
    assert {t.name for t in tests if t.p <= chance / len(tests)} <= rejected
    assert all(float(t.p) <= chance for t in tests if t.name in rejected)
    left = sorted(p for t, p in zip(tests, probabilities, strict=True) if t.name not in rejected)
    assert not left or left[0] > chance / len(left)


def test_all_samplers_hold() -> None:
    tests = list(samplers(20_000))
    assert len({each.name for each in tests}) > 20
    # Some of them draw from the operating system, also in tests.
    assert not failed(tests, 1e-7)
