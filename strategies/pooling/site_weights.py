"""How much one site may weigh: counts are what sites report, and a false one must not own the model. No Flower type here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from common.surrogates.surrogates import AnySurrogate, SumsSurrogate

# Of fewer sites none is the median: a cap would let the smaller of two silence the larger.
FEWEST_SITES = 3


def shares_kept(counts: Sequence[Sequence[float]], max_share: float, power: float = 1.0) -> list[float]:
    """The share of its records that each site keeps, in (0, 1], from its records of each class.

    power: the weight of n records is n ** power where the result is used. It is at most `max_share` times that of the
    median site, for all records together and for those of the largest class: else a site of usual size could claim that
    all of its records are of one class, and own that class. No cap for max_share = 0 or fewer than three sites.
    """
    if not max_share or len(counts) < FEWEST_SITES:
        return [1.0] * len(counts)
    times = max_share ** (1 / power)
    totals, largest = [sum(row) for row in counts], [max(row, default=0.0) for row in counts]
    most = times * max(1.0, statistics.median_low(totals))
    most_of_class = times * max(1.0, statistics.median_low(largest))
    return [
        min(1.0, most / max(total, 1e-9), most_of_class / max(top, 1e-9)) for total, top in zip(totals, largest, strict=True)
    ]


def scaled(surrogate: AnySurrogate, share: float) -> AnySurrogate:
    """The surrogate of a site that counts only in part: the same means and, of noisy sums, the same relative noise."""
    if share >= 1:
        return surrogate
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        squares = None if sums.squares is None else sums.squares * share
        sigmas = {name: sigma * share for name, sigma in sums.sigmas.items()}
        return replace(
            surrogate, sums=replace(sums, counts=sums.counts * share, sums=sums.sums * share, squares=squares, sigmas=sigmas)
        )
    counts = (surrogate.mixtures.counts.double() * share).round().long().clamp_min(1)
    return replace(surrogate, mixtures=replace(surrogate.mixtures, counts=counts))
