"""Columns much smaller than others keep their weight in a head of discriminant analysis."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.statistics import Factored, Statistics


def records(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records (1200, 24) of four classes that the first column alone tells apart."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(1200) % 4
    features = torch.randn(1200, 24, generator=drawn).double()
    features[:, 0] += 2.6 * labels
    return features, labels


def statistics_of(features: Tensor, labels: Tensor) -> Statistics:
    """Of four classes."""
    means = torch.stack([features[labels == c].mean(0) for c in range(4)])
    apart = features - means[labels]
    counts = torch.bincount(labels).double()
    return Statistics(counts, means, apart.T @ apart / len(features))


def test_divided_columns_are_those_of_divided_records() -> None:
    features, labels = records()
    scales = torch.linspace(0.1, 10, 24).double()
    exact, moved = statistics_of(features / scales, labels), statistics_of(features, labels)
    assert torch.allclose(moved.divided(scales).matrix, exact.matrix)
    assert torch.allclose(moved.divided(scales).means, exact.means)
    thin = Factored(torch.ones(24, 2).double(), torch.ones(24).double())
    assert torch.allclose(thin.divided(scales).dense(), thin.dense() / scales / scales[:, None])
