"""The mean over a feature's own columns, of which a private statistic keeps little.

Features that are never negative have most of their length in that mean, so after the clip little of
their norm would be left for the rest. But classes may differ in it alone, as a scan that is darker
differs from others. So it keeps a small weight, and never more than a share of the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The weight of the mean, and its largest length as a share of that of the rest. Chosen on generated
# families of classes (`benchmarks/level_families.py`), where features of backbones lose nothing.
KEPT, MOST = 0.1, 0.75
# All of it, as of features without this map; and nothing, as in earlier versions.
ALL, REMOVED = 1.0, 0.0
# What claims state in place of a centre's digest. The first is of earlier versions.
STATED_REMOVED, STATED_KEPT = "own mean", "own mean, weight 0.1"
STATED = {STATED_REMOVED: REMOVED, STATED_KEPT: KEPT}


def weigh_own_mean(features: Tensor, weight: float) -> Tensor:
    """Each feature with a smaller mean over its own columns.

    It is a fixed map of one record, so it costs no budget, and the bound after `clip` holds as
    before.

    Args:
        features: (n, d), any floating point.
        weight: of the mean, from 0, which takes it away, to 1, which leaves features as they are.
            In between, a mean longer than MOST times the rest of its feature is shortened to that.

    Returns:
        Features (n, d).

    Example:
        >>> weigh_own_mean(torch.tensor([[1.0, 2.0, 6.0]]), REMOVED).tolist()
        [[-2.0, -1.0, 3.0]]
        >>> kept = weigh_own_mean(torch.tensor([[1.0, 2.0, 6.0]]), KEPT)
        >>> [round(entry, 3) for entry in kept[0].tolist()]
        [-1.7, -0.7, 3.3]
    """
    if weight == ALL or not len(features):
        return features
    # One record at a time, as in `PublicMap.apply`: how a mean rounds may depend on other records.
    means = torch.stack([row.double().mean() for row in features])[:, None]
    rest = features - means.to(features)
    if weight == REMOVED:
        return rest
    lengths = torch.stack([torch.linalg.vector_norm(row.double()) for row in rest])[:, None]
    most = MOST / math.sqrt(features.shape[1]) * lengths
    return rest + (weight * means).clamp(-most, most).to(features)


def weigh_rows(features: Tensor, weight: float) -> Tensor:
    """As `weigh_own_mean`, of all records at once, as a graph needs it: equal up to rounding."""
    if weight == ALL:
        return features
    means = features.double().mean(1, keepdim=True)
    rest = features - means.to(features)
    if weight == REMOVED:
        return rest
    lengths = torch.linalg.vector_norm(rest.double(), dim=1, keepdim=True)
    most = MOST / math.sqrt(features.shape[1]) * lengths
    return rest + (weight * means).maximum(-most).minimum(most).to(features)


def stated(weight: float, centre: str = "") -> str:
    """What a claim states was subtracted from features before their clip.

    Args:
        weight: of the own mean.
        centre: digest of the public centre, or empty, where all of the mean is kept.
    """
    return next((text for text, each in STATED.items() if each == weight), centre)


def weight_of(claim: str) -> float:
    """The weight of the own mean by the statement of a claim.

    Args:
        claim: as `stated` gives it.
    """
    return STATED.get(claim, ALL)


def as_stored(claim: str, due: str) -> str:
    """What the claim of a stored run has to state.

    Args:
        claim: what it states, where an earlier version may have written it; else empty.
        due: what a claim of this version states.
    """
    return claim if (claim, due) == (STATED_REMOVED, STATED_KEPT) else due
