"""The range of the sites' data. Every component must lie inside it, for any count and any class.

Each site has one vote. Distances are squared, measured from the centre of all sites, in units of
the median site's variance within classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Surrogate

# Minimum number of records for a meaningful class mean.
FEWEST = 5
# Allowed squared distance of a component, in that of the median site's farthest one.
FARTHER = 6.0
# Lower bound of a dimension's variance, as a share of the mean variance: a pixel may be constant in
# some classes only.
FLOOR = 0.3


@dataclass(frozen=True)
class _Data:
    """Where a site's data lie.

    Attributes:
        centre: mean of the means of its classes with enough records, of all if there are none, (d,).
        variances: mean of the variances of these classes, (d,); None where every component has about
            one record, so that variances are zero.
        means: of the classes that it has, (c, d).
        points: means of the components with enough records, which lie farther out than those of
            their classes; of its classes if there are none, (n, d).
    """

    centre: Tensor
    variances: Tensor | None
    means: Tensor
    points: Tensor


def within_reach(surrogates: Sequence[AnySurrogate]) -> list[AnySurrogate]:
    """Mixtures whose components lie far beyond all data of the other sites are moved back, towards the
    middle of all: training on samples of one such mean would fail. Others, and noisy sums, whose norms
    are bounded, stay.

    Args:
        surrogates: of the sites.
    """
    mixtures = [each for each in surrogates if isinstance(each, Surrogate)]
    if len(mixtures) < len(surrogates):
        return list(surrogates)
    sites = [_data_of(each) for each in mixtures]
    middle = torch.stack([each.centre for each in sites]).median(0).values.double()
    usual = _usual_variances(sites).double()
    scale = usual.clamp_min(FLOOR * float(usual.mean()) + 1e-30).sqrt()
    far = torch.stack([_squares(each.points, middle, scale).amax() for each in sites])
    allowed = FARTHER * _median_of_others(far).clamp_min(0)
    kept = list[AnySurrogate]()
    for each, most in zip(mixtures, allowed, strict=True):
        means = each.mixtures.means
        share = (most / _squares(means, middle, scale).clamp_min(1e-30)).sqrt()[:, None]
        if bool((share < 1).any()):
            inside = torch.where(
                share < 1, middle + share * (means.double() - middle), means.double()
            )
            each = replace(each, mixtures=replace(each.mixtures, means=inside.to(means)))
        kept.append(each)
    return kept


def _squares(points: Tensor, middle: Tensor, scale: Tensor) -> Tensor:
    """Squared distances of points (n, d) from the middle, (n,)."""
    return ((points.double() - middle) / scale).square().sum(1)


def _data_of(surrogate: Surrogate) -> _Data:
    """Where the data of a surrogate lie, with the components of each class combined."""
    table = surrogate.mixtures
    weights, shape = table.weights.double()[:, None], (len(table.counts), surrogate.dimension)
    means = torch.zeros(shape, dtype=torch.float64).index_add_(
        0, table.labels, weights * table.means.double()
    )
    apart = (table.means.double() - means[table.labels]).square()
    inside = table.covariance.variances_per_dimension().double().expand_as(apart) + apart
    variances = torch.zeros_like(means).index_add_(0, table.labels, weights * inside)
    present = table.components > 0
    certain = present & (table.counts >= FEWEST)
    certain = certain if certain.any() else present
    enough = table.counts[table.labels] * table.weights >= FEWEST
    known = (table.counts - table.components).clamp_min(0).sum() >= FEWEST
    # Single precision: for ten thousand sites these tables are most of what the defence holds.
    return _Data(
        means[certain].mean(0).float(),
        variances[certain].mean(0).float() if known else None,
        means[present].float(),
        table.means[enough].float() if enough.any() else means[present].float(),
    )


def _usual_variances(sites: Sequence[_Data]) -> Tensor:
    """Variances within classes (d,): the median over the sites that know them; without such sites,
    those of the means.
    """
    known = [each.variances for each in sites if each.variances is not None]
    if known:
        return torch.stack(known).median(0).values
    means = torch.cat([each.means for each in sites])
    return (means - means.median(0).values).square().median(0).values


def _median_of_others(values: Tensor) -> Tensor:
    """For every entry of (S,), the median of the others; infinite where these are fewer than two."""
    others = len(values) - 1
    if others < 2:
        return torch.full_like(values, torch.inf)
    ordered = values.sort().values
    # The sorted others lack one entry of this value.
    place = torch.searchsorted(ordered, values)
    low, high = (ordered[at + (place <= at)] for at in ((others - 1) // 2, others // 2))
    return (low + high) / 2
