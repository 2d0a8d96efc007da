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
class Moments:
    """Moments of one site by class.

    Attributes:
        means: (C, d).
        variances: around the means, (C, d).
        counts: records, (C,).
        present: whether the site has the class, (C,).
        points: means of the components with enough records, which lie farther out than those of
            their classes; of all present classes if there are none, (n, d).
        spread: whether the site has enough records besides its means to know variances. Where every
            class has one record, all variances are zero.
    """

    means: Tensor
    variances: Tensor
    counts: Tensor
    present: Tensor
    points: Tensor
    spread: bool

    @classmethod
    def of(cls, surrogate: Surrogate) -> Moments:
        """The moments of a surrogate, with the components of each class combined."""
        table = surrogate.mixtures
        weights, shape = table.weights.double()[:, None], (len(table.counts), surrogate.dimension)
        means = torch.zeros(shape, dtype=torch.float64).index_add_(
            0, table.labels, weights * table.means.double()
        )
        apart = (table.means.double() - means[table.labels]).square()
        inside = table.covariance.variances_per_dimension().double().expand_as(apart) + apart
        variances = torch.zeros(shape, dtype=torch.float64).index_add_(
            0, table.labels, weights * inside
        )
        freedom = (table.counts - table.components).clamp_min(0).sum()
        present = table.components > 0
        enough = table.counts[table.labels] * table.weights >= FEWEST
        points = (
            table.means if enough.all() else table.means[enough] if enough.any() else means[present]
        )
        # Single precision: for ten thousand sites these tables are most of what the screen holds.
        return cls(
            means.float(),
            variances.float(),
            table.counts,
            present,
            points.float(),
            bool(freedom >= FEWEST),
        )

    def certain(self) -> Tensor:
        """Mask (C,) of the classes with enough records; if there are none, of all present classes."""
        enough = self.present & (self.counts >= FEWEST)
        return enough if enough.any() else self.present

    def usual_variances(self) -> Tensor:
        """Mean variances (d,) of the classes with enough records."""
        return self.variances[self.certain()].mean(0)


@dataclass(frozen=True)
class Reach:
    """Range of the data.

    Attributes:
        variances: within classes, (d,).
        middle: of all sites, (d,).
        scale: of all sites, (d,).
        farthest: for each site, the farthest class of the other sites (median), (S,).
    """

    variances: Tensor
    middle: Tensor
    scale: Tensor
    farthest: Tensor

    @classmethod
    def of(cls, moments: Sequence[Moments]) -> Reach:
        """The range from the moments of all sites."""
        usual = _usual_variances(moments)
        variances = usual.double()
        scale = variances.clamp_min(FLOOR * float(variances.mean()) + 1e-30).sqrt()
        middle = (
            torch.stack([each.means[each.certain()].mean(0) for each in moments])
            .median(0)
            .values.double()
        )
        far = torch.stack(
            [((m.points.double() - middle) / scale).square().sum(1).amax() for m in moments]
        )
        return cls(usual, middle, scale, _median_of_others(far))

    def bounded(self, site: int, means: Tensor, farther: float = 1.0) -> Tensor:
        """Means within the range of the other sites.

        Args:
            site: index of the site that they are from.
            means: (n, d).
            farther: squared distance that is allowed, in that of the others' farthest class.

        Returns:
            (n, d). Those that are farther are moved back to the allowed distance, towards the middle.
        """
        apart = (means.double() - self.middle) / self.scale
        allowed = farther * self.farthest[site].clamp_min(0)
        factor = (allowed / apart.square().sum(1).clamp_min(1e-30)).sqrt().clamp_max(1.0)
        return torch.where(
            factor[:, None] < 1, self.middle + factor[:, None] * apart * self.scale, means.double()
        )


def within_reach(surrogates: Sequence[AnySurrogate]) -> list[AnySurrogate]:
    """Mixtures whose components lie far beyond all data of the other sites are moved back: training on
    samples of one such mean would fail. Others, and noisy sums, whose norms are bounded, stay.
    """
    mixtures = [each for each in surrogates if isinstance(each, Surrogate)]
    if len(mixtures) < len(surrogates):
        return list(surrogates)
    reach = Reach.of([Moments.of(each) for each in mixtures])
    kept = list[AnySurrogate]()
    for site, each in enumerate(mixtures):
        means = reach.bounded(site, each.mixtures.means, FARTHER).to(each.mixtures.means)
        same = means.equal(each.mixtures.means)
        kept.append(each if same else replace(each, mixtures=replace(each.mixtures, means=means)))
    return kept


def _usual_variances(moments: Sequence[Moments]) -> Tensor:
    """Variances within classes (d,): the median over the sites that know them; without such sites,
    those of the means.
    """
    known = [each.usual_variances() for each in moments if each.spread]
    if known:
        return torch.stack(known).median(0).values
    means = torch.cat([each.means[each.present] for each in moments])
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
