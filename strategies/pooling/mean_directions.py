"""Noisy class means whose differences are mostly chance along the own mean of features, along their
length, or across both.

Where classes differ in their level alone, one direction tells them apart, and all others hold noise
that a head would give as much weight as it is large. Own mean and length are known to be one direction
each (`common/privacy/own_mean.py`), so all parts are judged alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsurrogate.common.privacy.gaussian_mechanism import public_signs
from fedsurrogate.common.privacy.own_mean import OwnParts
from fedsurrogate.strategies.pooling.class_means import Components, within

# A part of which less is left than this share of the other's is shrunk.
MOSTLY = 0.2


def shrink_directions(pooled: Components, own: OwnParts) -> Components:
    """Class means of which the differences along the own mean, along the length, or across both, are
    shrunk where chance explains most of them. Chance includes privacy noise and sampling error. Were all
    shrunk, shares of classes would count for more.

    Args:
        pooled: one per class, as from `pool`.
        own: what features keep of both.

    Returns:
        The means and their noise; as they were where chance explains all differences.

    Source: James & Stein 1961, for blocks of dimensions.
    """
    means, d = pooled.means, pooled.means.shape[1]
    shares = pooled.records / pooled.records.sum()
    apart = torch.eye(len(shares), dtype=means.dtype) - shares
    differences = apart @ means
    lines = [torch.ones(d) / d**0.5, *([public_signs(d)] if own.length else [])]
    parts = [(1, differences @ line.outer(line).to(means)) for line in lines]
    parts.append((d - len(parts), differences - sum(part for _, part in parts)))
    sampling = (within(pooled) / d / pooled.records).diag()
    chance = float(shares @ (apart @ (pooled.noise + sampling) @ apart.T).diagonal())
    seen = [float(shares @ part.square().sum(1)) for _, part in parts]
    left = [
        max(0.0, 1 - size * chance / each) if each > 0 else 0.0
        for (size, _), each in zip(parts, seen, strict=True)
    ]
    if not any(left):
        return pooled
    kept = [each / max(left) if each < MOSTLY * max(left) else 1.0 for each in left]
    shrunk, noise = means - differences, torch.zeros_like(pooled.noise)
    for share, (size, part) in zip(kept, parts, strict=True):
        shrunk = shrunk + share * part
        mixing = torch.eye(len(shares), dtype=means.dtype) - (1 - share) * apart
        # On average over all dimensions, as noise is stated.
        noise += size / d * (mixing @ pooled.noise @ mixing.T)
    return replace(pooled, means=shrunk, noise=noise)
