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
from fedsurrogate.strategies.robustness.class_points import of_mixtures
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
@given(st.lists(st.one_of(st.just(float("nan")), st.integers(0, 4).map(float)), max_size=8))
def test_the_median_of_the_others_is_numpys(values: list[float]) -> None:
    found = _median_of_others(torch.tensor(values, dtype=torch.float64)).tolist()
    for at in range(len(values)):
        others = [each for each in (*values[:at], *values[at + 1 :]) if each == each]
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
def test_a_range_does_not_depend_on_origin_and_unit_and_holds_every_honest_site(
    seed: int, count: int, by: float, times: float
) -> None:
    sites = [surrogate(site, seed) for site in range(count)]
    other = [moved(each, by, times) for each in sites]
    one, two = (Reach.of([Moments.of(each) for each in some]) for some in (sites, other))
    for site in range(count):
        scores = one.scores(site, sites[site])
        torch.testing.assert_close(two.scores(site, other[site]), scores, rtol=1e-2, atol=1e-3)
        assert float(scores.max()) < 1
        # One hundred times as far out, or as wide, is outside for any count.
        for field in ("means", "covariance"):
            table = sites[site].mixtures
            far: Any = (
                one.middle.float() + 100 * (table.means - one.middle.float())
                if field == "means"
                else Diagonal(100 * table.covariance.variances)  # type: ignore[union-attr]
            )
            wrong = replace(sites[site], mixtures=replace(table, **{field: far}))
            assert float(one.scores(site, wrong).max()) > 1


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


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(3, 6))
def test_the_table_of_class_means_is_in_units_of_the_spread_within_classes(
    seed: int, count: int
) -> None:
    sites = [surrogate(site, seed, records=200) for site in range(count)]
    # Enough records everywhere, so that each class and site is in the table.
    sites = [
        replace(each, mixtures=replace(each.mixtures, counts=each.mixtures.counts + 50))
        for each in sites
    ]
    found = of_mixtures(sites, CLASSES)
    own = [Moments.of(each) for each in sites]
    usual = np.median([each.usual_variances().numpy() for each in own], axis=0)
    if count % 2 == 0:  # torch takes the lower of two middle values
        usual = np.sort([each.usual_variances().numpy() for each in own], axis=0)[count // 2 - 1]
    for row, each in enumerate(own):
        np.testing.assert_allclose(found.means[row], each.means / np.sqrt(usual), rtol=1e-4)
        assert torch.equal(found.counts[row], each.counts.float())
        deviations = np.sqrt(each.usual_variances().numpy() / usual)
        every = np.sort([np.sqrt(m.usual_variances().numpy() / usual) for m in own], axis=0)
        middle = every[(count - 1) // 2]
        assert float(found.shape[row]) == pytest.approx(
            ((deviations - middle) ** 2).sum(), rel=1e-3, abs=1e-5
        )
        table = sites[row].mixtures
        several = torch.bincount(table.labels)[table.labels] > 1
        sizes = table.counts[table.labels] * table.weights
        kept = several & (sizes >= 5)
        parts = found.parts[row]
        np.testing.assert_allclose(parts.points, table.means[kept] / np.sqrt(usual), rtol=1e-4)
        assert parts.labels.tolist() == table.labels[kept].tolist()
        np.testing.assert_allclose(parts.noise, 1 / sizes[kept], rtol=1e-5)
        assert parts.names == tuple(CLASSES[label] for label in table.labels[kept].tolist())
    # The mean of n records has 1 / n of their variance.
    np.testing.assert_allclose(found.noise, 1 / found.counts)
    assert found.within == found.means.shape[2]


def median(values: list[float]) -> float:
    """The lower of two middle values, as of torch."""
    return sorted(values)[(len(values) - 1) // 2]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([2, 8, 60]))
@example(1, 3, 60)
@example(2, 4, 8)
@example(3, 2, 60)
@example(4, 3, 2)
def test_ranges_and_scores_are_those_of_loops(seed: int, count: int, records: int) -> None:
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
    wide = [
        max((m.variances[c].numpy() / scale**2).sum(1)) for m, c in zip(own, certain, strict=True)
    ]
    for site, each in enumerate(sites):
        others = [at for at in range(count) if at != site]
        spread = [wide[at] for at in others if own[at].spread]
        farthest = float(np.median([far[at] for at in others])) if len(others) > 1 else np.inf
        widest = float(np.median(spread)) if len(spread) > 1 else np.inf
        assert float(found.farthest[site]) == pytest.approx(farthest, rel=1e-3)
        assert float(found.widest[site]) == pytest.approx(widest, rel=1e-3)
        table = each.mixtures
        for at, label in enumerate(table.labels.tolist()):
            n = max(1.0, float(table.counts[label] * table.weights[at]))
            apart = (((table.means[at].numpy() - middle) / scale) ** 2).sum()
            inside = (table.covariance.variances_per_dimension()[at].numpy() / scale**2).sum()
            allowed = 6 * farthest + 3 * (widest if widest < np.inf else 4) / n
            wanted = max(apart / allowed, inside / (6 * widest))
            assert float(found.scores(site, each)[at]) == pytest.approx(wanted, rel=1e-3)


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
