"""DP-EM and the published mechanism of FedPFT, written out in loops over records, with noise that is
known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.client_app.methods.fedpft import surrogate as private_surrogate
from fedsurrogate.client_app.methods.fedpft.surrogate import (
    Clipped,
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
