"""Noisy class sums as Gaussians: only classes that stand out from the noise, with bounded means and
variances.
"""

import pytest
import torch

from fedsurrogate.common.surrogates.class_sums import Sums, as_mixtures

D = 4


def sums(counts: list[float], sigma: float = 10.0, lengths: float = 0.5) -> Sums:
    """Classes along the axes; each mean has this norm if its count is exact."""
    table = torch.eye(len(counts), D) * lengths * torch.tensor(counts)[:, None]
    return Sums(torch.tensor(counts), table, None, {"counts": sigma, "sums": 1e-6})


@pytest.mark.parametrize("sigma", [0.1, 1.0, 10.0, 1e3])
def test_a_class_counts_from_two_standard_deviations_of_its_noise_on(sigma: float) -> None:
    found = as_mixtures(sums([2.1 * sigma, 1.9 * sigma, -5 * sigma, 50 * sigma], sigma))
    assert found is not None
    mixtures, kept = found
    assert kept == [0, 3]
    assert mixtures.labels.tolist() == [0, 1]
    assert mixtures.weights.tolist() == [1, 1]
    assert mixtures.counts.tolist() == [max(1, round(2.1 * sigma)), round(50 * sigma)]
    assert as_mixtures(sums([1.9 * sigma, 0.0], sigma)) is None


def test_no_class_is_less_than_one_record_so_that_no_mean_is_longer_than_its_sum() -> None:
    found = as_mixtures(sums([0.5, 100.0], sigma=0.01))
    assert found is not None
    assert torch.allclose(found[0].means.norm(dim=1), torch.tensor([0.25, 0.5]))


def test_of_a_feature_of_length_one_what_is_not_in_its_mean_is_variance() -> None:
    for length in (0.0, 0.3, 0.9):
        found = as_mixtures(sums([1000.0], lengths=length))
        assert found is not None
        assert float(found[0].covariance.variances) * D == pytest.approx(1 - length**2, abs=1e-3)  # type: ignore[union-attr]
