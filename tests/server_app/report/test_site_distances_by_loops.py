"""The map of the sites against plain loops: distances, who is odd, and which class resembles another
one.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.linalg import sqrtm

import fedsurrogate as fs
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.server_app.report.site_distances import (
    _apart,
    _distances,
    _Moments,
    _resemblances,
    _scaled,
    site_map,
)
from fedsurrogate.strategies import stored_strategy

Array = NDArray[np.float64]


def drawn(sites: int, classes: int, d: int, seed: int, missing: float) -> list[_Moments]:
    """Moments of sites: each class around a centre of its own; some sites have two in each other's
    place, and some lack classes.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, d, generator=generator)
    found = []
    for site in range(sites):
        order = torch.arange(classes)
        if site % 3 == 1 and classes > 1:
            order[:2] = order[:2].flip(0)
        whole = centres[order] + 0.4 * torch.randn(classes, d, generator=generator)
        factor = torch.randn(classes, 2, 3, generator=generator)
        present = torch.rand(classes, generator=generator) >= missing
        found.append(_Moments(whole, whole[:, :2], factor @ factor.mT / 3, present))
    return found


def bures(one: Array, two: Array) -> float:
    """The squared distance: tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2."""
    root = np.real(sqrtm(one))
    return float(np.trace(one) + np.trace(two) - 2 * np.trace(np.real(sqrtm(root @ two @ root))))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.5]),
)
def test_the_distance_of_two_sites_is_the_mean_over_classes_that_both_have(
    sites: int, classes: int, seed: int, missing: float
) -> None:
    moments = drawn(sites, classes, 4, seed, missing)
    found = _distances(moments)
    wanted = np.full((sites, sites), np.nan)
    for i in range(sites):
        wanted[i, i] = 0.0
        for j in range(sites):
            common = [c for c in range(classes) if moments[i].present[c] and moments[j].present[c]]
            each = []
            for c in common if i != j else ():
                apart = (moments[i].means[c] - moments[j].means[c]).double().numpy()
                shapes = [moments[at].covariances[c].double().numpy() for at in (i, j)]
                each.append(math.sqrt(apart @ apart + bures(*shapes)))
            if each:
                wanted[i, j] = np.mean(each)
    # A pair without a common class is as far apart as the farthest.
    wanted = np.where(np.isnan(wanted), np.nanmax(wanted), wanted)
    assert found.numpy() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 999))
def test_a_site_is_as_far_as_the_nearest_third_of_all_sites(sites: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(sites, 3))
    table = np.linalg.norm(points[:, None] - points[None], axis=2)
    found = _apart(torch.from_numpy(table))
    for at, far in enumerate(found.tolist()):
        others = sorted(float(x) for k, x in enumerate(table[at]) if k != at)
        nearest = [x for number, x in enumerate(others, 1) if number >= sites / 3]
        assert far == pytest.approx(nearest[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.integers(1, 3), st.integers(0, 999))
def test_points_have_the_distances_of_points_in_a_plane(sites: int, d: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(sites, min(d, 2)))
    table = np.linalg.norm(points[:, None] - points[None], axis=2)
    found = _scaled(torch.from_numpy(table)).double().numpy()
    assert found.shape == (sites, 2)
    again = np.linalg.norm(found[:, None] - found[None], axis=2)
    assert again == pytest.approx(table, abs=1e-5)
    assert found.mean(0) == pytest.approx(np.zeros(2), abs=1e-6)
    # The longer direction first, and its sign is the same everywhere.
    assert (found[:, 0] ** 2).sum() >= (found[:, 1] ** 2).sum() - 1e-6
    for column in found.T:
        assert column[np.abs(column).argmax()] >= -1e-6


def resembling(moments: list[_Moments]) -> tuple[set[tuple[int, int, int]], bool]:
    """Site, class, and the class that it resembles; and whether every decision was clear."""
    found, clear, classes = set(), True, range(len(moments[0].present))
    for site, own in enumerate(moments):
        judged: dict[int, Array] = {}
        for c in classes:
            others = [each for at, each in enumerate(moments) if at != site and each.present[c]]
            if len(others) >= 2:
                rows = np.sort(np.stack([each.whole[c].double().numpy() for each in others]), 0)
                # torch's median: of an even number the lower one of the middle two.
                judged[c] = rows[(len(others) - 1) // 2]
        for c in judged:
            if not own.present[c]:
                continue
            mean = own.whole[c].double().numpy()
            squares = {k: float(((mean - centre) ** 2).sum()) for k, centre in judged.items()}
            best = min(squares, key=lambda k: squares[k])
            clear &= abs(squares[best] - 0.5 * squares[c]) > 1e-3 * abs(squares[c])
            if squares[best] < 0.5 * squares[c]:
                found.add((site, c, best))
    return found, clear


@settings(max_examples=120, deadline=None)
@given(
    st.integers(3, 7),
    st.integers(2, 4),
    st.sampled_from([2, 5]),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.3]),
)
def test_a_class_resembles_another_one_where_it_is_nearer(
    sites: int, classes: int, d: int, seed: int, missing: float
) -> None:
    moments = drawn(sites, classes, d, seed, missing)
    wanted, clear = resembling(moments)
    names = [f"s{at}" for at in range(sites)]
    found = {
        (names.index(each.site), int(each.name), int(each.other))
        for each in _resemblances(moments, names, list(map(str, range(classes))))
    }
    assert found == wanted or not clear


def released(kinds: list[float], classes: list[str], unit: float = 1.0) -> list[Surrogate]:
    """Surrogates of sites whose features are moved by so much along one direction."""
    made = []
    for at, moved in enumerate(kinds):
        generator = torch.Generator().manual_seed(at)
        labels = torch.arange(60) % len(classes)
        x = torch.randn(60, 5, generator=generator) + 6 * torch.eye(5)[labels]
        x[:, 4] += moved
        names = [classes[label] for label in labels.tolist()]
        each = fs.fit(unit * x, names, site=f"s{at}", covariance="spherical")
        own = stored_strategy(each.config)(each.config).unpack(each.payload)
        assert isinstance(own, Surrogate)
        made.append(own)
    return made


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.3, 8.0, -8.0]), min_size=1, max_size=5))
def test_odd_sites_are_more_than_twice_as_far_as_the_median(kinds: list[float]) -> None:
    found = site_map(released(kinds, ["a", "b", "c"]))
    if len(kinds) < 2:
        assert found is None
        return
    assert found is not None
    table, sites = found.distances.numpy(), len(kinds)
    apart = [
        sorted(x for k, x in enumerate(row) if k != at)[math.ceil(sites / 3) - 1]
        for at, row in enumerate(table)
    ]
    usual = sorted(apart)[(sites - 1) // 2]
    far = {f"s{at}" for at, x in enumerate(apart) if x > max(0.5, 2 * usual)}
    assert set(found.odd) == (far if sites > 2 else set())
    assert found.sites == tuple(f"s{at}" for at in range(sites))
    # Distances have no unit: the same features in other units give the same map.
    again = site_map(released(kinds, ["a", "b", "c"], unit=4.0))
    assert again is not None
    assert again.distances.numpy() == pytest.approx(table, rel=0.02, abs=0.02)
    assert again.odd == found.odd


def test_sites_without_a_common_class_or_too_many_have_no_map() -> None:
    one, two = released([0.0], ["a", "b"])[0], released([0.0], ["c", "d"])[0]
    assert site_map([one, two]) is None
    shared = released([0.0], ["b", "c"])[0]
    assert site_map([one, shared]) is not None
    assert site_map([one] * 60) is not None
    assert site_map([one] * 61) is None
