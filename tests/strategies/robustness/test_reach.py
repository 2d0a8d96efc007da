"""The range of the sites' data: which components are moved back and where to, against plain numpy, and
what a shift or another unit of all data changes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness.defence import within_reach

CLASSES = ("a", "b", "c")


def surrogate(site: int, seed: int, records: int, far: float = 1.0) -> Surrogate:
    """A site with one to three components in each of two or three classes, of which one may be far. One
    column hardly varies.
    """
    generator = torch.Generator().manual_seed(1000 * seed + site)
    components = torch.randint(1, 4, (3,), generator=generator)
    counts = torch.randint(1, records, (3,), generator=generator)
    if site % 2:
        components[1] = counts[1] = 0
    labels = torch.arange(3).repeat_interleave(components)
    raw = torch.rand(len(labels), generator=generator) + 0.2
    weights = raw / torch.zeros(3).index_add_(0, labels, raw)[labels]
    centres = 3 * torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    unit = torch.tensor([1, 1, 1, 1e-3])
    means = centres[labels] + 0.3 * torch.randn(len(labels), 4, generator=generator)
    means[0] *= far
    spread = (torch.rand(len(labels), 4, generator=generator) + 0.5) * unit.square()
    table = Mixtures(counts, labels, weights, means * unit, Diagonal(spread))
    return Surrogate(Header("fedpft", "r", f"s{site}", "f", CLASSES), table)


def lower_median(rows: list[np.ndarray]) -> np.ndarray:
    """By column, as of torch."""
    return np.asarray(np.sort(np.stack(rows), 0)[(len(rows) - 1) // 2])


def bounded(sites: list[Surrogate]) -> list[np.ndarray]:
    """The means of every site, moved back by a plain loop."""
    centres, known, classes, points = [], [], [], []
    for each in sites:
        table = each.mixtures
        weights, means = table.weights.double().numpy(), table.means.double().numpy()
        variances = table.covariance.variances_per_dimension().double().numpy()
        labels, counts = table.labels.numpy(), table.counts.numpy()
        own = {}
        for label in np.unique(labels):
            at = labels == label
            mean = weights[at] @ means[at]
            # The law of total variance.
            own[label] = mean, weights[at] @ (variances[at] + means[at] ** 2) - mean**2
        certain = [label for label in own if counts[label] >= 5] or list(own)
        centres.append(np.mean([own[label][0] for label in certain], 0))
        # Variances are known from what is left besides one record for each component.
        if np.clip(counts - np.bincount(labels, minlength=3), 0, None).sum() >= 5:
            known.append(np.mean([own[label][1] for label in certain], 0))
        classes += [own[label][0] for label in own]
        large = means[counts[labels] * weights >= 5]
        points.append(large if len(large) else np.stack([own[label][0] for label in own]))
    middle = lower_median(centres)
    far_off = (np.stack(classes) - lower_median(classes)) ** 2
    usual = lower_median(known) if known else lower_median(list(far_off))
    scale = np.sqrt(np.maximum(usual, 0.3 * usual.mean()))
    far = [max((((each - middle) / scale) ** 2).sum(1)) for each in points]
    found = []
    for at, each in enumerate(sites):
        others = [value for site, value in enumerate(far) if site != at]
        most = np.sqrt(6 * np.median(others)) if len(others) > 1 else np.inf
        apart = each.mixtures.means.double().numpy() - middle
        lengths = np.sqrt(((apart / scale) ** 2).sum(1, keepdims=True))
        found.append(middle + np.minimum(1, most / np.maximum(lengths, 1e-15)) * apart)
    return found


CASES = (
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([2, 8, 60]),
    st.sampled_from([1.0, 30.0, 1e5]),
)


@settings(max_examples=60, deadline=None)
@given(*CASES)
def test_what_lies_beyond_the_data_of_the_others_is_moved_back_to_their_range(
    seed: int, count: int, records: int, far: float
) -> None:
    sites = [surrogate(site, seed, records, far if site == 0 else 1.0) for site in range(count)]
    for sent, kept, wanted in zip(sites, within_reach(sites), bounded(sites), strict=True):
        np.testing.assert_allclose(kept.mixtures.means, wanted, rtol=2e-3, atol=2e-3)
        assert replace(kept, mixtures=replace(kept.mixtures, means=sent.mixtures.means)) == sent


@settings(max_examples=20, deadline=None)
@given(*CASES, st.floats(-9, 9), st.sampled_from([0.01, 1.0, 50.0]))
def test_a_range_does_not_depend_on_origin_and_unit(
    seed: int, count: int, records: int, far: float, by: float, times: float
) -> None:
    def moved(sent: Surrogate) -> Surrogate:
        table = sent.mixtures
        spread = Diagonal(times**2 * table.covariance.variances_per_dimension())
        means = times * table.means + times * by
        return replace(sent, mixtures=replace(table, means=means, covariance=spread))

    sites = [surrogate(site, seed, records, far if site == 0 else 1.0) for site in range(count)]
    here, there = within_reach(sites), within_reach([moved(each) for each in sites])
    for one, two in zip(here, there, strict=True):
        found = two.mixtures.means / times - by
        torch.testing.assert_close(found, one.mixtures.means, rtol=1e-2, atol=1e-2)
