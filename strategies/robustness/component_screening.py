"""Screen of single components: finds those that lie where the other sites have another class.
Functions on tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.strategies.robustness.class_points import Parts, standard_error

# Thresholds: how many times nearer (squared distance) to another class of the others than to its
# own; squared distance to its own class, as a multiple of the others' spread.
NEARER, DISAGREE = 6.0, 1.5
# For a class that too few sites have: squared distance to a class of the others, as a share of that
# class's squared distance to its nearest class.
CLOSE = 0.2
# Records of a site's misplaced parts near one class, as a share of the others' records of that
# class. Small components of an honest site lie near other classes too. A smaller share suspects
# more honest sites; a larger one lets liars do more harm.
SHARE = 0.05


def scores_of(
    parts: Parts,
    centres: Tensor,
    known: Tensor,
    noise: Tensor,
    apart: Tensor,
    spread: Tensor,
    records: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scores of the parts of one site, which are compared with the class means of the others.

    Args:
        parts: P parts of the site.
        centres: the others' class means, (C, d).
        known: whether enough of them have the class, (C,).
        noise: variance of the coordinates of the class means, (C,).
        apart: squared distances between the class means, (C, C).
        spread: mean squared distance of the others' means from their mean, (C,).
        records: the others' records, (C,).

    Returns:
        Scores (P,), at least 1 where a part belongs to another class, and the index (P,) of the
        nearest class.
    """
    if not len(parts.points) or int(known.sum()) < 2:
        return torch.zeros(len(parts.points)), torch.zeros(len(parts.points), dtype=torch.int64)
    d, index = centres.shape[1], torch.arange(len(parts.points))
    summed = parts.noise[:, None] + noise
    a, b = parts.points.double(), centres.double()
    squares = (
        a.square().sum(1, keepdim=True) - 2 * a @ b.T + b.square().sum(1)
    ).float() - d * summed
    has = parts.labels >= 0
    column = parts.labels.clamp_min(0)
    others = squares.masked_fill(~known, torch.inf)
    others[index[has], column[has]] = torch.inf
    nearest, other = others.min(1)
    # A squared distance between few records is known to one standard error only; it can be
    # negative.
    nearest = nearest.clamp_min(0) + standard_error(nearest, summed[index, other], d)
    own = squares[index, column]
    ways = (
        apart.masked_fill(~known | torch.eye(len(known), dtype=torch.bool), torch.inf).min(1).values
    )
    way = ways[other].clamp_min(1e-30)
    judged = has & known[column] & (own > DISAGREE * spread[column]) & (own > way / 4)
    mixed_up = torch.where(judged, own / (NEARER * nearest.clamp_min(1e-30)), 0.0)
    double = torch.where(has, 0.0, CLOSE * way / nearest.clamp_min(1e-30))
    scores = torch.maximum(mixed_up, double).nan_to_num(0.0, 0.0).clamp_max(1e6)
    misplaced = (scores >= 1) & nearest.isfinite()
    mixed = misplaced & has
    near = torch.zeros_like(records).index_add_(0, other[mixed], 1 / parts.noise[mixed])
    # A class that the others do not have can take another one's place with few records: some heads
    # weigh all classes alike.
    return torch.where(misplaced & (~has | (near > SHARE * records)[other]), scores, 0.0), other
