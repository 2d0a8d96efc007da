"""The covariance from one joint noise: unbiased without noise, nearer to the truth with it, and never singular."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.surrogates.shared_covariances import LowRank
from strategies.fedpft.cleaned_covariance import RIDGE, cleaned

D = 120


def matrix_of(found: LowRank) -> Tensor:
    return found.factor @ found.factor.T + found.variances.diag()


def noisy(truth: Tensor, noise: float, seed: int) -> Tensor:
    drawn = noise * torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return truth + (drawn + drawn.T) / 2


@pytest.fixture
def truth() -> Tensor:
    """Eigenvalues that fall like those of features, in random directions."""
    vectors = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9)))[0]
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
        error = matrix_of(cleaned(released, noise)) - RIDGE * radius * torch.eye(D, dtype=torch.float64) - truth
        assert error.norm() < 0.75 * (released - truth).norm()


@pytest.mark.parametrize("noise", [0.01, 1.0, 100.0])
def test_every_variance_is_positive_however_large_the_noise(truth: Tensor, noise: float) -> None:
    found = cleaned(noisy(truth, noise, 1), noise)
    assert float(found.variances.min()) > 0
    assert torch.linalg.eigvalsh(matrix_of(found)).min() >= 0.99 * RIDGE * noise * math.sqrt(2 * D)
