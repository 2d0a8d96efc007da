"""Robust centres (median, trimmed mean, geometric median) of points with site weights. No Flower
types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# The share of the weight that a trimmed mean removes at each end, and so the share of hostile sites
# that it tolerates.
TRIM = 0.2
STEPS = 30
# The defence rules that pool points. The other rules exclude sites, or do nothing.
POOLED = ("median", "trimmed")


def robust_mean(points: Tensor, weights: Tensor, rule: str) -> Tensor:
    """Centre of weighted points by a rule.

    Args:
        points: (n, ...).
        weights: of the points, (n,), zero or more.
        rule: "median" or "trimmed"; any other gives the weighted mean.

    Returns:
        (...).

    Example:
        >>> points, weights = torch.tensor([[0.0], [1.0], [1.0], [1000.0]]), torch.ones(4)
        >>> robust_mean(points, weights, "median").tolist()
        [1.0]
        >>> robust_mean(points, weights, "none").tolist()
        [250.5]
    """
    if rule == "median":
        return coordinate_median(points, weights)
    if rule == "trimmed":
        return trimmed_mean(points, weights)
    mean: Tensor = torch.tensordot(_shares(weights), points.double(), 1)
    return mean


def robust_tensors(tables: Sequence[Mapping[str, Tensor]], rule: str) -> dict[str, Tensor]:
    """Pool tables of tensors name by name. Each site has one vote, because a site could report a
    false number of records.

    Args:
        tables: one for each site, with the same names and shapes.
        rule: as in `robust_mean`.

    Returns:
        The centre of every tensor, float32.
    """
    votes = torch.ones(len(tables), dtype=torch.float64)
    return {
        name: robust_mean(torch.stack([table[name] for table in tables]), votes, rule).float()
        for name in tables[0]
    }


def coordinate_median(points: Tensor, weights: Tensor) -> Tensor:
    """Weighted median of every coordinate: the mean of the lower and the upper weighted median.

    At most half of the weight may be hostile.

    Args:
        points: (n, ...).
        weights: of the points, (n,).

    Returns:
        (...).

    Source: Yin et al. 2018, definition 1.

    Example:
        >>> coordinate_median(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 1.0, 3.0])).item()
        9.0
        >>> coordinate_median(torch.tensor([1.0, 2.0]), torch.ones(2)).item()
        1.5
    """
    values, order = points.sort(dim=0)
    share = _shares(weights)[order]
    below = share.cumsum(0)
    half = 0.5 * (1 - 1e-9)
    lower = (below < half).sum(0, keepdim=True).clamp_max(len(points) - 1)
    upper = (below <= 1 - half).sum(0, keepdim=True).clamp_max(len(points) - 1)
    return ((values.gather(0, lower) + values.gather(0, upper)) / 2)[0]


def trimmed_mean(points: Tensor, weights: Tensor, trim: float = TRIM) -> Tensor:
    """Weighted mean of every coordinate without a share of the weight at each end.

    Args:
        points: (n, ...).
        weights: of the points, (n,).
        trim: the share that is removed at each end.

    Returns:
        (...), float64.

    Source: Yin et al. 2018, definition 2, extended to unequal weights: a point at the cut counts in
        part.
    """
    values, order = points.sort(dim=0)
    above = _shares(weights)[order].cumsum(0)
    kept = above.clamp(trim, 1 - trim).diff(dim=0, prepend=torch.full_like(above[:1], trim))
    return (values * kept).sum(0) / kept.sum(0)


def median_weights(gram: Tensor, weights: Tensor) -> Tensor:
    """Convex weights with which a combination of points is their geometric median.

    Smoothed Weiszfeld steps on the points' weights: a step costs n^2 for any dimension.

    Args:
        gram: inner products of the points, (..., n, n).
        weights: of the points, (..., n). Weight zero means no effect.

    Returns:
        (..., n).

    Source: Pillutla et al. 2022 (RFA), algorithm 2.
    """
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    squares, mixed = gram.diagonal(dim1=-2, dim2=-1), shares
    for _ in range(STEPS):
        product = (gram @ mixed[..., None])[..., 0]
        own = (product * mixed).sum(-1, keepdim=True)
        distances = (squares - 2 * product + own).clamp_min(0).sqrt()
        typical = (shares * distances).sum(-1, keepdim=True)
        pulls = shares / distances.clamp_min(1e-6 * typical + 1e-30)
        mixed = pulls / pulls.sum(-1, keepdim=True).clamp_min(1e-300)
    return mixed


def _shares(weights: Tensor) -> Tensor:
    return weights.double() / weights.double().sum()
