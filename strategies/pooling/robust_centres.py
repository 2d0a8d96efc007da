"""Robust centres of points that several sites contribute. Weights are those of the sites; no Flower type in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# The share of the weight that a trimmed mean cuts off at either end: it resists so many hostile sites.
TRIM = 0.2
STEPS = 30
# Rules that pool points; the rest leaves points out, or does nothing.
POOLED = ("median", "trimmed")


def robust_mean(points: Tensor, weights: Tensor, rule: str) -> Tensor:
    """Points (n, ...) of weights (n,) pooled by a rule: "median", "trimmed", or their weighted mean."""
    if rule == "median":
        return coordinate_median(points, weights)
    if rule == "trimmed":
        return trimmed_mean(points, weights)
    mean: Tensor = torch.tensordot(_shares(weights), points.double(), 1)
    return mean


def robust_tensors(tables: Sequence[Mapping[str, Tensor]], rule: str) -> dict[str, Tensor]:
    """Tables of tensors pooled name by name. Each site has one vote: its number of records is what it reports."""
    votes = torch.ones(len(tables), dtype=torch.float64)
    return {name: robust_mean(torch.stack([table[name] for table in tables]), votes, rule).float() for name in tables[0]}


def coordinate_median(points: Tensor, weights: Tensor) -> Tensor:
    """Weighted median of every coordinate: points (n, ...), weights (n,) -> (...).

    The lower and the upper weighted median are averaged. Source: Yin et al. 2018, definition 1; at most half of the weight
    may be hostile.
    """
    values, order = points.sort(dim=0)
    share = _shares(weights)[order]
    below = share.cumsum(0)
    half = 0.5 * (1 - 1e-9)
    lower = (below < half).sum(0, keepdim=True).clamp_max(len(points) - 1)
    upper = (below <= 1 - half).sum(0, keepdim=True).clamp_max(len(points) - 1)
    return ((values.gather(0, lower) + values.gather(0, upper)) / 2)[0]


def trimmed_mean(points: Tensor, weights: Tensor, trim: float = TRIM) -> Tensor:
    """Weighted mean of every coordinate without the share `trim` of the weight at either end: (n, ...), (n,) -> (...).

    Source: Yin et al. 2018, definition 2, for weights that differ: a point on the edge counts in part.
    """
    values, order = points.sort(dim=0)
    above = _shares(weights)[order].cumsum(0)
    kept = above.clamp(trim, 1 - trim).diff(dim=0, prepend=torch.full_like(above[:1], trim))
    return (values * kept).sum(0) / kept.sum(0)


def geometric_median(points: Tensor, weights: Tensor) -> Tensor:
    """The point with the least weighted sum of distances to all: points (..., n, d), weights (..., n) -> (..., d).

    Smoothed Weiszfeld steps on weights of points, so that a step costs n^2 whatever d is. Points of weight zero do not
    count. Source: Pillutla et al. 2022 (RFA), algorithm 2.
    """
    return (median_weights(points @ points.mT, weights)[..., None, :] @ points)[..., 0, :]


def median_weights(gram: Tensor, weights: Tensor) -> Tensor:
    """Of points with inner products `gram` (..., n, n), the convex weights (..., n) that make their geometric median."""
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
