"""Coded sums: what sites add up to, and what leaves again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.targets.sums import CodedSums, Noise, moment_of
from tests.coded import coded, noisy, number_sums


def records(seed: int, n: int = 60, d: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    return x, x[:, :1] + 0.3 * torch.randn(n, 1, generator=draw, dtype=torch.float64)


def tables(sums: CodedSums) -> list[Tensor]:
    assert sums.products is not None
    return [sums.code, sums.sums, sums.mean, sums.covariance, sums.products]


def close(one: CodedSums, other: CodedSums, tolerance: float) -> bool:
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(tables(one), tables(other), strict=True)
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sites=st.lists(st.integers(0, 4), min_size=60, max_size=60),
    shift=st.sampled_from([0.0, 30.0, -1000.0]),
)
def test_any_partition_adds_up_to_all_records(seed: int, sites: list[int], shift: float) -> None:
    x, y = records(seed)
    x = x + shift
    at = torch.tensor(sites)
    parts = [number_sums(y[at == s], x[at == s], -5, 5) for s in range(5) if (at == s).any()]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert close(total, number_sums(y, x, -5, 5), 1e-9)


def test_a_share_of_the_weight_keeps_averages() -> None:
    x, y = records(1)
    sums = number_sums(y, x, -5, 5)
    half = sums.scaled(0.5)
    assert close(half + half, sums, 1e-12)
    assert torch.equal(half.covariance, sums.covariance)
    assert half.records == 30


def test_noise_of_sites_adds_in_squares_and_scales_with_the_sums() -> None:
    x, y = records(2)
    sd = torch.tensor([3.0, 4.0], dtype=torch.float64)
    one = noisy(number_sums(y, x, -5, 5), sd, 2 * sd, 5.0, 0, products=1.5)
    both = (one + one).noise
    assert both is not None
    assert torch.allclose(both.code, sd * 2**0.5)
    assert torch.allclose(both.sums, 2 * sd * 2**0.5)
    assert (both.squares, both.products) == pytest.approx((5 * 2**0.5, 1.5 * 2**0.5))
    assert (one + number_sums(y, x, -5, 5)).noise is not None, "a site without noise hides nothing"
    share = one.scaled(0.1).noise
    assert share is not None
    assert torch.allclose(share.sums, 0.2 * sd)
    assert (share.squares, share.products) == pytest.approx((0.5, 0.15))


def test_what_does_not_fit_is_refused() -> None:
    x, y = records(5)
    sums = number_sums(y, x, -5, 5)
    with pytest.raises(ValueError, match="other codes or dimensions"):
        sums + coded(torch.ones(60, 1).double(), x)
    with pytest.raises(ValueError, match="without records"):
        moment_of(0.0, sums.mean, fold(sums.covariance))
    moment = sums.moment
    with pytest.raises(ValueError, match="code of shape"):
        CodedSums(sums.code.float(), sums.sums, moment)
    with pytest.raises(ValueError, match="counts of the moment"):
        CodedSums(
            sums.code, sums.sums, Statistics(torch.ones(2).double(), sums.sums, moment.matrix)
        )
    with pytest.raises(ValueError, match="noise of the code"):
        CodedSums(sums.code, sums.sums, moment, noise=Noise(torch.ones(1), torch.ones(2), 1.0))
