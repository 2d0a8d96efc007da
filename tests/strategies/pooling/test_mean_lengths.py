"""Lengths of noisy class means: nearer to the true ones over generated noise, and left alone where
there is none or too little to learn from; and sites that differ by the noise of their counts alone.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.fedpft.private_head import SITES_DIFFER, _pooled
from fedsurrogate.strategies.pooling.class_means import (
    by_site,
    differ_across,
    noise_of_counts_and_sums,
    pool,
    shrink,
)

CLAIM = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()
OF_COUNT, OF_SUM, DRAWS = 14.0, 1.0, 20


def noisy(
    means: Tensor, counts: Tensor, seed: int, of_count: float = OF_COUNT, of_sum: float = OF_SUM
) -> list[SumsSurrogate]:
    """Noisy sums of sites whose classes have these means (S, C, d) and counts (S, C)."""
    random = torch.Generator().manual_seed(seed)
    names = tuple(f"class {index}" for index in range(counts.shape[1]))
    made = []
    for site, (own, count) in enumerate(zip(means, counts, strict=True)):
        released = Sums(
            count + of_count * torch.randn(len(count), generator=random),
            own * count[:, None] + of_sum * torch.randn(own.shape, generator=random),
            None,
            {"counts": of_count, "sums": of_sum},
        )
        made.append(SumsSurrogate(Header("", "", str(site), "", names), released, CLAIM))
    return made


def directions(classes: int, d: int, seed: int) -> Tensor:
    """Of length one, (C, d)."""
    random = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(classes, d, generator=random), dim=1)


@pytest.mark.parametrize("family", ["spherical", "distributed"])
def test_distributed_noise_keeps_its_lengths(family: str) -> None:
    sent = noisy(0.5 * directions(6, 48, 1)[None], torch.full((1, 6), 90.0), 2)
    changed = not _pooled(sent, family, "none")[0].means.equal(pool(by_site(sent)).means)
    assert changed == (family == "spherical")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_noise_of_counts_is_not_taken_for_sites_that_differ(seed: int) -> None:
    """Sites with few records of some classes, as under Dirichlet: before, chance decided in a
    quarter of the draws that their means differ.
    """
    random = torch.Generator().manual_seed(seed)
    shares = torch._sample_dirichlet(torch.full((10, 5), 0.5), generator=random)
    counts = (140 * shares).T.round()
    # Means of records of length one around a mean of length 0.6.
    chance = torch.randn(5, 10, 64, generator=random) * (0.64 / 64) ** 0.5
    means = 0.6 * directions(10, 64, 7) + chance / counts.clamp_min(1).sqrt()[:, :, None]
    sent = noisy(means, counts, seed, of_sum=1.5)
    assert _pooled(sent, "spherical", "none")[1] <= SITES_DIFFER


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_sites_that_do_differ_are_found(seed: int) -> None:
    means = torch.stack([directions(4, 64, seed + site) for site in range(3)])
    sent = noisy(means, torch.full((3, 4), 400.0), seed)
    own = by_site(sent)
    share = differ_across(own, noise_of_counts_and_sums(sent)[1])
    assert SITES_DIFFER < share <= 1
    assert shrink(own)[1] > SITES_DIFFER
    assert _pooled(sent, "spherical", "none")[1] == min(share, shrink(own)[1])
