"""Agreement of sites against the same rules as plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.robustness import agreement
from fedsurrogate.strategies.robustness.agreement import (
    Pairs,
    correlations,
    unrelated,
)
from fedsurrogate.strategies.robustness.class_points import ClassPoints


def length_of(means: np.ndarray, noise: np.ndarray) -> float:
    """Mean squared distance of class means from their centre, less what noise adds to it."""
    if len(means) < 2:
        return math.nan
    apart = ((means - means.mean(0)) ** 2).sum(1).mean()
    return max(0.0, float(apart - means.shape[1] * noise.mean() * (1 - 1 / len(means))))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sites=st.integers(2, 9),
    classes=st.integers(1, 4),
    partners=st.integers(2, 5),
    power=st.sampled_from([1.0, 2.0]),
)
def test_correlations_are_those_of_the_differences_between_shared_classes(
    seed: int, sites: int, classes: int, partners: int, power: float
) -> None:
    random, d = np.random.default_rng(seed), 5
    means = random.normal(size=(classes, d)) + random.normal(size=(sites, classes, d))
    noise = random.uniform(0.001, 0.2, (sites, classes))
    has = random.random((sites, classes)) < 0.8
    tables = (means, 10.0 * has, noise, np.zeros((sites, classes)), np.zeros(sites))
    own = [torch.from_numpy(table) for table in tables]
    points = ClassPoints(
        tuple(map(str, range(sites))), tuple("abcd"[:classes]), *own, 1.0, power=power
    )
    before, agreement.PARTNERS = agreement.PARTNERS, partners
    try:
        found = correlations(points)
    finally:
        agreement.PARTNERS = before
    lengths = np.array([length_of(means[s][has[s]], noise[s][has[s]]) for s in range(sites)])
    known = np.sort(lengths[~np.isnan(lengths)])
    usual = known[(len(known) - 1) // 2] if len(known) else 0.0
    if not usual > 0:
        assert not found.shared.any()
        return
    lengths = np.maximum(np.nan_to_num(lengths), 0.05 * usual)
    step = max(1, sites // partners)
    wide = 1.0 if power > 1 else 16.0
    for one in range(sites):
        row = list(range(one % step, sites, step))
        assert [each for each in found.partners[one].tolist() if each >= 0] == row
        for at, other in enumerate(row):
            both = np.flatnonzero(has[one] & has[other])
            if other == one or len(both) < 2:
                assert float(found.shared[one, at]) == 0
                continue
            v, u = noise[one, both], noise[other, both]
            weights = 1 / (v + u + usual / (4 * d))
            weights /= weights.sum()
            a = means[one, both] - weights @ means[one, both]
            b = means[other, both] - weights @ means[other, both]
            scale = lengths[one] * lengths[other]
            wanted = {
                "correlation": (weights * (a * b).sum(1)).sum() / math.sqrt(scale),
                "mine": (v * wide * lengths[other] * weights**2).sum() / scale,
                "theirs": ((u * wide * lengths[one] + d * v * u) * weights**2).sum() / scale,
                "shared": len(both) - 1,
            }
            for name, value in wanted.items():
                assert float(getattr(found, name)[one, at]) == pytest.approx(value), name


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), sites=st.integers(2, 7), noisy=st.booleans())
def test_a_site_is_unrelated_where_its_votes_say_so(seed: int, sites: int, noisy: bool) -> None:
    random, dimension = np.random.default_rng(seed), 40
    shared = random.integers(0, 5, (sites, sites)).astype(float)
    level = random.choice([0.0, 0.05, 0.3, 0.9], sites)[:, None]
    tables = [
        np.clip(level + 0.05 * random.normal(size=(sites, sites)), -1, 1),
        random.uniform(0, 2e-3, (sites, sites)),
        random.uniform(0, 2e-3, (sites, sites)),
        shared,
    ]
    everyone = torch.arange(sites)
    own = [torch.from_numpy(table).float() for table in tables]
    pairs = Pairs(everyone, everyone.repeat(sites, 1), *own)
    found = unrelated(pairs, noisy, dimension)
    agreed, errors, median = np.zeros(sites), np.full(sites, np.inf), np.zeros(sites)
    for site in range(sites):
        votes = np.flatnonzero(shared[site] > 0)
        if len(votes):
            median[site] = np.sort(shared[site, votes])[(len(votes) - 1) // 2]
        if len(votes) >= 3:
            middle = (len(votes) - 1) // 2
            mine, theirs = (np.sort(table[site, votes])[middle] for table in tables[1:3])
            agreed[site] = np.quantile(tables[0][site, votes], 0.7)
            errors[site] = math.sqrt(mine + math.pi / 2 * theirs / len(votes))
    most = agreed + 2 * errors
    known = np.sort(most[np.isfinite(most)])
    for site in range(sites):
        threshold = 0.07
        if len(known) and not noisy and median[site] >= 2:
            chance = math.sqrt(1 / (dimension * max(1, median[site])) + errors[site] ** 2 / 16)
            margin = agreed[site] - 2 * min(chance, errors[site])
            if abs(margin) < 1e-4:
                continue
            if margin < 0:
                threshold = max(0.07, 0.33 * min(1.0, known[(len(known) - 1) // 2]))
        wanted = 1 + threshold - most[site]
        assert float(found[site]) == pytest.approx(wanted, abs=1e-4) or wanted == -math.inf


def test_a_site_that_is_left_out_has_no_votes() -> None:
    partners = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    tables = [torch.rand(3, 3) for _ in range(3)]
    pairs = Pairs(torch.tensor([0, 1, 2]), partners, *tables, torch.ones(3, 3))
    found = pairs.without(1)
    assert found.sites.tolist() == [0, 2]
    assert found.shared.tolist() == [[1, 0, 1], [1, 0, 1]]
    for name, table in zip(("correlation", "mine", "theirs"), tables, strict=True):
        assert torch.equal(getattr(found, name), table[[0, 2]])
    assert float(pairs.shared.sum()) == 9
