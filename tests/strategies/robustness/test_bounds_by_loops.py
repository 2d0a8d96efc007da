"""The bounds on one site's influence, to the last digit, against the same rules as plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median_low

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header, Synthetic
from fedsurrogate.strategies.robustness.defence import (
    bounded,
    bounded_heads,
    bounded_images,
    limit_of,
)

Array = NDArray[np.float64]


def lower_median(values: Array) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


LENGTHS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@given(LENGTHS, st.floats(0, 50))
def test_a_limit_is_twice_the_usual_length_beyond_noise(lengths: list[float], noise: float) -> None:
    usual = sorted(lengths)[(len(lengths) - 1) // 2]
    signal = math.sqrt(max(0.0, usual**2 - noise**2))
    assert limit_of(lengths, noise) == pytest.approx(math.sqrt(noise**2 + 4 * signal**2))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0.1, 0.5, 1.0, 4.0, 50.0]), min_size=1, max_size=7),
    noise=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 999),
)
def test_points_are_moved_to_the_limit_towards_the_median(
    sizes: list[float], noise: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = np.array(sizes)[:, None] * random.normal(size=(len(sizes), 12))
    points = [{"a": torch.from_numpy(row[:8].reshape(2, 4)), "b": torch.from_numpy(row[8:])} for row in rows]  # fmt: skip
    inside, shares = bounded(points, noise)
    apart = rows - np.median(rows, 0)
    lengths = np.linalg.norm(apart, axis=1)
    limit = limit_of(lengths.tolist(), noise * (math.sqrt(12) + 6))
    kept = np.minimum(1, limit / lengths) if len(sizes) > 2 else np.ones(len(sizes))
    assert shares == pytest.approx(kept.tolist())
    for point, row, off, share in zip(inside, rows, apart, kept, strict=True):
        flat = torch.cat([point["a"].flatten(), point["b"]]).numpy()
        np.testing.assert_allclose(flat, row + (share - 1) * off, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    owned=st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=1, max_size=6),
    sizes=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0, 30.0]), min_size=6, max_size=6),
    seed=st.integers(0, 999),
)
def test_heads_are_drawn_to_the_centre_as_a_whole_and_then_bounded_by_their_length(
    owned: list[set[str]], sizes: list[float], seed: int
) -> None:
    random = np.random.default_rng(seed)
    names = [sorted(each) for each in owned]
    rows = [s * random.normal(size=(len(own), 4)) for s, own in zip(sizes, names, strict=False)]
    sent = [
        Parameters(
            Header("average", "r", str(at), "f", tuple(own)),
            1,
            {"weight": torch.from_numpy(row[:, :3]), "bias": torch.from_numpy(row[:, 3])},
            10,
        )
        for at, (own, row) in enumerate(zip(names, rows, strict=True))
    ]
    kept, shares = bounded_heads(sent)
    if len(sent) < 3:
        assert kept == sent
        assert shares == {}
        return
    known = {c: [row[own.index(c)] for own, row in zip(names, rows, strict=True) if c in own] for c in "abc"}  # fmt: skip
    centres = [
        np.stack(
            [np.median(known[c], 0) if len(known[c]) > 2 else row[at] for at, c in enumerate(own)]
        )
        for own, row in zip(names, rows, strict=True)
    ]
    apart = [row - centre for row, centre in zip(rows, centres, strict=True)]
    spreads = np.stack([np.sqrt((each**2).mean(0)) for each in apart])
    away = spreads[spreads.max(1) > 0]
    usual = [lower_median(column) for column in away.T] if len(away) else [0.0] * 4
    there = [at for at in range(4) if usual[at]]
    inside = []
    for each, spread in zip(apart, spreads, strict=True):
        units = [spread[at] / usual[at] for at in there]
        limits = [2 / np.sqrt(np.mean(np.square(units)))] if any(units) else []
        limits += [8 / unit for unit in units if unit]
        limits += [2 * usual[3] / spread[3]] if usual[3] and spread[3] else []
        closer = np.zeros_like(each)
        for at in there if len(away) else range(4):
            closer[:, at] = min([1.0, *limits]) * each[:, at]
        inside.append(closer)
    moved = [centre + each for centre, each in zip(centres, inside, strict=True)]
    lengths = [float(np.linalg.norm(each)) for each in moved]
    longest = 3.0 * median_low([each for each in lengths if each] or [0.0])
    for site, own in enumerate(kept):
        share = min(1.0, longest / lengths[site]) if lengths[site] else 1.0
        found = torch.cat([own.tensors["weight"], own.tensors["bias"][:, None]], 1).numpy()
        np.testing.assert_allclose(found, share * moved[site], atol=1e-9)
        whole = float(np.linalg.norm(apart[site]))
        near = float(np.linalg.norm(inside[site])) / whole if whole else 1.0
        if abs(min(near, share) - 1) > 1e-9:
            assert shares[str(site)] == pytest.approx(min(near, share))
        else:
            assert shares.get(str(site), 1.0) == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 40.0]), min_size=1, max_size=6),
    seed=st.integers(0, 999),
)
def test_images_are_shortened_to_twice_the_longest_of_the_usual_site(
    sizes: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    header = Header("fedlap", "r", "0", "f", ("a", "b"))
    sets = [
        Synthetic(
            replace(header, site=str(site)),
            1,
            size * torch.randn(4, 6, generator=generator),
            torch.tensor([0, 0, 1, 1]),
            1.0,
            10,
        )
        for site, size in enumerate(sizes)
    ]
    kept, shares = bounded_images(sets)
    longest = [float(each.values.norm(dim=1).max()) for each in sets]
    most = 2 * median_low(longest) if len(sets) > 2 else math.inf
    for site, (own, before) in enumerate(zip(kept, sets, strict=True)):
        lengths = before.values.norm(dim=1)
        factor = torch.tensor([min(1.0, most / float(each)) if each else 1.0 for each in lengths])
        torch.testing.assert_close(own.values, factor[:, None] * before.values)
        assert shares.get(str(site), 1.0) == pytest.approx(float(factor.min()))
