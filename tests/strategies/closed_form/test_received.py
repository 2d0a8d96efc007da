"""Statistics from what sites send, whatever their kind, are those of the same Gaussians or records
in numpy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Gram, Spherical, StoredGram
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.closed_form.statistics import (
    of_mixtures,
    of_noisy_sums,
    outline,
    outline_of_mixtures,
    pooled,
    pooled_by_class,
)
from tests.examples import statistics_of

CLASSES, D = ("a", "b", "c", "d"), 3
OWNED = st.permutations(CLASSES).flatmap(
    lambda names: st.integers(1, 4).map(lambda count: tuple(names[:count]))
)


def surrogate(family: str, names: tuple[str, ...], seed: int, most: int) -> Surrogate:
    """Classes in any order, each with one to `most` components."""
    generator = torch.Generator().manual_seed(seed)
    components = torch.randint(1, most + 1, (len(names),), generator=generator)
    labels = torch.arange(len(names)).repeat_interleave(components)
    raw = torch.rand(len(labels), generator=generator) + 0.1
    weights = raw / torch.zeros(len(names)).index_add_(0, labels, raw)[labels]
    roots = torch.randn(len(labels), D, D, generator=generator)
    spread = torch.rand(len(labels), D, generator=generator) + 0.1
    covariance: Any = {
        "full": lambda: Full(torch.linalg.cholesky(roots @ roots.mT + torch.eye(D))),
        "diag": lambda: Diagonal(spread),
        "spherical": lambda: Spherical(spread[:, 0]),
        "gram": lambda: Gram(roots[0] @ roots[0].mT + torch.eye(D)),
    }[family]()
    counts = torch.randint(1, 90, (len(names),), generator=generator)
    means = 3 * torch.randn(len(labels), D, generator=generator)
    header = Header("fedpft", "r", f"s{seed}", "f", names)
    return Surrogate(header, Mixtures(counts, labels, weights, means, covariance))


def moments(sent: list[Surrogate], name: str) -> tuple[float, Any, Any]:
    """Records, mean and second moment around zero of a class at all sites."""
    total, first, second = 0.0, np.zeros(D), np.zeros((D, D))
    for each in sent:
        table, spread = each.mixtures, each.mixtures.covariance
        for m, label in enumerate(table.labels.tolist()):
            if each.header.classes[label] != name:
                continue
            records = float(table.counts[label] * table.weights[m])
            mean = table.means[m].double().numpy()
            if isinstance(spread, Full):
                inside = (spread.cholesky[m] @ spread.cholesky[m].T).double().numpy()
            else:
                inside = np.diag(spread.variances_per_dimension()[m].double().expand(D).numpy())
            total += records
            first += records * mean
            second += records * (inside + np.outer(mean, mean))
    return total, first / max(total, 1e-300), second / max(total, 1e-300)


@settings(max_examples=30)
@given(
    st.sampled_from(["full", "diag", "spherical"]),
    st.lists(OWNED, min_size=1, max_size=3),
    st.integers(0, 10**4),
    st.integers(1, 3),
)
def test_mixtures_have_the_moments_of_their_components(
    family: str, owned: list[tuple[str, ...]], seed: int, most: int
) -> None:
    sent = [surrogate(family, names, seed + k, most) for k, names in enumerate(owned)]
    found = pooled(sent, CLASSES)
    parts = list(pooled_by_class(sent, CLASSES))
    within, records = np.zeros((D, D)), 0.0
    for row, name in enumerate(CLASSES):
        total, mean, second = moments(sent, name)
        covariance = second - np.outer(mean, mean)
        within, records = within + total * covariance, records + total
        assert float(found.counts[row]) == pytest.approx(total, rel=1e-5)
        assert float(parts[row].counts[0]) == pytest.approx(total, rel=1e-5)
        if not total:
            continue
        np.testing.assert_allclose(found.means[row], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(parts[row].means[0], mean, rtol=1e-4, atol=1e-5)
        alone = np.asarray(parts[row].matrix)
        if family == "full":
            np.testing.assert_allclose(alone, covariance, rtol=1e-3, atol=1e-3)
        else:  # Of one class, only variances are kept.
            np.testing.assert_allclose(alone, np.diag(covariance.diagonal()), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.matrix, within / records, rtol=1e-3, atol=1e-3)
    # One site alone, without its whole matrix.
    one = of_mixtures(sent[0], CLASSES)
    assert float(one.counts.sum()) == pytest.approx(float(sent[0].mixtures.counts.sum()), rel=1e-5)


@settings(max_examples=30)
@given(
    st.sampled_from(["full", "diag", "spherical", "gram"]),
    OWNED,
    st.integers(0, 10**4),
    st.integers(1, 3),
    st.floats(0.1, 1),
)
def test_an_outline_is_that_of_the_whole_statistics_and_reads_no_stored_covariance(
    family: str, names: tuple[str, ...], seed: int, most: int, share: float
) -> None:
    sent = surrogate(family, names, seed, 1 if family == "gram" else most)
    whole, reads, held = outline(of_mixtures(sent, CLASSES)), list[None](), sent.mixtures.covariance
    if isinstance(held, Gram):
        matrix = held.matrix
        read = StoredGram(
            lambda: reads.append(None) or matrix, held.variances_per_dimension()
        ).scaled(share)
        sent = replace(sent, mixtures=replace(sent.mixtures, covariance=read))
        whole = (*whole[:2], whole[2] * share**2)
    for found, expected in zip(outline_of_mixtures(sent, CLASSES), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert not reads


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(0, 10**4), st.floats(0, 9))
def test_sums_for_noise_without_noise_are_the_statistics_of_the_records(
    count: int, seed: int, below: float
) -> None:
    """A class without records, whose noisy count may be below zero, changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, D, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1)
    labels = torch.randint(0, 3, (count,), generator=generator)
    exact = statistics_of(x, labels, 4)
    tensors: dict[str, Tensor] = {
        "counts": exact.counts - below * (exact.counts == 0),
        "sums": exact.counts[:, None] * exact.means,
    }
    found = of_noisy_sums(tensors)
    torch.testing.assert_close(found.counts, exact.counts)
    torch.testing.assert_close(found.means, exact.means)
    assert not found.matrix.any(), "no second moment was sent"
