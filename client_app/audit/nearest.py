"""Means of a release next to the records that it was made from, and to those that were left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.surrogates.surrogates import Surrogate, in_class_order

# A mean is a copy of a record if it is nearer than this share of the usual distance between any two records.
COPY = 0.1
Near = tuple[str, float, float]


@dataclass(frozen=True)
class NearestRecords:
    """Means of the release and the records next to them.

    ratio: median over the means of (distance to the nearest record used) / (distance to the nearest record of the class that
    was not used); one where the release is no nearer to its own records than to others. smallest: the smallest ratio.
    copies: share of the means that are nearly a record. classes: those with such a mean.
    """

    ratio: float
    smallest: float
    copies: float
    classes: tuple[str, ...]


def usual_distance(features: Tensor) -> float:
    """The median distance of two records; features (n, d)."""
    some = features[torch.randperm(len(features))[:500]].double()
    return float(torch.pdist(some).median())


def nearest(sent: object, classes: tuple[str, ...], features: Tensor, labels: Tensor, inside: Tensor) -> list[Near]:
    """For each mean: its class, and distances to the nearest record used and not used of its class."""
    if not isinstance(sent, Surrogate):
        return []
    found = []
    for mean, label in zip(sent.mixtures.means.double(), sent.mixtures.labels.tolist(), strict=True):
        name = sent.header.classes[label]
        own = labels == classes.index(name)
        used, others = features[own & inside].double(), features[own & ~inside].double()
        if len(used) and len(others):
            distances = [torch.cdist(mean[None], rows)[0] for rows in (used, others)]
            found.append((name, float(distances[0].min()), float(distances[1].min())))
    return found


def summary(near: list[Near], usual: float) -> NearestRecords | None:
    """All means together; None if there are none."""
    if not near:
        return None
    ratios = [used / max(other, 1e-12) for _, used, other in near]
    copies = [name for name, used, _ in near if used < COPY * usual]
    return NearestRecords(float(np.median(ratios)), min(ratios), len(copies) / len(near), in_class_order(set(copies)))
