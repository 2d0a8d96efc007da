"""A bound on what the gradients of one site change, over all rounds together.

In one round noise at each site hides a false gradient, which may be as long as the noise. Over the rounds
noise grows with the root of their number, and what is false in the same way each time with the number. So
each site's mean over its rounds is drawn towards the median of all means, until its distance is at most the
median site's; and it counts as if it had sent that in each of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.strategies.pooling.robust_centres import coordinate_median
from fedsurrogate.strategies.pooling.site_weights import FEWEST_SITES
from fedsurrogate.strategies.robustness.influence import TAIL


@dataclass(frozen=True)
class Given:
    """What a site has sent so far.

    Attributes:
        total: sum of its mean gradients over its rounds.
        used: the part of it that the steps have taken.
        rounds: in which it took part.
        noise: standard deviation of the noise on each number of a mean gradient of one round.
    """

    total: Tensor
    used: Tensor
    rounds: int
    noise: float


def within_bounds(given: Mapping[str, Given]) -> dict[str, tuple[Tensor, float]]:
    """What the next step takes of each site's mean gradient, and the share of its distance that is kept.

    Args:
        given: by site, with the gradients of this round.

    Returns:
        By site; of fewer than three sites all, because there is no usual one.

    Source: centred clipping (Karimireddy et al. 2021), with the median of all rounds as the centre.

    Example:
        >>> honest = {str(k): Given(torch.tensor([1.0, 0.1 * k]), torch.zeros(2), 1, 0.0) for k in range(4)}
        >>> false = {"x": Given(torch.tensor([-90.0, 0.0]), torch.zeros(2), 1, 0.0)}
        >>> part, kept = within_bounds(honest | false)["x"]
        >>> [round(each, 2) for each in part.tolist()], kept < 0.01
        ([0.9, 0.1], True)
    """
    if len(given) < FEWEST_SITES:
        return {site: (each.total - each.used, 1.0) for site, each in given.items()}
    means = {site: each.total / each.rounds for site, each in given.items()}
    centre = coordinate_median(torch.stack(list(means.values())), torch.ones(len(means)))
    distances = {site: float((mean - centre).norm()) for site, mean in means.items()}
    lengths = {
        site: each.noise / math.sqrt(each.rounds) * (math.sqrt(each.total.numel()) + TAIL)
        for site, each in given.items()
    }
    beyond = [math.sqrt(max(0.0, distances[site] ** 2 - lengths[site] ** 2)) for site in given]
    usual, found = statistics.median_low(beyond), dict[str, tuple[Tensor, float]]()
    for site, each in given.items():
        kept = min(1.0, math.hypot(lengths[site], usual) / max(distances[site], 1e-300))
        part = each.rounds * (centre + kept * (means[site] - centre)) - each.used
        found[site] = (part, kept)
    return found
