"""DP-EM and the published mechanism of FedPFT, written out in loops over records, with noise that is
known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.client_app.methods.fedpft import surrogate as private_surrogate
from fedsurrogate.client_app.methods.fedpft.surrogate import (
    Clipped,
    dp_em,
    less,
    noisy_sums,
)
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import parse_run

Array = NDArray[np.float64]
CLASSES, D = 3, 4


def claim(family: str = "spherical") -> Mechanism:
    flat = {"epsilon": 5.0, "delta": 1e-5, "fedpft.covariance": family}
    found = parse_run(flat | ({"fedpft.components": 2} if family == "spherical" else {})).mechanism
    assert found is not None
    return found


class Added:
    """In the place of the noise: numbers that follow from the step, and a deviation that is given."""

    def __init__(self, sigma: float, seed: int) -> None:
        self.sigma, self.draw = sigma, np.random.default_rng(seed)
        self.sums: list[Array] = []

    def number(self, shape: Sequence[int]) -> Array:
        return 0.5 * self.sigma * self.draw.normal(size=shape)

    def __call__(self, given: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
        released = []
        for each in given:
            exact = each.value.double().numpy()
            self.sums.append(exact)
            value = torch.from_numpy(exact + self.number(exact.shape))
            sigma = self.sigma * (1 if each.name == "counts" else 0.1)
            released.append(Noisy(each.name, value, sigma, 1.0))
        return released


def responsibilities(x: Array, label: int, means: Array, sizes: Array, variances: Array) -> Array:
    """Shares of one record in the components of its class, by the density of each."""
    distances = ((x - means[label]) ** 2).sum(1) / variances[label]
    logs = np.log(sizes[label]) - distances / 2
    odds = np.exp(logs - logs.max())
    found: Array = odds / odds.sum()
    return found


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=CLASSES, max_size=CLASSES),
    components=st.integers(1, 3),
    sigma=st.sampled_from([1e-6, 0.5, 2.0, 40.0]),
    units=st.booleans(),
    seed=st.integers(0, 999),
)
def test_dp_em_is_em_on_noisy_sums_step_by_step(
    sizes: list[int], components: int, sigma: float, units: bool, seed: int
) -> None:
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(sizes))
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randn(len(labels), D, generator=draw) + 2 * torch.eye(CLASSES, D)[labels]
    patients = [str(row // 3) for row in range(len(labels))] if units else None
    data = Clipped.of(raw, labels, patients)
    added, again = Added(sigma, seed), np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_surrogate, "with_noise", added)
        found, facts = dp_em(data, CLASSES, components, claim(), torch.Generator().manual_seed(5))
    x, w = data.features.double().numpy(), data.weights.double().numpy()
    means, counts = np.zeros((CLASSES, 1, D)), np.ones((CLASSES, 1))
    variances, shares = np.ones(CLASSES), np.zeros((CLASSES, components))
    for step in range(4):
        k = means.shape[1]
        expected, sums = np.zeros((CLASSES, k)), np.zeros((CLASSES, k, D))
        for own, label, weight in zip(x, labels.tolist(), w, strict=True):
            part = weight * responsibilities(own, label, means, counts, variances)
            expected[label] += part
            sums[label] += part[:, None] * own
        np.testing.assert_allclose(added.sums[2 * step], expected.ravel(), atol=1e-3)
        np.testing.assert_allclose(added.sums[2 * step + 1], sums.reshape(-1, D), atol=1e-3)
        # Go on from what was released, so that rounding does not add up.
        exact, exact_sums = added.sums[2 * step], added.sums[2 * step + 1]
        noisy = (exact + 0.5 * sigma * again.normal(size=exact.shape)).reshape(CLASSES, k)
        drawn = 0.5 * sigma * again.normal(size=exact_sums.shape)
        noisy_sums_ = (exact_sums + drawn).reshape(CLASSES, k, D)
        counts = np.maximum(noisy, 1.0)
        for c in range(CLASSES):
            energy, kept = np.zeros(k), noisy[c] > 2 * sigma
            for j in range(k):
                mean = noisy_sums_[c, j] / counts[c, j]
                energy[j] = np.clip((mean**2).sum() - D * (0.1 * sigma / counts[c, j]) ** 2, 0, 1)
                if kept[j] or step == 0:
                    means[c, j] = mean
            parts = np.where(kept, counts[c], 0.0)
            parts = parts / max(parts.sum(), 1e-12)
            shares[c, :k] = parts
            variances[c] = max((1 - (parts * energy).sum()) / D, 1e-8)
        if step == 0:
            around = torch.randn(
                CLASSES,
                components,
                D,
                generator=torch.Generator().manual_seed(5),
                dtype=torch.float64,
            )
            means = means + np.sqrt(variances)[:, None, None] * around.numpy()
            counts = np.repeat(counts / components, components, 1)
    stays = shares > 0
    if not stays.any():
        stays = noisy == noisy.max()
        shares = stays.astype(float)
    totals = [round(sum(own[kept])) for own, kept in zip(counts, stays, strict=True)]
    assert found.counts.tolist() == totals
    assert found.labels.tolist() == np.nonzero(stays)[0].tolist()
    np.testing.assert_allclose(found.weights, shares[stays], rtol=1e-5)
    np.testing.assert_allclose(found.means, means[stays], rtol=1e-4, atol=1e-4)
    spread: Any = found.covariance
    np.testing.assert_allclose(spread.variances, variances[np.nonzero(stays)[0]], rtol=1e-3)
    assert facts["clip-fraction"] == data.clip_fraction
    assert set(facts) == {"clip-fraction", "signal-to-noise-counts", "signal-to-noise-sums"}


@settings(max_examples=20, deadline=None)
@given(
    family=st.sampled_from(["spherical", "diag", "full"]),
    count=st.integers(1, 9),
    norm=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_noisy_sums_are_those_of_clipped_records_less_the_centre_weighted_by_patient(
    family: str, count: int, norm: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    raw, labels = (
        torch.randn(count, D, generator=draw),
        torch.randint(0, 2, (count,), generator=draw),
    )
    centre = torch.randn(D, generator=draw)
    patients = [str(each) for each in torch.randint(0, 3, (count,), generator=draw).tolist()]
    data = Clipped.of(raw, labels, patients, norm, less(centre))
    moved = raw.double().numpy() - centre.double().numpy()
    lengths = np.linalg.norm(moved, axis=1)
    x = moved / np.maximum(lengths, norm)[:, None]
    np.testing.assert_allclose(data.features, x, rtol=1e-4, atol=1e-5)
    assert data.clip_fraction == pytest.approx((lengths > norm).mean())
    w = [1 / patients.count(each) for each in patients]
    np.testing.assert_allclose(data.weights, w, rtol=1e-6)
    assert not data.mapped
    added, again = Added(0.3, seed), np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_surrogate, "with_noise", added)
        found, facts = noisy_sums(data, CLASSES, family, claim(family))
    counts, sums, squares = np.zeros(CLASSES), np.zeros((CLASSES, D)), np.zeros((D, D))
    for own, label, weight in zip(x, labels.tolist(), w, strict=True):
        counts[label] += weight
        sums[label] += weight * own
        squares += weight * np.outer(own, own)
    noise = [0.15 * again.normal(size=each.shape) for each in added.sums]
    np.testing.assert_allclose(found.counts, counts + noise[0], atol=1e-3)
    np.testing.assert_allclose(found.sums, sums + noise[1], atol=1e-3)
    assert (found.squares is None) == (family == "spherical")
    if family == "diag":
        np.testing.assert_allclose(added.sums[2], squares.diagonal(), atol=1e-3)
    wanted = {"clip-fraction", "signal-to-noise-counts", "signal-to-noise-sums"}
    assert set(facts) - wanted == (set() if family == "spherical" else {"signal-to-noise-squares"})
    assert math.isfinite(sum(facts.values()))


def test_less_of_nothing_changes_nothing() -> None:
    x = torch.randn(3, D)
    assert less(None)(x) is x
