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


@dataclass(frozen=True)
class HazardSums:
    """Sums for one step of discrete hazards. They add up over sites.

    Attributes:
        events: sum of the probabilities of an event in each bin, over records at risk, (B,).
        spread: sum of their variances h (1 - h), (B,).
        first: sum of h z over records and bins, (d,).
        mixed: sum of h (1 - h) z in each bin, (B, d).
        second: sum of h (1 - h) z z^T over records and bins, (d, d).
        log_survival: sum of log(1 - h) over records and bins.
    """

    events: Tensor
    spread: Tensor
    first: Tensor
    mixed: Tensor
    second: Tensor
    log_survival: float

    def __add__(self, other: HazardSums) -> HazardSums:
        return HazardSums(
            self.events + other.events,
            self.spread + other.spread,
            self.first + other.first,
            self.mixed + other.mixed,
            self.second + other.second,
            self.log_survival + other.log_survival,
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
        bins: in which each record leaves, (n,); B for those that outlive the last one.
        weight: beta, (d,).
        hazard: baseline hazard of each bin, (B,), that the coordinator expects at this beta.
        offset: that is subtracted from beta z.
        largest: magnitude of what is left; what is beyond it is cut off.
    """
    count = len(hazard) + 1
    risk = (features @ weight - offset).clamp(-largest, largest).exp()
    weighted = risk[:, None] * features
    cumulative = torch.cat([hazard.cumsum(0), hazard.sum()[None]])
    return RiskSums(
        torch.zeros(count, dtype=torch.float64).index_add_(0, bins, risk),
        torch.zeros(count, features.shape[1], dtype=torch.float64).index_add_(0, bins, weighted),
        (weighted * cumulative[bins][:, None]).T @ features,
    )


def hazard_sums(features: Tensor, bins: Tensor, weight: Tensor, levels: Tensor) -> HazardSums:
    """The sums of a site's records for one step of discrete hazards.

    The hazard of a record z in bin b is the logistic function of levels_b + weight z, while it is
    at risk: until the bin in which it leaves.

    Args:
        features: (n, d), float64.
        bins: as in `risk_sums`.
        weight: (d,).
        levels: (B,).
    """
    score, bin_count = features @ weight, len(levels)
    events, spread = (torch.zeros(bin_count, dtype=torch.float64) for _ in range(2))
    mixed = torch.zeros(bin_count, features.shape[1], dtype=torch.float64)
    of_record, variance_of_record = torch.zeros_like(score), torch.zeros_like(score)
    log_survival = 0.0
    for bin_, level in enumerate(levels.tolist()):
        at_risk = (bins >= bin_).double()
        chance = torch.sigmoid(score + level) * at_risk
        variance = chance * (1 - chance)
        events[bin_], spread[bin_] = chance.sum(), variance.sum()
        mixed[bin_] = variance @ features
        of_record += chance
        variance_of_record += variance
        log_survival += float((torch.nn.functional.logsigmoid(-score - level) * at_risk).sum())
    second = (features * variance_of_record[:, None]).T @ features
    return HazardSums(events, spread, of_record @ features, mixed, second, log_survival)


def survival_probabilities(hazard: Tensor, scores: Tensor) -> Tensor:
    """Survival to the end of each bin under proportional hazards.

    Args:
        hazard: baseline hazard of each bin, (B,).
        scores: log of the hazard relative to the baseline, (n,).

    Returns:
        (n, B).

    Example:
        >>> survival_probabilities(torch.tensor([0.5, 0.5]), torch.tensor([0.0])).log().tolist()
        [[-0.5, -1.0]]
    """
    return (-scores.exp()[:, None] * hazard.cumsum(0)).exp()
