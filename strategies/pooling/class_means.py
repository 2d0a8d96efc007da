"""Noisy class means of many sites: pooled, or shrunk towards the pooled mean by the part of
differences due to chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.surrogates.class_sums import PRESENT
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate
from fedsurrogate.strategies.pooling.robust_centres import robust_mean


@dataclass(frozen=True)
class Components:
    """J class means that stand out from the noise: one per class, or one per class and site.

    Attributes:
        classes: names, C.
        labels: indices into `classes`, (J,).
        means: (J, d).
        noise: covariance of their noise, (J, J), the same in every dimension.
        records: of each mean, (J,).
        shares: the part of the pooled second moment, which is weighted by site size, from each
            mean, (J,).
    """

    classes: tuple[str, ...]
    labels: Tensor
    means: Tensor
    noise: Tensor
    records: Tensor
    shares: Tensor


def by_site(surrogates: Sequence[SumsSurrogate]) -> Components:
    """The mean of every class at every site where it stands out from noise.

    Args:
        surrogates: noisy sums of the sites, with the same classes in the same order.

    Returns:
        Components, one per class and site, float64; their classes are those that stand out at some
        site.

    Raises:
        RunError: when no class stands out.
    """
    counts, sums = (
        torch.stack([getattr(s.sums, name) for s in surrogates]).double()
        for name in ("counts", "sums")
    )
    sigmas = torch.tensor(
        [[s.sums.sigmas["counts"], s.sums.sigmas["sums"]] for s in surrogates], dtype=torch.float64
    )
    present = counts > PRESENT * sigmas[:, :1]
    if not present.any():
        raise RunError(
            "no class stands out from the privacy noise; more records, more sites or a larger "
            "epsilon are needed"
        )
    site, label = present.nonzero().T
    kept = present.any(0)
    names = tuple(
        name for name, keep in zip(surrogates[0].header.classes, kept.tolist(), strict=True) if keep
    )
    records, sigma_of_count, sigma_of_sum = counts[present], *sigmas[site].T
    means = sums[present] / records[:, None]
    # A noisy count scales a mean. In quadratic forms this acts like extra noise, spread over all
    # dimensions.
    length = (means.square().mean(1) - (sigma_of_sum / records).square()).clamp_min(0)
    noise = (sigma_of_sum.square() + length * sigma_of_count.square()) / records.square()
    weights = records * counts.clamp_min(0).sum(1)[site]
    return Components(
        names,
        (kept.cumsum(0) - 1)[label],
        means,
        noise.diag(),
        records,
        weights / weights.sum(),
    )


def pool(surrogates: Sequence[SumsSurrogate]) -> Components:
    """One mean per class: the sites' means, weighted by inverse variance.

    The noise of a site's class mean has variance sigma^2 / n^2, so the best weight is n^2. A site
    with few records of a class then adds little noise to it. In a plain sum, the noise of all sites
    counts fully.

    Args:
        surrogates: as in `by_site`.

    Returns:
        Components, one per class.

    Raises:
        RunError: as in `by_site`.
    """
    own = by_site(surrogates)
    mixing = _mixing(own, 2.0)
    totals = one_hot(own.labels).double()
    return Components(
        own.classes,
        torch.arange(len(own.classes)),
        mixing @ own.means,
        mixing @ own.noise @ mixing.T,
        own.records @ totals,
        own.shares @ totals,
    )


def shrink(own: Components) -> tuple[Components, float]:
    """Shrink sites' means towards their class mean by the part of their differences that is chance.

    The share that chance does not explain is 1 - (expected differences by chance) / (differences in
    the means). This share of each difference is kept. Chance includes privacy noise and sampling
    error. With a larger share, a class mean weights sites more by records and less by certainty.

    Args:
        own: one per class and site, as from `by_site`.

    Returns:
        The shrunk means, and the share, from 0 to 1.

    Source: James & Stein 1961.
    """
    share = _unexplained(own, _mixing(own, 2.0))
    pooled = _mixing(own, 2.0 - share)[own.labels]
    mixing = pooled + share * (torch.eye(len(own.labels), dtype=torch.float64) - pooled)
    return replace(own, means=mixing @ own.means, noise=mixing @ own.noise @ mixing.T), share


def robust(own: Components, rule: str) -> Components:
    """One mean per class by a robust rule over its sites.

    Each site has one vote: if reported counts were weights, a minority of sites could claim the
    majority of the weight.

    Args:
        own: one per class and site, as from `by_site`.
        rule: "median" or "trimmed".
    """
    plain, rows = _mixing(own, 0.0), [own.labels == label for label in range(len(own.classes))]
    means = torch.stack(
        [robust_mean(own.means[row], torch.ones(int(row.sum())), rule) for row in rows]
    )
    totals = one_hot(own.labels).double()
    # The median of normal noise has a larger variance than the mean, by pi / 2.
    noise = (plain @ own.noise @ plain.T) * (math.pi / 2 if rule == "median" else 1.0)
    labels = torch.arange(len(own.classes))
    return Components(own.classes, labels, means, noise, own.records @ totals, own.shares @ totals)


def _mixing(own: Components, power: float) -> Tensor:
    """Weights (C, J) of the sites' means in each class mean: proportional to records ** power, each
    row sums to one.
    """
    weights = one_hot(own.labels).double().T * own.records**power
    return weights / weights.sum(1, keepdim=True)


def _unexplained(own: Components, mixing: Tensor) -> float:
    """The share of the differences between sites' means of a class, weighed by records, that chance
    does not explain.
    """
    noise, d = own.noise.diagonal(), own.means.shape[1]
    # For features of unit norm, variance is one minus the mean's squared length; for clipped
    # features, at most that.
    within = max(
        0.0, 1 - float(own.records @ (own.means.square().sum(1) - d * noise) / own.records.sum())
    )
    chance = own.noise + (within / d / own.records).diag()
    apart = torch.eye(len(own.labels), dtype=torch.float64) - mixing[own.labels]
    differences = float(own.records @ (apart @ own.means).square().sum(1))
    expected = d * float(own.records @ (apart @ chance @ apart.T).diagonal())
    return max(0.0, 1 - expected / differences) if differences > 0 else 0.0
