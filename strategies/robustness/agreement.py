"""Agreement of two sites: the correlation of the differences between their class means. Every other
site has one vote.

With large privacy noise one class gives little information, but all classes of a site together give
much: the noise of two sites is independent, so on average it adds nothing to the inner product of
their means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.strategies.robustness.class_points import ClassPoints

# Allowance for chance in standard errors; factor of the variance along the lines between classes
# over the average one.
SIGMAS, ALONG = 2.0, 16.0
# A site is unrelated if the quantile QUANTILE of its correlations is certainly below UNRELATED.
# Without privacy noise it is also unrelated if, over SEVERAL shared classes or more, that quantile
# is certainly below SHARE times the median site's and no larger than chance explains. Photos and
# sketches of the same classes have a small correlation, but not by chance.
UNRELATED, QUANTILE, SHARE, SEVERAL = 0.07, 0.7, 0.33, 3
# Lower bound of a site's squared distance between classes, as a share of the median site's.
SMALLEST = 0.05
# Maximum number of sites that each site is compared with; minimum number of votes to judge it.
PARTNERS, VOTES = 32, 3


@dataclass(frozen=True)
class Pairs:
    """Comparison of each of S sites with at most P partners.

    Attributes:
        sites: the sites' own positions among all sites of the run, (S,).
        partners: position of a partner among all sites of the run, (S, P).
        correlation: of the differences between class means, (S, P).
        mine: the part of its variance due to the site's own noise alone, (S, P).
        theirs: the rest of its variance, (S, P).
        shared: the number of shared classes minus one, or zero for a partner that is not compared,
            (S, P).
    """

    sites: Tensor
    partners: Tensor
    correlation: Tensor
    mine: Tensor
    theirs: Tensor
    shared: Tensor

    def without(self, row: int) -> Pairs:
        """The comparisons without the site in one row, also as a partner."""
        kept = torch.arange(len(self.sites)) != row
        tables = {name: table[kept] for name, table in vars(self).items()}
        tables["shared"] = tables["shared"].masked_fill(tables["partners"] == self.sites[row], 0.0)
        return Pairs(**tables)


def unrelated(pairs: Pairs, noisy: bool, dimension: int) -> Tensor:
    """Scores of "unrelated": the differences between a site's class means have nothing in common
    with those of the others.

    Args:
        pairs: of the S sites.
        noisy: whether the means contain privacy noise.
        dimension: of the means.

    Returns:
        (S,), above 1 where they are unrelated.
    """
    agreed, error = agreement(pairs)
    most = agreed + SIGMAS * error
    # k differences in random directions of d dimensions have a correlation with variance 1 / (k d).
    # Chance in the means adds to it; in most directions that is smaller than along the lines
    # between classes.
    shared = (
        pairs.shared.masked_fill(pairs.shared == 0, torch.nan).nanmedian(1).values.nan_to_num(0.0)
    )
    by_chance = (1 / (dimension * shared.clamp_min(1)) + error.square() / ALONG).sqrt()
    known = most[most.isfinite()]
    threshold = torch.full_like(most, UNRELATED)
    if len(known) and not noisy:
        usual = SHARE * float(known.median().clamp_max(1))
        threshold[(shared >= SEVERAL - 1) & (agreed < SIGMAS * by_chance.minimum(error))] = max(
            UNRELATED, usual
        )
    return 1 + threshold - most


def agreement(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """A high quantile of each site's correlations with the others, and its standard error.

    The quantile is high, because with two kinds of honest sites each agrees only with its own kind.
    It is not the maximum, because hostile sites agree with each other.

    Args:
        pairs: of the S sites.

    Returns:
        The quantile, (S,), and the error, (S,). The error is infinite if too few others share two
        classes with the site.
    """
    quantiles, errors = torch.zeros(len(pairs.sites)), torch.full((len(pairs.sites),), torch.inf)
    for site, own in enumerate(pairs.shared > 0):
        if int(own.sum()) >= VOTES:
            # The others' noise is independent between votes and averages out; the site's own noise
            # is common to all votes.
            mine, theirs = pairs.mine[site, own].median(), pairs.theirs[site, own].median()
            quantiles[site] = pairs.correlation[site, own].quantile(QUANTILE)
            errors[site] = (mine + math.pi / 2 * theirs / int(own.sum())).sqrt()
    return quantiles, errors


def correlations(points: ClassPoints) -> Pairs:
    """Compare every site with some others, spread evenly over the list of sites.

    Args:
        points: class means of all sites. The number of partners follows from that of the sites and
            `PARTNERS`.
    """
    count, d = points.counts.shape[0], points.means.shape[2]
    step = max(1, count // PARTNERS)
    rows = [list(range(one % step, count, step)) for one in range(count)]
    width = max(map(len, rows))
    partners = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    tables = torch.zeros(4, count, width, dtype=torch.float64)
    pairs = Pairs(torch.arange(count), partners, *tables)
    has = points.counts > 0
    lengths = torch.stack(
        [
            _length(points.means[site][own].double(), points.noise[site][own])
            for site, own in enumerate(has)
        ]
    )
    usual = lengths.nanmedian()
    if not usual > 0:
        return pairs
    lengths = lengths.nan_to_num(0.0).clamp_min(SMALLEST * float(usual))
    wide = 1.0 if points.power > 1 else ALONG
    for one, others in enumerate(partners):
        shared = has[one] & has[others]
        chosen = (others >= 0) & (others != one) & (shared.sum(1) >= 2)
        if not chosen.any():
            continue
        others, shared = others[chosen], shared[chosen]
        v, u = points.noise[one].double(), points.noise[others].double()
        weights = shared / (v + u + float(usual) / (4 * d))
        weights = weights / weights.sum(1, keepdim=True)
        a, b = points.means[one].double(), points.means[others].double()
        a, b = a - (weights @ a)[:, None], b - (weights[:, None] @ b)
        scale = lengths[one] * lengths[others]
        squares = weights.square()
        mine = (v * wide * lengths[others, None] * squares).sum(1) / scale
        theirs = ((u * wide * lengths[one] + d * v * u) * squares).sum(1) / scale
        value = (weights * (a * b).sum(2)).sum(1) / scale.sqrt()
        tables[:, one, chosen] = torch.stack([value, mine, theirs, shared.sum(1).double() - 1])
    return pairs


def _length(means: Tensor, noise: Tensor) -> Tensor:
    """Mean squared distance (a scalar) of class means (C, d) from their centre, minus noise; NaN
    for one class.
    """
    if len(means) < 2:
        return torch.tensor(torch.nan, dtype=torch.float64)
    noise, apart = noise.double(), (means - means.mean(0)).square().sum(1).mean()
    return (apart - means.shape[1] * noise.mean() * (1 - 1 / len(means))).clamp_min(0)
