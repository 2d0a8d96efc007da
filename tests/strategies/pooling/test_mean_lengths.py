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
    even_lengths,
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


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 20), st.floats(0.0, 0.3), st.integers(1, 4))
def test_lengths_are_nearer_to_the_true_ones(
    seed: int, classes: int, spread: float, count: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = 0.5 * (spread * torch.randn(classes, generator=random)).exp()
    means = (lengths[:, None] * directions(classes, 64, seed)).expand(count, -1, -1)
    counts = torch.randint(100, 160, (count, classes), generator=random).float()
    before, after = 0.0, 0.0
    for draw in range(DRAWS):
        sent = noisy(means, counts, seed + draw)
        plain = pool(by_site(sent))
        errors = [
            (found.means.norm(dim=1).log() - lengths.double().log()).square().mean()
            for found in (
                plain,
                even_lengths(plain, by_site(sent), *noise_of_counts_and_sums(sent)),
            )
        ]
        before, after = before + float(errors[0]), after + float(errors[1])
    assert after < 1.1 * before
    if spread < 0.05:
        assert after < 0.7 * before, "equal lengths: their mean is better by far"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_without_noise_or_with_few_classes_means_stay(seed: int, classes: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.rand(classes, 1, generator=random) + 0.1
    means = (lengths * directions(classes, 32, seed)).expand(2, -1, -1)
    counts = torch.full((2, classes), 100.0)
    tiny = 1e-6 if classes > 3 else OF_COUNT
    sent = noisy(means, counts, seed, tiny, min(tiny, OF_SUM))
    plain = pool(by_site(sent))
    even = even_lengths(plain, by_site(sent), *noise_of_counts_and_sums(sent))
    torch.testing.assert_close(even.means, plain.means, rtol=1e-6, atol=0)
    torch.testing.assert_close(even.noise, plain.noise, rtol=1e-6, atol=1e-18)


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
