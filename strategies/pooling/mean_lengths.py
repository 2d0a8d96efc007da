"""Lengths of noisy class means, shrunk towards what all classes have in common.

A mean is a noisy sum over a noisy count. The noise of the count makes it longer or shorter, and a
head takes a long mean for a class that is far from the others. Lengths of all classes together are
known far better than that of one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.strategies.pooling.class_means import Components, mixing_of

# With fewer lengths, their spread says too little of how classes differ.
FEWEST = 4
# Smallest squared length that is told from noise, and the largest change of a length.
SHORTEST, MOST = 1e-3, 2.0


def even_lengths(
    pooled: Components, own: Components, of_count: Tensor, of_sum: Tensor
) -> Components:
    """Class means with lengths as they are expected given the noise.

    The logarithm of a length is taken as normal around one value for all classes, with the variance
    by which lengths differ beyond their noise (DerSimonian & Laird 1986). Noise of a count changes
    it by the count's relative error; noise of a sum adds to its square.

    Args:
        pooled: one per class, as from `pool`.
        own: one per class and site, as from `by_site`, that were pooled.
        of_count: standard deviation of the noise in the count of each of these, (J,).
        of_sum: the same in an entry of its sum, (J,).

    Returns:
        The means, longer or shorter, and their noise. With fewer than four classes as they were.

    Source: Efron & Morris 1975, for the logarithms of lengths.
    """
    if len(pooled.labels) < FEWEST:
        return pooled
    shares = mixing_of(own, 2.0).square()
    by_count = shares @ (of_count / own.records).square()
    by_sum = shares @ (of_sum / own.records).square()
    d = pooled.means.shape[1]
    squares = (pooled.means.square().sum(1) - d * by_sum).clamp_min(SHORTEST)
    error = by_count + (d * by_sum.square() / 2 + squares * by_sum) / squares.square()
    lengths, precision = squares.log() / 2, 1 / error
    middle = precision @ lengths / precision.sum()
    spread = precision @ (lengths - middle).square() - (len(lengths) - 1)
    between = float(spread / (precision.sum() - precision @ precision / precision.sum()))
    kept = max(0.0, between) / (max(0.0, between) + error)
    factors = ((1 - kept) * (middle - lengths)).exp().clamp(1 / MOST, MOST)
    # What the noise of counts adds to every dimension is as much smaller as the shrinkage leaves.
    noise = pooled.noise - ((1 - kept) * by_count * squares / d).diag()
    return replace(
        pooled,
        means=pooled.means * factors[:, None],
        noise=noise * torch.outer(factors, factors),
    )
