"""The head from noisy sums by its formulas in plain numpy, over generated means, noise and sites:
the discriminant, least squares with errors in the means, and the covariance without its noise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums, fold
from fedsurrogate.common.surrogates.covariances import LowRank
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.fedpft.private_head import (
    _diagonal,
    _spiked,
    discriminant,
    least_squares,
    observed_within,
)
from fedsurrogate.strategies.pooling.class_means import Components

Array = NDArray[np.float64]
few = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 9999)
D = 4


def components_of(seed: int, labels: list[int], classes: int) -> Components:
    """Means with noise that they may share, as those of one site have."""
    draw = np.random.default_rng(seed)
    count = len(labels)
    roots = draw.normal(size=(count, count)) / 10
    records = draw.uniform(5, 50, count)
    return Components(
        tuple("abc"[:classes]),
        torch.tensor(labels),
        torch.from_numpy(draw.normal(size=(count, D))),
        torch.from_numpy(roots @ roots.T),
        torch.from_numpy(records),
        torch.from_numpy(records / records.sum()),
    )


def covariance_of(seed: int, rank: int) -> tuple[LowRank, Array]:
    draw = np.random.default_rng(seed + 1)
    factor, variances = draw.normal(size=(D, rank)), draw.uniform(0.2, 2, D)
    dense = factor @ factor.T + np.diag(variances)
    return LowRank(torch.from_numpy(factor), torch.from_numpy(variances)), dense


@few
@given(SEEDS, st.integers(1, 3), st.integers(0, 2))
def test_the_discriminant_takes_the_noise_off_the_lengths_of_means(
    seed: int, classes: int, rank: int
) -> None:
    found = components_of(seed, list(range(classes)), classes)
    covariance, dense = covariance_of(seed, rank)
    inverse, means = np.linalg.inv(dense), found.means.numpy()
    solved = discriminant(found, covariance)
    weight, bias = solved.weight, solved.bias
    np.testing.assert_allclose(weight, means @ inverse, rtol=1e-8, atol=1e-10)
    whole = float(found.records.sum())
    for c in range(classes):
        length = means[c] @ inverse @ means[c] - float(found.noise[c, c]) * inverse.trace()
        assert float(bias[c]) == pytest.approx(
            math.log(float(found.records[c]) / whole) - length / 2
        )


@few
@given(SEEDS, st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 2))
def test_least_squares_are_those_of_records_around_means_with_errors(
    seed: int, labels: list[int], rank: int
) -> None:
    found = components_of(seed, labels, 3)
    covariance, dense = covariance_of(seed, rank)
    inverse, means = np.linalg.inv(dense), found.means.numpy()
    count, shares = len(labels), (found.records / found.records.sum()).numpy()
    moments, wanted = np.zeros((count + 1, count + 1)), np.zeros((count + 1, 3))
    for j, label in enumerate(labels):
        row = np.array(
            [means[i] @ inverse @ means[j] - float(found.noise[i, j]) * inverse.trace() for i in range(count)]
            + [1.0]
        )  # fmt: skip
        moments += shares[j] * np.outer(row, row)
        wanted[:, label] += shares[j] * row
    directions = means @ inverse
    moments[:count, :count] += directions @ dense @ directions.T
    moments += 1e-6 * moments.trace() / (count + 1) * np.eye(count + 1)
    solved = np.linalg.solve(moments, wanted)
    ours = least_squares(found, covariance)
    weight, bias = ours.weight, ours.bias
    np.testing.assert_allclose(weight, solved[:count].T @ directions, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(bias, solved[count], rtol=1e-5, atol=1e-7)


def dense_of(found: LowRank) -> Array:
    return (found.factor @ found.factor.T + found.variances.diag()).numpy()


@few
@given(SEEDS, st.sampled_from([0.01, 0.1, 0.5]), st.none() | st.integers(0, D), st.booleans())
def test_eigenvalues_above_the_noise_move_towards_their_centre_and_the_others_into_it(
    seed: int, noise: float, rank: int | None, negative: bool
) -> None:
    draw = np.random.default_rng(seed)
    values = np.sort(draw.normal(size=D) * 3 + (0 if negative else 6))
    vectors, _ = np.linalg.qr(draw.normal(size=(D, D)))
    matrix = vectors * values @ vectors.T
    radius, middle = noise * math.sqrt(2 * D), values[(D - 1) // 2]
    spikes = []
    for place, value in enumerate(values):
        away = value - middle
        moved = math.copysign(math.sqrt(away**2 - radius**2), away) if abs(away) > radius else 0.0
        if rank is not None and (moved < 0 or place < D - rank):
            moved = 0.0
        spikes.append(moved)
    trace = max(values.sum(), 1e-12)
    centre = (trace - sum(spikes)) / D
    least = max(min(centre, radius), 1e-3 * trace / D)
    kept = np.array([max(centre + spike, least) for spike in spikes])
    found = _spiked(torch.from_numpy((matrix + matrix.T) / 2), noise, rank)
    np.testing.assert_allclose(dense_of(found), vectors * kept @ vectors.T, rtol=1e-6, atol=1e-8)
    assert found.factor.shape[1] == int((kept > kept.min() + 1e-12).sum()) or negative


@few
@given(
    SEEDS, st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.5, 3.0]), st.sampled_from([-1.0, 1.0])
)
def test_variances_are_drawn_to_their_mean_by_the_share_of_their_spread_that_is_noise(
    seed: int, count: int, noise: float, middle: float
) -> None:
    variances = middle + np.random.default_rng(seed).normal(size=count) * 0.5
    mean = max(float(variances.mean()), 0.0) or 1.0
    spread = float(((variances - mean) ** 2).sum())
    kept = max(0.0, 1 - max(0, count - 3) * noise**2 / (spread or 1.0))
    wanted = np.maximum(mean + kept * (variances - mean), 0.1 * mean)
    found = _diagonal(torch.from_numpy(variances), noise)
    np.testing.assert_allclose(found.variances, wanted)
    assert found.factor.shape == (count, 0)
    assert _diagonal(torch.ones(count).double(), noise).variances.tolist() == [1.0] * count


@st.composite
def sites(draw: st.DrawFn) -> list[SumsSurrogate]:
    family = draw(st.sampled_from(["diag", "full"]))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    found = []
    for number in range(draw(st.integers(1, 4))):
        sigmas = {
            "counts": draw(st.sampled_from([0.5, 2.0])),
            "sums": 1.0,
            "squares": 1e-3,
        }
        size = draw(st.sampled_from([0.0, 3.0, 40.0]))
        counts = size * torch.rand(2, generator=generator) - 0.3
        rows = torch.randn(30, D, generator=generator) / 2
        second = rows.T @ rows / 30
        own = second.diagonal() if family == "diag" else fold(second)
        claim = NoisySums("sums", 1.0, 1e-5, {"counts": 0.5, "sums": 0.5}).mechanism()
        sums = Sums(counts, torch.randn(2, D, generator=generator), own * max(size, 1), sigmas)
        header = Header("fedpft", "r", f"s{number}", "f", ("a", "b"))
        found.append(SumsSurrogate(header, sums, claim))
    return found


@few
@given(sites(), SEEDS, st.integers(0, 2))
def test_the_covariance_within_is_the_second_moment_less_means_and_noise(
    surrogates: list[SumsSurrogate], seed: int, rank: int
) -> None:
    found = components_of(seed, [0, 1], 2)
    means, shares = found.means.numpy() / 3, found.shares.numpy()
    found = Components(
        found.classes,
        found.labels,
        torch.from_numpy(means),
        found.noise,
        found.records,
        found.shares,
    )
    tables = [each.sums.squares for each in surrogates]
    assert all(table is not None for table in tables)
    width = len(tables[0])  # type: ignore[arg-type]
    sizes = [float(each.sums.counts.double().clamp_min(0).sum()) for each in surrogates]
    if not sum(sizes):
        return
    sigmas = [each.sums.sigmas["squares"] for each in surrogates]
    # Of a site with n records, the mean of its second moment has the weight n.
    whole = sum(size**2 for size in sizes)
    second = sum(
        size / whole * table.double().numpy() for size, table in zip(sizes, tables, strict=True)
    )  # type: ignore[union-attr]
    noise = math.sqrt(sum((a * b) ** 2 for a, b in zip(sizes, sigmas, strict=True))) / whole
    excess = sum(share * float(found.noise[c, c]) for c, share in enumerate(shares))
    if width == D:
        between = sum(share * mean**2 for share, mean in zip(shares, means, strict=True))
        wanted = _diagonal(torch.from_numpy(second - between + excess), noise)
        got = observed_within(surrogates, found, "diag", rank)[0]
    else:
        between = sum(
            share * np.outer(mean, mean) for share, mean in zip(shares, means, strict=True)
        )
        matrix = np.zeros((D, D))
        for value, (i, j) in zip(second, zip(*np.triu_indices(D), strict=True), strict=True):
            matrix[i, j] = matrix[j, i] = value / (1.0 if i == j else math.sqrt(2))
        exact = torch.from_numpy(matrix - between + excess * np.eye(D))
        wanted = _spiked(exact, noise, rank)
        got = observed_within(surrogates, found, "lowrank", rank)[0]
        full = observed_within(surrogates, found, "full", rank)[0]
        np.testing.assert_allclose(dense_of(full), dense_of(_spiked(exact, noise, None)), atol=1e-5)
    np.testing.assert_allclose(dense_of(got), dense_of(wanted), rtol=1e-4, atol=1e-5)
    # Without a second moment, or with one variance: what the lengths of the means leave of one.
    explained = sum(
        share * (float(mean @ mean) - D * float(found.noise[c, c]))
        for c, (share, mean) in enumerate(zip(shares, means, strict=True))
    )
    plain = observed_within(surrogates, found, "spherical", rank)[0]
    assert plain.variances.tolist() == pytest.approx([max(1 - explained, 1e-3) / D] * D)
