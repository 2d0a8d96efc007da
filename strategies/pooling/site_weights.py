"""Cap on the weight of one site: sites report counts and second moments, and false ones must not
dominate the model. No Flower types.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.targets.target import RECORDS, SQUARES, TOTALS

# Below this number no cap applies: with two sites, the smaller one would cut the weight of the
# larger one.
FEWEST_SITES = 3
# Sites with fewer records say nothing about the size of a usual site, if at least this many sites
# and this share have more.
FEWEST_RECORDS, LARGER_SITES, SHARE_OF_SITES = 10, 10, 0.25
# Scanners differ: an honest site's features may vary so many times as much as the median site's.
OTHER_SCALES = 2.0
# Multiplications by a matrix after which a vector's length is about the largest eigenvalue.
MULTIPLIED = 8


def shares_kept(
    counts: Sequence[Sequence[float]], max_share: float, power: float = 1.0, noise: float = 0.0
) -> list[float]:
    """The share of its records that each site keeps.

    A site's weight is at most `max_share` times the usual site's, for all records together and for
    its largest class. Without the second cap, a site of usual size could dominate a class by
    claiming that all its records are of this class. The usual site is the median one, without sites
    of a few records: in federations of many such sites, all data would be in sites that the cap
    silences.

    Args:
        counts: each site's records of each class.
        max_share: most weight of a site, in weights of the usual site; 0 for no cap. Nor is there a
            cap for fewer than three sites.
        power: later, n records have the weight n ** power.
        noise: standard deviation of the noise on each count. A site whose records do not stand out
            from it is one of a few records.

    Returns:
        Of each site, in (0, 1].

    Example:
        >>> shares_kept([[50, 50], [60, 40], [500, 500]], max_share=3.0)
        [1.0, 1.0, 0.3]
    """
    if not max_share or len(counts) < FEWEST_SITES:
        return [1.0] * len(counts)
    times = max_share ** (1 / power)
    totals, largest = [sum(row) for row in counts], [max(row, default=0.0) for row in counts]
    fewest = FEWEST_RECORDS + noise * _of_noise_alone(max(map(len, counts)))
    usual = [index for index, total in enumerate(totals) if total >= fewest]
    if len(usual) < max(LARGER_SITES, SHARE_OF_SITES * len(counts)):
        usual = list(range(len(counts)))
    most = times * max(1.0, statistics.median_low(totals[index] for index in usual))
    most_of_class = times * max(1.0, statistics.median_low(largest[index] for index in usual))
    return [
        min(1.0, most / max(total, 1e-9), most_of_class / max(top, 1e-9))
        for total, top in zip(totals, largest, strict=True)
    ]


def _of_noise_alone(classes: int) -> float:
    """What the sum of the positive ones of so many standard normals hardly exceeds: its mean and two
    standard deviations.
    """
    mean = 1 / math.sqrt(2 * math.pi)
    return classes * mean + 2 * math.sqrt(classes * (0.5 - mean**2))


def moment_shares(sums: Sequence[Mapping[str, Tensor]], max_share: float) -> list[float]:
    """The share of its weight that each site keeps by its features: those of a site whose features
    vary much more would decide what the sum of all sites says.

    A site's second moment for each record, around the middle of all sites, is at most OTHER_SCALES x
    `max_share` times the median site's: its trace and, about, its largest eigenvalue.

    Args:
        sums: exact ones of each site in one frame, with the second moment around the site's mean.
        max_share: as for `shares_kept`.

    Returns:
        Of each site, in (0, 1]; one where the sums have no second moment.
    """
    if not max_share or len(sums) < FEWEST_SITES or not all(SQUARES in each for each in sums):
        return [1.0] * len(sums)
    means = torch.stack([(each[TOTALS].double() / each[RECORDS].double()) for each in sums])
    # One after the other: ten thousand second moments in double precision are too many.
    sizes = torch.stack(
        [
            _moment_size(each, apart)
            for each, apart in zip(sums, means - means.median(0).values, strict=True)
        ]
    )
    allowed = OTHER_SCALES * max_share * sizes.median(0).values.clamp_min(1e-300)
    shares = allowed / sizes.clamp_min(1e-300)
    return [float(share) for share in shares.min(1).values.clamp_max(1.0)]


def _moment_size(sums: Mapping[str, Tensor], apart: Tensor) -> Tensor:
    """Trace and largest eigenvalue of a site's second moment for each record, around a point that is
    this far from its mean, (d,).
    """
    moment = unfold(sums[SQUARES].double(), len(apart)) / sums[RECORDS].double()
    moment = moment + torch.outer(apart, apart)
    longest = moment[moment.norm(dim=1).argmax()]
    for _ in range(MULTIPLIED):
        longest = moment @ (longest / longest.norm().clamp_min(1e-300))
    return torch.stack([moment.trace(), longest.norm()])


def scaled(surrogate: AnySurrogate, share: float) -> AnySurrogate:
    """A surrogate with its counts reduced: the means stay, and for noisy sums also the relative
    noise.

    Args:
        surrogate: of a site.
        share: of its counts that stays; from 1 on, nothing changes.
    """
    if share >= 1:
        return surrogate
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        squares = None if sums.squares is None else sums.squares * share
        sigmas = {name: sigma * share for name, sigma in sums.sigmas.items()}
        return replace(
            surrogate,
            sums=replace(
                sums,
                counts=sums.counts * share,
                sums=sums.sums * share,
                squares=squares,
                sigmas=sigmas,
            ),
        )
    counts = (surrogate.mixtures.counts.double() * share).round().long().clamp_min(1)
    return replace(surrogate, mixtures=replace(surrogate.mixtures, counts=counts))
