"""How many samples of which class each site gives, chunk by chunk; and the moments with which they are
standardised."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.fedpft.strategy import _moments, _shares, sample

CLASSES, D = ("a", "b", "c"), 3
few = settings(max_examples=40, deadline=None)
SITES = st.lists(
    st.tuples(
        st.permutations(CLASSES).flatmap(lambda p: st.sampled_from([p, p[:2], p[:1]])),
        st.lists(st.integers(1, 60), min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def surrogates(sites: list[tuple[list[str], list[int]]], seed: int) -> list[Surrogate]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for at, (names, counts) in enumerate(sites):
        count = len(names)
        table = Mixtures(
            torch.tensor(counts[:count]),
            torch.arange(count),
            torch.ones(count),
            3 * torch.randn(count, D, generator=draw),
            Diagonal(torch.rand(count, D, generator=draw) + 0.1),
        )
        found.append(Surrogate(Header("fedpft", "r", f"s{at}", "f", tuple(names)), table))
    return found


@few
@given(SITES, st.integers(0, 99), st.sampled_from([1, 10, 50, 10_000]), st.integers(1, 7))
def test_chunks_of_a_pass_have_one_sample_for_each_record_up_to_the_limit(
    sites: list[tuple[list[str], list[int]]], seed: int, limit: int, chunks: int
) -> None:
    sent = surrogates(sites, seed)
    total = sum(sum(each.mixtures.counts.tolist()) for each in sent)
    factor = min(1.0, limit / total)
    shares = _shares(sent, CLASSES, seed, limit, "cpu")
    for each, share in zip(sent, shares, strict=True):
        wanted = [max(1, round(n * factor)) for n in each.mixtures.counts.tolist()]
        assert share.counts == wanted
        assert share.classes.tolist() == [CLASSES.index(name) for name in each.header.classes]
        parts = [share.chunk(at, chunks) for at in range(chunks)]
        assert [sum(column) for column in zip(*parts, strict=True)] == wanted
        # No chunk has more than one sample more than another.
        for column in zip(*parts, strict=True):
            assert max(column) - min(column) <= 1
        for own, name in zip(share.streams, each.header.classes, strict=True):
            mine = stream(seed, each.header.site, name)
            assert torch.equal(torch.randn(3, generator=own), torch.randn(3, generator=mine))
    features, labels = sample(sent, CLASSES, seed, limit)
    assert features.shape == (sum(sum(share.counts) for share in shares), D)
    expected = [
        CLASSES.index(name)
        for each, share in zip(sent, shares, strict=True)
        for name, n in zip(each.header.classes, share.counts, strict=True)
        for _ in range(n)
    ]
    assert sorted(labels.tolist()) == sorted(expected)


@few
@given(SITES, st.integers(0, 99))
def test_the_moments_of_all_samples_are_those_of_the_law_of_total_variance(
    sites: list[tuple[list[str], list[int]]], seed: int
) -> None:
    sent = surrogates(sites, seed)
    means, variances, records = [], [], []
    for each in sent:
        table = each.mixtures
        assert isinstance(table.covariance, Diagonal)
        means.append(table.means.double().numpy())
        variances.append(table.covariance.variances.double().numpy())
        records.append(table.counts.double().numpy())
    weights = np.concatenate(records)
    centre = np.average(np.concatenate(means), axis=0, weights=weights)
    apart = (np.concatenate(means) - centre) ** 2 + np.concatenate(variances)
    mean, variance = _moments([each.mixtures for each in sent])
    np.testing.assert_allclose(mean, centre, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, np.average(apart, axis=0, weights=weights), rtol=1e-4)
