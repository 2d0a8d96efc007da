"""The covariance from one distributed noise: unbiased without noise, nearer to the truth with it, and
never singular.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.surrogates.covariances import LowRank
from fedsurrogate.strategies.fedpft.private_head import expected
from fedsurrogate.strategies.pooling.class_means import Components

D = 120


def matrix_of(found: LowRank) -> Tensor:
    return found.factor @ found.factor.T + found.variances.diag()


@pytest.fixture
def truth() -> Tensor:
    """Eigenvalues that fall like those of features, in random directions."""
    vectors = torch.linalg.qr(
        torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    )[0]
    values = 1 / torch.arange(1, D + 1, dtype=torch.float64)
    return (vectors * values) @ vectors.T


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
