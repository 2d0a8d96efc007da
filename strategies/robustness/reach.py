"""How far the sites' data reach: the range that a component must keep to, whatever its count and whoever else has its class.

Everything is one vote a site. Distances are squared, in units of the variance within classes of the median site, around the
middle of all sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.surrogates.surrogates import Surrogate

# A mean of fewer records says little about its class.
FEWEST = 5
# So many times as far, or as wide, as the farthest and widest class of the median site; and so many times what chance adds.
FARTHER, WIDER, CHANCE = 6.0, 6.0, 3.0
# A dimension's variance counts as at least this share of the mean variance: in some classes only, a pixel is constant.
FLOOR = 0.3


@dataclass(frozen=True)
class Moments:
    """A site's table by class: means (C, d) and variances (C, d) around them; counts (C,); present (C,)."""

    means: Tensor
    variances: Tensor
    counts: Tensor
    present: Tensor

    @classmethod
    def of(cls, surrogate: Surrogate) -> Moments:
        """Components of a class taken together."""
        table = surrogate.mixtures
        weights, shape = table.weights.double()[:, None], (len(table.counts), surrogate.dimension)
        means = torch.zeros(shape, dtype=torch.float64).index_add_(0, table.labels, weights * table.means.double())
        apart = (table.means.double() - means[table.labels]).square()
        inside = table.covariance.variances_per_dimension().double().expand_as(apart) + apart
        variances = torch.zeros(shape, dtype=torch.float64).index_add_(0, table.labels, weights * inside)
        return cls(means, variances, table.counts, table.components > 0)

    def certain(self) -> Tensor:
        """Classes (C,) of enough records; all that it has where none has so many."""
        enough = self.present & (self.counts >= FEWEST)
        return enough if enough.any() else self.present


@dataclass(frozen=True)
class Reach:
    """middle (d,) and scale (d,) of all sites; farthest (S,) and widest (S,): what the other sites' classes reach."""

    middle: Tensor
    scale: Tensor
    farthest: Tensor
    widest: Tensor

    @classmethod
    def of(cls, moments: Sequence[Moments]) -> Reach:
        """Of the tables of all sites."""
        variances = torch.stack([each.variances[each.present].mean(0) for each in moments]).median(0).values
        scale = variances.clamp_min(FLOOR * float(variances.mean()) + 1e-30).sqrt()
        middle = torch.stack([each.means[each.certain()].mean(0) for each in moments]).median(0).values
        far = torch.stack([((m.means[m.certain()] - middle) / scale).square().sum(1).amax() for m in moments])
        wide = torch.stack([(m.variances[m.certain()] / scale.square()).sum(1).amax() for m in moments])
        return cls(middle, scale, _median_of_others(far), _median_of_others(wide))

    def scores(self, site: int, surrogate: Surrogate) -> Tensor:
        """Of every component (M,): at least 1 where it lies beyond what the others reach, or is wider."""
        table = surrogate.mixtures
        counts = table.counts[table.labels] * table.weights
        apart = ((table.means.double() - self.middle) / self.scale).square().sum(1)
        variances = table.covariance.variances_per_dimension().double().expand_as(table.means)
        wide = (variances / self.scale.square()).sum(1)
        allowed = FARTHER * self.farthest[site] + CHANCE * self.widest[site] / counts.clamp_min(1)
        return torch.maximum(apart / allowed.clamp_min(1e-30), wide / (WIDER * self.widest[site]).clamp_min(1e-30))

    def bounded(self, site: int, means: Tensor) -> Tensor:
        """Means (n, d), those beyond the others' farthest class drawn back to it on the line to the middle."""
        apart = (means.double() - self.middle) / self.scale
        factor = (self.farthest[site].clamp_min(0) / apart.square().sum(1).clamp_min(1e-30)).sqrt().clamp_max(1.0)
        return self.middle + factor[:, None] * apart * self.scale


def _median_of_others(values: Tensor) -> Tensor:
    """Of every entry (S,), the median of the others; infinite for fewer than three, of which none is usual."""
    if len(values) < 3:
        return torch.full_like(values, torch.inf)
    rest = values.expand(len(values), -1)[~torch.eye(len(values), dtype=torch.bool)].view(len(values), -1)
    return rest.quantile(0.5, dim=1)
