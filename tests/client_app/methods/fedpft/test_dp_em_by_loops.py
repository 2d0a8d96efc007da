"""DP-EM against loops in numpy: what each step sums, what noisy sums become, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax

from fedsurrogate.client_app.methods.fedpft import surrogate as private_surrogate
from fedsurrogate.client_app.methods.fedpft.surrogate import Clipped, dp_em
from fedsurrogate.common.privacy.exact_sums import COARSE
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.covariances import Spherical
from tests.client_app.methods.fedpft.test_private_surrogate import MECHANISMS, promised, run

Array = NDArray[np.float64]
C, D, STEPS = 3, 3, 4
COUNTS, SUMS = 1.5, 0.4


class Given:
    """In place of `with_noise`: sums that a generator draws around a level, and what was summed."""

    def __init__(self, seed: int, level: float) -> None:
        self.draw, self.level = np.random.default_rng(seed), level
        self.seen: list[tuple[Array, Array]] = []
        self.sent: list[tuple[Array, Array]] = []

    def __call__(self, statistics: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
        counts, sums = (each.value.numpy() for each in statistics)
        assert [each.bound for each in statistics] == [1.0, 1.0]
        self.seen.append((counts, sums))
        self.sent.append(
            (
                self.level + 2 * self.draw.normal(size=counts.shape),
                self.level / 2 * self.draw.normal(size=sums.shape),
            )
        )
        return [
            Noisy("counts", torch.from_numpy(self.sent[-1][0]), COUNTS, 1.0),
            Noisy("sums", torch.from_numpy(self.sent[-1][1]), SUMS, 1.0),
        ]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 3), st.sampled_from([-6.0, 0.0, 3.0, 30.0]))
@example(1, 2, -6.0)
@example(2, 2, 3.0)
@example(3, 2, 30.0)
def test_every_step_and_what_is_kept_are_those_of_loops(seed: int, k: int, level: float) -> None:
    draw = np.random.default_rng(seed)
    x = 0.5 * draw.normal(size=(12, D))
    x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    y, w = draw.integers(0, C - 1, 12), draw.choice([1.0, 0.25], 12)
    data = Clipped(*map(torch.from_numpy, (x, y, w)), 0.125)
    claim, given_sums = promised(run(**MECHANISMS["dp-em"])), Given(seed, level)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_surrogate, "with_noise", given_sums)
        found, facts = dp_em(data, C, k, claim, torch.Generator().manual_seed(seed))
    directions = torch.randn(
        C, k, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).numpy()
    assert len(given_sums.sent) == STEPS
    means: list[list[Array]] = [[np.zeros(D)] for _ in range(C)]
    sizes, variances = [[1.0] for _ in range(C)], [1.0] * C
    parts: list[list[float]] = []
    for step in range(STEPS):
        many = len(sizes[0])
        counted, summed = np.zeros((C, many)), np.zeros((C, many, D))
        for row, label, weight in zip(x, y, w, strict=True):
            scores = [
                math.log(size) - float((row - mean) @ (row - mean)) / (2 * variances[label])
                for size, mean in zip(sizes[label], means[label], strict=True)
            ]
            shares = weight * softmax(scores)
            counted[label] += shares
            summed[label] += np.outer(shares, row)
        # In double precision, but for the products, whose factors are on a grid.
        most = {"rtol": 1e-12, "atol": len(x) * 2 * COARSE}
        np.testing.assert_allclose(given_sums.seen[step][0].reshape(C, many), counted, **most)
        np.testing.assert_allclose(given_sums.seen[step][1].reshape(C, many, D), summed, **most)
        raw = given_sums.sent[step][0].reshape(C, many)
        noisy = given_sums.sent[step][1].reshape(C, many, D)
        parts = []
        for label in range(C):
            sizes[label] = [max(1.0, each) for each in raw[label]]
            trusted = [each > 2 * COUNTS for each in raw[label]]
            total = sum(size for size, good in zip(sizes[label], trusted, strict=True) if good)
            parts.append(
                [
                    size / total if good else 0.0
                    for size, good in zip(sizes[label], trusted, strict=True)
                ]
            )
            energy = 0.0
            for at, size in enumerate(sizes[label]):
                mean = noisy[label, at] / size
                energy += parts[label][at] * min(1, max(0, mean @ mean - D * (SUMS / size) ** 2))
                if trusted[at] or step == 0:
                    means[label][at] = mean
            variances[label] = max(1e-8, (1 - energy) / D)
            if step == 0:
                spread = math.sqrt(variances[label])
                means[label] = [means[label][0] + spread * each for each in directions[label]]
                sizes[label] = sizes[label] * k
    kept = [(c, at) for c in range(C) for at in range(k) if parts[c][at] > 0]
    raw = given_sums.sent[-1][0].reshape(C, k)
    if not kept:
        kept = [divmod(int(raw.argmax()), k)]
        parts[kept[0][0]][kept[0][1]] = 1.0
    assert found.labels.tolist() == [c for c, _ in kept]
    assert found.weights.tolist() == pytest.approx([parts[c][at] for c, at in kept], rel=1e-6)
    np.testing.assert_allclose(found.means, [means[c][at] for c, at in kept], rtol=1e-5, atol=1e-6)
    assert isinstance(found.covariance, Spherical)
    sent = (found.weights, found.means, found.covariance.variances)
    assert {each.dtype for each in sent} == {torch.float32}
    assert found.covariance.variances.tolist() == pytest.approx(
        [variances[c] for c, _ in kept], rel=1e-5
    )
    assert found.counts.tolist() == [
        round(sum(max(1.0, raw[c, at]) for d, at in kept if d == c)) for c in range(C)
    ]
    assert facts == {
        "clip-fraction": 0.125,
        **{
            f"signal-to-noise-{name}": pytest.approx(
                math.sqrt(max(0.0, float(np.mean(sent**2)) / sigma**2 - 1))
            )
            for name, sent, sigma in (
                ("counts", given_sums.sent[-1][0], COUNTS),
                ("sums", given_sums.sent[-1][1], SUMS),
            )
        },
    }
