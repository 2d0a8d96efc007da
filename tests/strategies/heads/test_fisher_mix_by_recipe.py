"""FisherMix by its published recipe, step by step, over generated classes; and how many directions
its subspace keeps.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import eigh
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.heads.gaussian_heads import fisher_mix, fisher_subspace

# The published numbers.
SCALE, SAMPLES, EPOCHS, BATCH, RATE, DECAY = 0.75, 10_000, 80, 2048, 8e-4, 3e-4


def statistics_of(seed: int, classes: int, d: int, absent: bool) -> Statistics:
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 40, classes).astype(float)
    if absent:
        counts[-1] = 0.0
    root = draw.normal(size=(d, d))
    means = 2 * draw.normal(size=(classes, d)) * (counts > 0)[:, None]
    covariance = root @ root.T / d + 0.1 * np.eye(d)
    return Statistics(
        torch.from_numpy(counts), torch.from_numpy(means), torch.from_numpy(covariance)
    )


def by_recipe(statistics: Statistics, seed: int, most: int) -> tuple[Tensor, Tensor]:
    """Weight and bias, with AdamW of PyTorch and without any function of the head."""
    counts, classes = statistics.counts, len(statistics.counts)
    within = statistics.matrix * (counts.sum() / (counts.sum() - classes).clamp_min(1))
    basis, _ = fisher_subspace(statistics, within)
    spread = basis.T @ within @ basis + 1e-6 * torch.eye(basis.shape[1]).double()
    factor = SCALE * torch.linalg.cholesky(spread)
    own = [c for c in range(classes) if counts[c] > 0]
    each = max(1, min(SAMPLES, most // len(own)))
    labels = torch.tensor([c for c in own for _ in range(each)])
    generator = stream(seed, "", "fishermix")
    noise = torch.randn(len(labels), len(factor), generator=generator, dtype=torch.float64)
    features = ((statistics.means @ basis)[labels] + noise @ factor.T).float()
    head = torch.nn.Linear(len(factor), classes)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimiser = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(labels), BATCH):
            rows = order[start : start + BATCH]
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(head(features[rows]), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    bias = torch.where(counts > 0, head.bias.detach(), torch.tensor(-1e4))
    return (head.weight.detach().double() @ basis.T).float(), bias


def check(statistics: Statistics, seed: int, most: int) -> None:
    header = Header("gh-ofl", "r", "coordinator", "f", tuple("abcdef")[: len(statistics.counts)])
    head, facts = fisher_mix(statistics, header, seed, most)
    weight, bias = by_recipe(statistics, seed, most)
    assert isinstance(head, Head)
    assert head.header is header
    assert facts == {}
    torch.testing.assert_close(head.weight, weight, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(head.bias, bias, rtol=1e-3, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(
    st.integers(0, 9999),
    st.integers(2, 5),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from([0, 7, 90]),
)
def test_the_head_is_that_of_the_recipe(
    seed: int, classes: int, d: int, absent: bool, most: int
) -> None:
    check(statistics_of(seed, classes, d, absent), seed, most)


def test_no_class_has_more_samples_than_the_recipe_gives_it() -> None:
    check(statistics_of(3, 2, 2, False), 5, 10**6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 6), st.integers(1, 8), st.floats(0.0, 1.0))
def test_the_subspace_has_the_fewest_directions_with_nearly_all_of_the_separation(
    seed: int, classes: int, d: int, weaker: float
) -> None:
    """Generalised eigenvalues by scipy; at least two directions, if there are two."""
    plain = statistics_of(seed, classes, d, False)
    # The separation falls from one direction to the next.
    means = plain.means * weaker ** torch.arange(d)
    statistics = Statistics(plain.counts, means, plain.covariance)
    within = statistics.matrix
    shrunk = 0.95 * within.numpy() + (0.05 * float(within.trace()) / d + 1e-6) * np.eye(d)
    between = statistics.between().numpy()
    values = eigh(between.T @ between, shrunk, eigvals_only=True)[::-1].clip(0)
    basis, added = fisher_subspace(statistics, within)
    reached = values.cumsum() / max(values.sum(), 1e-300)
    if abs(reached - 0.99).min() > 1e-9 and values.sum() > 1e-9:
        wanted = min(max(2, int((reached < 0.99).sum()) + 1), classes, d)
        assert basis.shape == (d, wanted)
    assert not added
    np.testing.assert_allclose(
        basis.numpy().T @ shrunk @ basis.numpy(), np.eye(basis.shape[1]), atol=1e-7
    )


@pytest.mark.parametrize(("classes", "kept"), [(120, 119), (132, 128)])
def test_the_subspace_has_at_most_128_directions(classes: int, kept: int) -> None:
    """Classes that are all equally far from each other need one direction less than classes."""
    identity = torch.eye(classes, dtype=torch.float64)
    statistics = Statistics(torch.ones(classes).double(), identity, identity)
    found = fisher_subspace(statistics, identity)[0].shape[1]
    assert found == min(kept, int(np.ceil(0.99 * (classes - 1))))
