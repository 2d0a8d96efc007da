"""The covariance from one distributed noise: unbiased without noise, nearer to the truth with it, and
never singular.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.surrogates.covariances import LowRank
from fedsurrogate.strategies.closed_form.solvers import RIDGE, cleaned
from fedsurrogate.strategies.fedpft.private_head import expected
from fedsurrogate.strategies.pooling.class_means import Components

D = 120


def matrix_of(found: LowRank) -> Tensor:
    return found.factor @ found.factor.T + found.variances.diag()


def noisy(truth: Tensor, noise: float, seed: int) -> Tensor:
    drawn = noise * torch.randn(
        D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return truth + (drawn + drawn.T) / 2


@pytest.fixture
def truth() -> Tensor:
    """Eigenvalues that fall like those of features, in random directions."""
    vectors = torch.linalg.qr(
        torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    )[0]
    values = 1 / torch.arange(1, D + 1, dtype=torch.float64)
    return (vectors * values) @ vectors.T


def test_without_noise_no_variance_above_the_floor_changes(truth: Tensor) -> None:
    values, vectors = torch.linalg.eigh(truth)
    floored = (vectors * values.clamp_min(0.2 * float(values.mean()))) @ vectors.T
    assert torch.allclose(matrix_of(cleaned(truth, 0.0)), floored, atol=1e-9)


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.03])
def test_it_is_nearer_to_the_truth_than_what_was_released(truth: Tensor, noise: float) -> None:
    radius = noise * math.sqrt(2 * D)
    for seed in range(3):
        released = noisy(truth, noise, seed)
        error = (
            matrix_of(cleaned(released, noise))
            - RIDGE * radius * torch.eye(D, dtype=torch.float64)
            - truth
        )
        assert error.norm() < 0.75 * (released - truth).norm()


@pytest.mark.parametrize("noise", [0.01, 1.0, 100.0])
def test_every_variance_is_positive_however_large_the_noise(truth: Tensor, noise: float) -> None:
    found = cleaned(noisy(truth, noise, 1), noise)
    assert float(found.variances.min()) > 0
    assert torch.linalg.eigvalsh(matrix_of(found)).min() >= 0.99 * RIDGE * noise * math.sqrt(2 * D)


def components(means: Tensor, noise: float) -> Components:
    count = len(means)
    ones = torch.ones(count, dtype=torch.float64)
    names = tuple(map(str, range(count)))
    return Components(
        names, torch.arange(count), means, noise * ones.diag(), 100 * ones, ones / count
    )


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_expected_class_means_are_nearer_to_the_true_ones(truth: Tensor, power: float) -> None:
    """Whether they differ alike in all directions, or most in those of large variance; most of all
    where noise is large.
    """
    generator = torch.Generator().manual_seed(1)
    values, vectors = torch.linalg.eigh(truth)
    true = (
        torch.randn(10, D, dtype=torch.float64, generator=generator)
        * (values**power).sqrt()
        @ vectors.T
    )
    covariance = LowRank(vectors * values.sqrt(), torch.zeros(D, dtype=torch.float64))
    for ratio, most in ((0.3, 0.9), (3.0, 0.6)):
        noise = ratio * float(true.square().mean())
        found = true + noise**0.5 * torch.randn(10, D, dtype=torch.float64, generator=generator)
        after, uncertain = expected(components(found, noise), covariance)
        assert (after.means - true).norm() < most * (found - true).norm()
        assert not after.noise.any()
        # Uncertain means widen the covariance, by no more than their noise.
        wider = torch.linalg.eigvalsh(matrix_of(uncertain) - truth)
        assert float(wider.min()) > -1e-9
        assert float(wider.max()) <= noise * (1 + 1e-9)


def test_without_noise_class_means_and_covariance_stay(truth: Tensor) -> None:
    means = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    covariance = LowRank(torch.linalg.cholesky(truth), torch.zeros(D, dtype=torch.float64))
    after, same = expected(components(means, 1e-8), covariance)
    assert torch.allclose(after.means, means, atol=1e-4)
    assert torch.allclose(matrix_of(same), truth, atol=1e-6)
    one = components(means[:1], 0.1)
    assert expected(one, covariance) == (one, covariance)
