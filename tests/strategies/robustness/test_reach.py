"""The range of the sites' data, against numpy: moments of mixtures, medians of the others, and what
a shift or another unit of all data changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness.reach import Moments, Reach, _median_of_others

CLASSES = ("a", "b", "c")


def surrogate(site: int, seed: int, d: int = 4, most: int = 3, records: int = 60) -> Surrogate:
    """A site with one to three components in each class."""
    generator = torch.Generator().manual_seed(1000 * seed + site)
    components = torch.randint(1, most + 1, (3,), generator=generator)
    labels = torch.arange(3).repeat_interleave(components)
    raw = torch.rand(len(labels), generator=generator) + 0.2
    weights = raw / torch.zeros(3).index_add_(0, labels, raw)[labels]
    centres = 3 * torch.randn(3, d, generator=torch.Generator().manual_seed(seed))
    means = centres[labels] + 0.3 * torch.randn(len(labels), d, generator=generator)
    spread = Diagonal(torch.rand(len(labels), d, generator=generator) + 0.5)
    counts = torch.randint(1, records, (3,), generator=generator)
    return Surrogate(
        Header("fedpft", "r", f"s{site}", "f", CLASSES),
        Mixtures(counts, labels, weights, means, spread),
    )


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_moments_of_a_class_are_those_of_its_mixture(seed: int, records: int) -> None:
    sent = surrogate(0, seed, records=2 * records)
    table, found = sent.mixtures, Moments.of(sent)
    spread: Any = table.covariance
    for label in range(3):
        own = (table.labels == label).numpy()
        weights, means = table.weights[own].numpy(), table.means[own].numpy()
        mean = weights @ means
        # The law of total variance.
        variance = weights @ (spread.variances[own].numpy() + means**2) - mean**2
        np.testing.assert_allclose(found.means[label], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.variances[label], variance, rtol=1e-3, atol=1e-4)
    assert found.present.all()
    sizes = table.counts[table.labels] * table.weights
    wanted = table.means[sizes >= 5] if (sizes >= 5).any() else found.means
    torch.testing.assert_close(found.points, wanted)
    large = table.counts >= 5 if (table.counts >= 5).any() else torch.ones(3, dtype=torch.bool)
    assert torch.equal(found.certain(), large)
    torch.testing.assert_close(found.usual_variances(), found.variances[large].mean(0))
    # Variances are known from what is left besides one record for each component.
    left = int((table.counts - torch.bincount(table.labels)).clamp_min(0).sum())
    assert found.spread == (left >= 5)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 4).map(float), max_size=8))
def test_the_median_of_the_others_is_numpys(values: list[float]) -> None:
    found = _median_of_others(torch.tensor(values, dtype=torch.float64)).tolist()
    for at in range(len(values)):
        others = [*values[:at], *values[at + 1 :]]
        assert found[at] == (np.median(others) if len(others) > 1 else np.inf)


def moved(sent: Surrogate, by: float, times: float) -> Surrogate:
    table, spread = sent.mixtures, sent.mixtures.covariance
    assert isinstance(spread, Diagonal)
    other = replace(
        table, means=times * table.means + by, covariance=Diagonal(times**2 * spread.variances)
    )
    return replace(sent, mixtures=other)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(3, 7), st.floats(-9, 9), st.sampled_from([0.01, 1, 50]))
def test_a_range_does_not_depend_on_origin_and_unit(
    seed: int, count: int, by: float, times: float
) -> None:
    sites = [surrogate(site, seed) for site in range(count)]
    other = [moved(each, by, times) for each in sites]
    one, two = (Reach.of([Moments.of(each) for each in some]) for some in (sites, other))
    torch.testing.assert_close(two.farthest, one.farthest, rtol=1e-2, atol=1e-3)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_bounded_means_keep_their_direction_and_lie_in_the_range_of_the_others(
    seed: int, times: float
) -> None:
    sites = [surrogate(site, seed) for site in range(5)]
    reach = Reach.of([Moments.of(each) for each in sites])
    for site, each in enumerate(sites):
        means = reach.middle + times * (each.mixtures.means.double() - reach.middle)

        def length(points: Tensor) -> Tensor:
            return ((points - reach.middle) / reach.scale).norm(dim=1)

        kept = reach.bounded(site, means)
        limit = float(reach.farthest[site]) ** 0.5
        wanted = length(means).clamp_max(limit)
        torch.testing.assert_close(length(kept), wanted, rtol=1e-5, atol=1e-6)
        cosine = torch.cosine_similarity(kept - reach.middle, means - reach.middle)
        assert float(cosine.min()) > 1 - 1e-9


def median(values: list[float]) -> float:
    """The lower of two middle values, as of torch."""
    return sorted(values)[(len(values) - 1) // 2]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([2, 8, 60]))
@example(1, 3, 60)
@example(2, 4, 8)
@example(3, 2, 60)
@example(4, 3, 2)
def test_ranges_are_those_of_loops(seed: int, count: int, records: int) -> None:
    sites = [surrogate(site, seed, records=records) for site in range(count)]
    # One dimension hardly varies, and gets a floor.
    sites = [
        replace(
            each,
            mixtures=replace(
                each.mixtures,
                covariance=Diagonal(
                    each.mixtures.covariance.variances_per_dimension() * torch.tensor([1, 4, 1, 1e-4])
                ),
                means=each.mixtures.means * torch.tensor([1, 1, 1, 1e-3]),
            ),
        )
        for each in sites
    ]  # fmt: skip
    own = [Moments.of(each) for each in sites]
    found = Reach.of(own)
    known = [each for each in own if each.spread]
    if known:
        usual = [median([float(m.usual_variances()[i]) for m in known]) for i in range(4)]
    else:
        rows = np.concatenate([each.means.numpy() for each in own])
        centre = np.sort(rows, 0)[(len(rows) - 1) // 2]
        usual = np.sort((rows - centre) ** 2, 0)[(len(rows) - 1) // 2].tolist()
    np.testing.assert_allclose(found.variances, usual, rtol=1e-4)
    scale = np.sqrt(np.maximum(usual, 0.3 * np.mean(usual)))
    np.testing.assert_allclose(found.scale, scale, rtol=1e-4)
    certain = [[c for c in range(3) if m.counts[c] >= 5] or [0, 1, 2] for m in own]
    centres = [m.means[c].numpy().mean(0) for m, c in zip(own, certain, strict=True)]
    middle = np.array([median([float(each[i]) for each in centres]) for i in range(4)])
    np.testing.assert_allclose(found.middle, middle, rtol=1e-4, atol=1e-6)
    far = [max((((m.points.numpy() - middle) / scale) ** 2).sum(1)) for m in own]
    for site in range(count):
        others = [at for at in range(count) if at != site]
        farthest = float(np.median([far[at] for at in others])) if len(others) > 1 else np.inf
        assert float(found.farthest[site]) == pytest.approx(farthest, rel=1e-3)


def test_a_class_without_a_component_is_not_there() -> None:
    sent = surrogate(0, 3, records=200)
    table = sent.mixtures
    kept = table.labels != 1
    spread: Any = table.covariance
    less = Mixtures(
        torch.tensor([40, 0, 50]),
        table.labels[kept],
        table.weights[kept],
        table.means[kept],
        Diagonal(spread.variances[kept]),
    )
    found = Moments.of(replace(sent, mixtures=less))
    assert found.present.tolist() == [True, False, True]
    assert found.certain().tolist() == [True, False, True]
    assert not found.means[1].any()
