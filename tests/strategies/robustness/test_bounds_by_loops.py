"""The bounds on one site's influence, to the last digit, against the same rules as plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median_low

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.surrogates.synthetic import Synthetic
from fedsurrogate.strategies.robustness.bounded_influence import SiteClasses, bounds
from fedsurrogate.strategies.robustness.influence import (
    bounded,
    bounded_heads,
    bounded_images,
    limit_of,
)

Array = NDArray[np.float64]


def weighted_median(values: Array, votes: Array) -> float:
    """Mean of the lower and of the upper one."""
    order = np.argsort(values)
    below = np.cumsum(votes[order]) / votes.sum()
    lower = values[order][np.argmax(below >= 0.5 - 1e-12)]
    upper = values[order][np.argmax(below > 0.5 + 1e-12)]
    return float(lower + upper) / 2


def lower_median(values: Array) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


class Loops:
    """The rules of `bounds`, site by site and class by class."""

    def __init__(
        self, means: Array, counts: Array, noise: Array, power: float, covariances: Array | None
    ) -> None:
        self.means, self.counts, self.noise, self.power = means, counts, noise, power
        self.sites, self.classes, self.d = means.shape
        self.scatter = covariances is not None
        self.covariances = (
            np.stack([np.eye(self.d)] * self.sites) if covariances is None else covariances
        )
        self.known = [c for c in range(self.classes) if (counts[:, c] > 0).any()]
        self._centre()
        self._bound()

    def owners(self, c: int) -> list[int]:
        return [s for s in range(self.sites) if self.counts[s, c] > 0]

    def _centre(self) -> None:
        self.centres, self.blur = np.zeros((self.classes, self.d)), np.zeros(self.classes)
        for c in self.known:
            own = self.owners(c)
            votes = self.counts[own, c]
            if votes.sum() - votes.max() >= 5:
                votes = np.minimum(votes, lower_median(votes))
            for i in range(self.d):
                self.centres[c, i] = weighted_median(self.means[own, c, i], votes)
            shares = votes / votes.sum()
            self.blur[c] = math.pi / 2 * (shares**2 * self.noise[own, c]).sum()

    def _bound(self) -> None:
        between = self.centres[self.known] - self.centres[self.known].mean(0)
        k = max(1, len(self.known) - 1)
        self.lines = np.linalg.svd(between)[2][:k].T
        onto = self.lines @ self.lines.T
        self.moves = np.zeros_like(self.means)
        self.scores = np.zeros((self.sites, self.classes))
        for part, dims in ((onto, k), (np.eye(self.d) - onto, self.d - k)):
            squares = np.zeros((self.sites, self.classes))
            for c in self.known:
                for s in self.owners(c):
                    squares[s, c] = (part @ (self.means[s, c] - self.centres[c])).dot(
                        part @ (self.means[s, c] - self.centres[c])
                    )
            more = np.zeros(self.classes)
            if dims == k:
                middle = self.centres[self.known].mean(0)
                for c in self.known:
                    length = self.d * self.blur[c]
                    apart = ((self.centres[c] - middle) ** 2).sum()
                    more[c] = length**2 / max(apart, length, 1e-300)
            spread = self.spreads(squares, dims, more)
            for c in self.known:
                for s in self.owners(c):
                    noise = self.noise[s, c] + self.blur[c]
                    limit = max(spread[c], self.room(s, c) ** 2)
                    chance = math.sqrt(2 * dims) * noise
                    chance += 2 * math.sqrt(limit * (noise + more[c]))
                    allowed = limit + dims * noise + more[c] + chance
                    alone = min(squares[s, c], self.alone(part, s, c))
                    self.scores[s, c] = max(self.scores[s, c], alone / allowed)
                    factor = min(1.0, math.sqrt(allowed / max(squares[s, c], 1e-300)))
                    self.moves[s, c] += (factor - 1) * part @ (self.means[s, c] - self.centres[c])

    def alone(self, part: Array, s: int, c: int) -> float:
        """Squared distance without what the site's other classes have in common."""
        off = part @ (self.means[s, c] - self.centres[c])
        others = [o for o in self.known if o != c and self.counts[s, o] > 0]
        if others:
            off = off - part @ np.mean([self.means[s, o] - self.centres[o] for o in others], 0)
        return float(off @ off)

    def spreads(self, squares: Array, dims: int, more: Array) -> dict[int, float]:
        """Of the sites of each class, the farthest that is none of those that may be hostile."""
        found: dict[int, float] = {}
        for c in self.known:
            own = self.owners(c)
            beyond = sorted(
                max(0.0, squares[s, c] - dims * (self.noise[s, c] + self.blur[c]) - more[c])
                for s in own
            )
            found[c] = beyond[max(0, len(own) - max(1, len(own) // 4) - 1)]
        judged = [found[c] for c in self.known if len(self.owners(c)) >= 3]
        usual = median_low(judged) if judged else 0.0
        return {c: found[c] if len(self.owners(c)) >= 3 else usual for c in self.known}

    def weight(self, s: int, c: int) -> float:
        return float(self.counts[s, c] ** self.power / (self.counts[:, c] ** self.power).sum())

    def room(self, s: int, c: int) -> float:
        """The distance that moves the pooled mean a twentieth of the way to the next class."""
        ways = []
        for other in self.known:
            if other != c:
                apart = (self.centres[c] - self.centres[other]) @ self.lines
                blur = self.lines.shape[1] * (self.blur[c] + self.blur[other])
                ways.append(math.sqrt(max(0.0, apart @ apart - blur)))
        return 0.05 * min(ways, default=math.inf) / max(self.weight(s, c), 1e-9)

    def scales(self) -> Array:
        if not self.scatter:
            return np.ones(self.sites)
        inside = np.stack([self.lines.T @ each @ self.lines for each in self.covariances])
        usual = np.sort(inside, 0)[(self.sites - 1) // 2]
        values, vectors = np.linalg.eigh(usual)
        white = vectors / np.sqrt(np.maximum(values, 0.05 * values.mean()))
        found = []
        for s in range(self.sites):
            widest = np.linalg.eigvalsh(white.T @ inside[s] @ white)[-1]
            records = max(1.0, self.counts[s].sum())
            chance = (1 + math.sqrt(self.lines.shape[1] / records)) ** 2
            found.append(min(1.0, 2.0 * chance / widest))
        return np.array(found)

    def harm(self) -> Array:
        """What the others lose if a site alone is not bounded."""
        scales = self.scales()
        everyone, found = self.right(self.moves, scales), np.zeros(self.sites)
        for site in range(self.sites):
            if not self.moves[site].any() and scales[site] >= 1:
                continue
            moves, factors = self.moves.copy(), scales.copy()
            moves[site], factors[site] = 0, 1
            lost = everyone - self.right(moves, factors)
            squares = []
            for c in self.known:
                others = [s for s in self.owners(c) if s != site]
                middle = float(np.median(lost[others, c])) if others else 0.0
                squares.append(max(0.0, middle) ** 2)
            found[site] = math.sqrt(np.mean(squares))
        return found

    def right(self, moves: Array, factors: Array) -> Array:
        """Least probability with which a site's own class wins against another one."""
        # With one variance for all, only directions between classes tell them apart.
        basis = np.eye(self.d) if self.scatter else self.lines
        own, moved, k = self.means @ basis, (self.means + moves) @ basis, basis.shape[1]
        covariances = np.stack([basis.T @ each @ basis for each in self.covariances])
        raw = self.counts**self.power
        pooled = {c: raw[:, c] @ moved[:, c] / raw[:, c].sum() for c in self.known}
        scatter, within = np.zeros((k, k)), np.zeros((k, k))
        for s in range(self.sites):
            within += raw[s].sum() * factors[s] * covariances[s] / raw.sum()
            for c in self.known:
                off = moved[s, c] - pooled[c]
                scatter += self.scatter * raw[s, c] * np.outer(off, off) / raw.sum()
        usual = np.sort(covariances, 0)[(self.sites - 1) // 2]
        test = usual + 0.02 * np.trace(usual) / k * np.eye(k)
        whole = within + 0.02 * np.trace(within) / k * np.eye(k) + scatter
        found = np.ones((self.sites, self.classes))
        for c in self.known:
            for other in self.known:
                if other == c:
                    continue
                way = np.linalg.solve(whole, pooled[c] - pooled[other])
                prior = math.log(raw[:, c].sum() / raw[:, other].sum())
                deviation = 2.0 * math.sqrt(max(1e-12, way @ test @ way))
                for s in range(self.sites):
                    gap = (own[s, c] - (pooled[c] + pooled[other]) / 2) @ way + prior
                    found[s, c] = min(found[s, c], norm.cdf(gap / deviation))
        return found


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sites=st.sampled_from([3, 5, 7, 9]),
    classes=st.integers(2, 4),
    lie=st.sampled_from([0.0, 2.0, 6.0]),
    power=st.sampled_from([1.0, 2.0]),
    shared=st.booleans(),
    wide=st.sampled_from([1.0, 9.0]),
    most=st.sampled_from([3, 60]),
)
@example(1, 3, 2, 6.0, 1.0, True, 1.0, 3)
@example(2, 5, 3, 6.0, 1.0, False, 9.0, 3)
@example(3, 3, 3, 2.0, 2.0, True, 1.0, 3)
def test_class_means_are_bounded_as_the_rules_say(
    seed: int,
    sites: int,
    classes: int,
    lie: float,
    power: float,
    shared: bool,
    wide: float,
    most: int,
) -> None:
    random = np.random.default_rng(seed)
    d = 5
    means = 3 * random.normal(size=(classes, d)) + 0.4 * random.normal(size=(sites, classes, d))
    counts = random.integers(1, most, (sites, classes)) * (random.random((sites, classes)) < 0.85)
    counts[0] = 40
    counts = counts.astype(float)
    means[0] += lie * random.normal(size=(classes, d))
    noise = 1 / np.maximum(counts, 1)
    means[counts == 0] = 0
    half = random.normal(size=(d, d))
    # Multiples of one matrix: then the median of each entry does not depend on the axes.
    sizes = random.uniform(0.5, 1.5, sites)
    sizes[0] *= wide
    covariances = sizes[:, None, None] * (half @ half.T / d + np.eye(d))
    own = torch.from_numpy(covariances)
    found = bounds(
        SiteClasses(
            *map(torch.from_numpy, (means, counts, noise)),
            power,
            None if shared else lambda directions: directions.T @ own @ directions,
        )
    )
    loops = Loops(means, counts, noise, power, None if shared else covariances)
    harm = loops.harm()
    np.testing.assert_allclose(found.harm.numpy(), harm, rtol=1e-6, atol=1e-9)
    kept = harm <= 0.01
    if not (abs(harm - 0.01) > 1e-9).all():
        return
    moves = np.where(kept[:, None, None], 0, loops.moves)
    np.testing.assert_allclose(found.moves.numpy(), moves, rtol=1e-6, atol=1e-9)
    scales = np.where(kept, 1, loops.scales())
    np.testing.assert_allclose(found.scales.numpy(), scales, rtol=1e-6)
    judged = ((counts > 0).sum(0) >= 3)[None] & ~kept[:, None]
    scores = np.where(judged, loops.scores, 0)
    np.testing.assert_allclose(found.scores.numpy(), scores, rtol=1e-6, atol=1e-12)
    for s in range(sites):
        for c in loops.known:
            apart = (means[s, c] - loops.centres) @ loops.lines
            nearest = min(loops.known, key=lambda other: float(apart[other] @ apart[other]))
            assert int(found.nearest[s, c]) == nearest


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
    found = bounded(points, noise)
    apart = rows - np.median(rows, 0)
    lengths = np.linalg.norm(apart, axis=1)
    limit = limit_of(lengths.tolist(), noise * (math.sqrt(12) + 6))
    kept = np.minimum(1, limit / lengths) if len(sizes) > 2 else np.ones(len(sizes))
    assert found.kept == pytest.approx(kept.tolist())
    for point, row, off, share in zip(found.points, rows, apart, kept, strict=True):
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
