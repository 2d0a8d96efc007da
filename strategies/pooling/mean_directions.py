"""Noisy class means, shrunk by the part of their differences that is chance: along the own mean of
features, and across it.

Where classes differ in their level alone, one direction tells them apart, and all others hold noise
that a head would give as much weight as it is large. What the own mean says is known to be one
direction (`common/privacy/own_mean.py`), so both parts are judged alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsurrogate.strategies.pooling.class_means import Components, within


def shrink_directions(pooled: Components) -> tuple[Components, tuple[float, float]]:
    """Class means whose differences along and across the own mean are shrunk, each by as much as
    chance explains. Chance includes privacy noise and sampling error.

    Args:
        pooled: one per class, as from `pool`.

    Returns:
        The means and their noise; as they were where chance explains all differences. And the
        shares of the differences along and across that chance does not explain, from 0 to 1.

    Source: James & Stein 1961, for two blocks of dimensions.
    """
    means, d = pooled.means, pooled.means.shape[1]
    shares = pooled.records / pooled.records.sum()
    apart = torch.eye(len(shares), dtype=means.dtype) - shares
    differences = apart @ means
    along = differences.mean(1, keepdim=True).expand_as(differences)
    across = differences - along
    sampling = (within(pooled) / d / pooled.records).diag()
    chance = float(shares @ (apart @ (pooled.noise + sampling) @ apart.T).diagonal())
    kept = [
        max(0.0, 1 - size * chance / seen) if seen > 0 else 0.0
        for size, seen in (
            (1, float(shares @ along.square().sum(1))),
            (d - 1, float(shares @ across.square().sum(1))),
        )
    ]
    first, second = kept
    if not any(kept):
        return pooled, (0.0, 0.0)
    shrunk = means - differences + first * along + second * across
    # On average over all dimensions, as noise is stated.
    noise = pooled.noise * (first**2 + (d - 1) * second**2) / d
    return replace(pooled, means=shrunk, noise=noise), (first, second)
