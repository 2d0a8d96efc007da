"""Sums over records for one step of a survival model: what a site computes, and both sides read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RiskSums:
    """Sums for one step of a Cox model. They add up over sites.

    Attributes:
        weights: sum of w = exp(beta z) over the records that leave in each bin, and those that
            outlive the last one, (B + 1,), float64.
        first: sum of w z, (B + 1, d).
        second: sum of w H z z^T, (d, d), with H the cumulative hazard at which a record leaves.
    """

    weights: Tensor
    first: Tensor
    second: Tensor

    def __add__(self, other: RiskSums) -> RiskSums:
        return RiskSums(
            self.weights + other.weights, self.first + other.first, self.second + other.second
        )


def risk_sums(
    features: Tensor,
    bins: Tensor,
    weight: Tensor,
    hazard: Tensor,
    offset: float = 0.0,
    largest: float = math.inf,
) -> RiskSums:
    """The sums of a site's records for one step of a Cox model.

    Args:
        features: (n, d), float64.
        bins: the last in which each record is at risk, (n,); B for those that outlive the last one,
            and -1 for those that are never at risk, which add nothing.
        weight: beta, (d,).
        hazard: baseline hazard of each bin, (B,), that the coordinator expects at this beta.
        offset: that is subtracted from beta z.
        largest: magnitude of what is left; what is beyond it is cut off.
    """
    count = len(hazard) + 1
    features, bins = features[bins >= 0], bins[bins >= 0]
    risk = (features @ weight - offset).clamp(-largest, largest).exp()
    weighted = risk[:, None] * features
    cumulative = torch.cat([hazard.cumsum(0), hazard.sum()[None]])
    return RiskSums(
        torch.zeros(count, dtype=torch.float64).index_add_(0, bins, risk),
        torch.zeros(count, features.shape[1], dtype=torch.float64).index_add_(0, bins, weighted),
        (weighted * cumulative[bins][:, None]).T @ features,
    )
