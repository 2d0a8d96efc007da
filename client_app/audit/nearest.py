"""Means of a release next to the records that it was made from, and to those that were left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate, in_class_order

# A mean is a copy of a record if it is nearer than this share of the usual distance between any two
# records.
COPY = 0.1
Near = tuple[str, float, float]


@dataclass(frozen=True)
class NearestRecords:
    """Means of the release and the records next to them.

    Attributes:
        ratio: median over the means of (distance to the nearest record used) / (distance to the
            nearest record of the class that was not used); one where the release is no nearer to
            its own records than to others.
        smallest: the smallest ratio.
        copies: share of the means that are nearly a record.
        classes: those with such a mean.
    """

    ratio: float
    smallest: float
    copies: float
    classes: tuple[str, ...]


def usual_distance(features: Tensor) -> float:
    """The median distance of two records; features (n, d)."""
    some = features[
        torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:500]
    ].double()
    return float(torch.pdist(some).median())


def means_of(sent: object) -> tuple[Tensor, Tensor] | None:
    """Means in a release.

    They are the means of a mixture's components, or of the classes in sums.

    Args:
        sent: the release.

    Returns:
        Means (m, d), and the class (m,) of each, an index into its header's classes; None if it has
        no means.
    """
    match sent:
        case Surrogate():
            return sent.mixtures.means.double(), sent.mixtures.labels
        case Parameters() if {"counts", "sums"} <= sent.tensors.keys():
            counts, sums = sent.tensors["counts"], sent.tensors["sums"].double()
            there = counts > 0
            return (sums / counts.clamp_min(1)[:, None])[there], torch.arange(len(counts))[there]
    return None


def nearest(
    sent: object, classes: tuple[str, ...], features: Tensor, labels: Tensor, inside: Tensor
) -> list[Near]:
    """For each mean of a release, distances to the records next to it.

    Args:
        sent: the release.
        classes: names of classes.
        features: of the records, (n, d).
        labels: indices into `classes`, (n,).
        inside: whether a record was used, (n,) bool.

    Returns:
        For each mean: its class, and distances to the nearest record used and the nearest one not
        used. The latter is of the same class, or of any class where the release used all records of
        this one.
    """
    near: list[Near] = []
    if (read := means_of(sent)) is None:
        return near
    header: Header = getattr(sent, "header")  # noqa: B009
    means, kinds = read
    for mean, kind in zip(means, kinds.tolist(), strict=True):
        name = header.classes[kind]
        own = labels == classes.index(name)
        used, others = features[own & inside].double(), features[own & ~inside].double()
        if not len(others):
            others = features[~inside].double()
        if len(used) and len(others):
            distances = [torch.cdist(mean[None], rows)[0] for rows in (used, others)]
            near.append((name, float(distances[0].min()), float(distances[1].min())))
    return near


def summary(near: list[Near], usual: float) -> NearestRecords | None:
    """All means together.

    Args:
        near: of each mean, see `nearest`.
        usual: distance of two records, see `usual_distance`.

    Returns:
        The summary; None if there are no means.

    Example:
        >>> summary([("cat", 1.0, 2.0), ("dog", 3.0, 3.0)], usual=2.0)
        NearestRecords(ratio=0.75, smallest=0.5, copies=0.0, classes=())
    """
    if not near:
        return None
    ratios = [used / max(other, 1e-12) for _, used, other in near]
    copies = [name for name, used, _ in near if used < COPY * usual]
    return NearestRecords(
        float(np.median(ratios)), min(ratios), len(copies) / len(near), in_class_order(set(copies))
    )
