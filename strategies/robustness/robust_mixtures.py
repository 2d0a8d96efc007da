"""Robust pooling of mixtures: a minority of hostile sites cannot move the result far. No Flower
types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.mixtures import RELATIVE_FLOOR, Mixtures
from fedsurrogate.common.surrogates.shared_covariances import Gram, LowRank
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.strategies.pooling.robust_centres import coordinate_median, robust_mean
from fedsurrogate.strategies.robustness.reach import FEWEST, Moments, Reach

# Fewest sites with a class that can tell what is usual for it.
KNOWN_BY = 3
# The share of sites, those with variances nearest the median, that determines the directions of the
# covariance.
CORE = 0.5


def pooled_mixture(surrogates: Sequence[Surrogate], rule: str, rank: int) -> Surrogate:
    """One Gaussian per class for all sites, with one covariance.

    Class means and variances around them are pooled by a robust rule; directions are from the sites
    whose variances are nearest the coordinate median. Each site has one vote, in a class only if it
    has FEWEST records of it. With fewer than three such votes a class has no majority. Then all
    sites with the class vote, and each mean is moved into the range of the other sites' classes.

    Cost of a robust rule: honest differences between sites are lost, except for their part in the
    variances.

    Args:
        surrogates: of the sites.
        rule: as in `robust_mean`.
        rank: most directions of a covariance of low rank.
    """
    moments = [Moments.of(surrogate) for surrogate in surrogates]
    reach = Reach.of(moments)
    rows: dict[str, list[tuple[Tensor, Tensor, float]]] = {
        name: [] for surrogate in surrogates for name in surrogate.header.classes
    }
    for site, (surrogate, own) in enumerate(zip(surrogates, moments, strict=True)):
        inside = reach.bounded(site, own.means).float()
        for index, name in enumerate(surrogate.header.classes):
            if own.present[index]:
                rows[name].append((own.means[index], inside[index], float(own.counts[index])))
    kept = [name for name in rows if rows[name]]
    means, counts = [], []
    for name in kept:
        voters = [mean for mean, _, count in rows[name] if count >= FEWEST]
        points = torch.stack(
            voters if len(voters) >= KNOWN_BY else [bounded for _, bounded, _ in rows[name]]
        )
        means.append(robust_mean(points, torch.ones(len(points)), rule).float())
        counts.append(round(sum(count for *_, count in rows[name])))
    # For the variances, too, each site with enough records has one vote.
    sizes = torch.stack([own.counts.sum() for own in moments])
    totals = torch.stack([own.counts.float() @ own.variances for own in moments])
    enough, spread = sizes >= FEWEST, totals / sizes.clamp_min(1)[:, None]
    voting = spread[enough] if int(enough.sum()) >= KNOWN_BY else spread
    covariance = _covariance(
        surrogates, spread, robust_mean(voting, torch.ones(len(voting)), rule).float(), rank
    )
    first = surrogates[0]
    header = replace(first.header, site="pooled", classes=tuple(kept))
    labels = torch.arange(len(kept))
    table = Mixtures(
        torch.tensor(counts).clamp_min(1),
        labels,
        torch.ones(len(kept)),
        torch.stack(means),
        covariance,
    )
    return replace(first, header=header, mixtures=table)


def _whole(core: Sequence[Surrogate], usual: Tensor) -> Gram:
    """The mean of the core sites' covariances, with variances `usual` (d,)."""
    total = torch.zeros(len(usual), len(usual))
    for surrogate in core:
        match surrogate.mixtures.covariance:
            case Gram() as gram:
                total += gram.matrix / len(core)
            # Of a site that limits its rank, in a run whose covariances are whole.
            case LowRank(factor, variances):
                total += (factor @ factor.T + variances.diag()).float() / len(core)
    factors = (usual / total.diagonal().clamp_min(1e-30)).sqrt()
    return Gram(total * factors * factors[:, None])


def _covariance(
    surrogates: Sequence[Surrogate], spread: Tensor, usual: Tensor, rank: int
) -> Gram | LowRank:
    """Covariance with variances `usual` (d,) and the directions of the core sites, if the family
    has directions.
    """
    middle = coordinate_median(spread, torch.ones(len(spread))).float()
    order = (spread.clamp_min(0).sqrt() - middle.clamp_min(0).sqrt()).square().sum(1).argsort()
    core = order[: max(1, round(CORE * len(spread)))].tolist()
    floor = RELATIVE_FLOOR * float(usual.mean()) + 1e-30
    if any(isinstance(each.mixtures.covariance, Gram) for each in surrogates):
        return _whole([surrogates[index] for index in core], usual.clamp_min(floor))
    factors = [
        table.factor.float()
        for index in core
        if isinstance(table := surrogates[index].mixtures.covariance, LowRank)
    ]
    if not factors:
        return LowRank(torch.zeros(len(usual), 0), usual.clamp_min(floor))
    left, values, _ = torch.linalg.svd(
        torch.cat(factors, 1) / len(factors) ** 0.5, full_matrices=False
    )
    factor = left[:, :rank] * values[:rank]
    # The directions must not exceed the total variance of a dimension.
    explained = factor.square().sum(1)
    factor = factor * (usual / explained.clamp_min(1e-30)).clamp_max(1.0).sqrt()[:, None]
    return LowRank(factor, (usual - factor.square().sum(1)).clamp_min(floor))
