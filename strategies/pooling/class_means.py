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

# By how many standard deviations chance may exceed its expectation.
DEVIATIONS = 3.0


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
    sigmas = _sigmas(surrogates)
    present = _present(surrogates)
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


def noise_of_counts_and_sums(surrogates: Sequence[SumsSurrogate]) -> tuple[Tensor, Tensor]:
    """Standard deviations of the noise in the counts and in the sums of the components of `by_site`.

    Args:
        surrogates: as in `by_site`.

    Returns:
        Of the count of each component, and of an entry of its sum, (J,) each.
    """
    site, _ = _present(surrogates).nonzero().T
    of_count, of_sum = _sigmas(surrogates)[site].T
    return of_count, of_sum


def _sigmas(surrogates: Sequence[SumsSurrogate]) -> Tensor:
    """Standard deviations of the noise in counts and in sums by site, (J, 2)."""
    return torch.tensor(
        [[s.sums.sigmas["counts"], s.sums.sigmas["sums"]] for s in surrogates], dtype=torch.float64
    )


def _present(surrogates: Sequence[SumsSurrogate]) -> Tensor:
    """Whether a class stands out from the noise at a site, (sites, classes)."""
    counts = torch.stack([s.sums.counts for s in surrogates]).double()
    return counts > PRESENT * _sigmas(surrogates)[:, :1]


def pool(own: Components) -> Components:
    """One mean per class: the sites' means, weighted by inverse variance.

    The noise of a site's class mean has variance sigma^2 / n^2, so the best weight is n^2. A site
    with few records of a class then adds little noise to it. In a plain sum, the noise of all sites
    counts fully.

    Args:
        own: one per class and site, as from `by_site`.

    Returns:
        Components, one per class.
    """
    mixing = mixing_of(own, 2.0)
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
    share = _unexplained(own, mixing_of(own, 2.0))
    pooled = mixing_of(own, 2.0 - share)[own.labels]
    mixing = pooled + share * (torch.eye(len(own.labels), dtype=torch.float64) - pooled)
    return replace(own, means=mixing @ own.means, noise=mixing @ own.noise @ mixing.T), share


def differ_across(own: Components, of_sum: Tensor) -> float:
    """The share of the differences between sites' means of a class that chance does not explain,
    across the class mean. Chance may be three standard deviations above what is expected of it.

    A noisy count makes a mean longer or shorter, and little else, and does so by much where a site
    has few records. So the part of a difference along the class mean says little of sites.

    Args:
        own: one per class and site, as from `by_site`.
        of_sum: standard deviation of the noise in an entry of each sum, (J,).

    Returns:
        The share, from 0 to 1.
    """
    mixing = mixing_of(own, 2.0)
    pooled = torch.nn.functional.normalize((mixing @ own.means)[own.labels], dim=1)
    apart = torch.eye(len(own.labels), dtype=torch.float64) - mixing[own.labels]
    differences = apart @ own.means
    across = differences - (differences * pooled).sum(1, keepdim=True) * pooled
    d = own.means.shape[1]
    chance = (of_sum / own.records).square() + within(own) / d / own.records
    # The sum is a quadratic form of normal means: its mean and variance under chance alone.
    root = own.records.sqrt()[:, None] * apart * chance.sqrt()
    form = root.T @ root
    expected = (d - 1) * float(form.trace()) + DEVIATIONS * math.sqrt(2 * (d - 1)) * float(
        form.norm()
    )
    seen = float(own.records @ across.square().sum(1))
    return max(0.0, 1 - expected / seen) if seen > 0 else 0.0


def mixing_of(own: Components, power: float) -> Tensor:
    """Weights (C, J) of the sites' means in each class mean: proportional to records ** power, each
    row sums to one.

    Args:
        own: one per class and site, as from `by_site`.
        power: 2 weighs by certainty, 1 by records, 0 gives each site one vote.
    """
    weights = one_hot(own.labels).double().T * own.records**power
    return weights / weights.sum(1, keepdim=True)


def _unexplained(own: Components, mixing: Tensor) -> float:
    """The share of the differences between sites' means of a class, weighed by records, that chance
    does not explain.
    """
    d = own.means.shape[1]
    chance = own.noise + (within(own) / d / own.records).diag()
    apart = torch.eye(len(own.labels), dtype=torch.float64) - mixing[own.labels]
    differences = float(own.records @ (apart @ own.means).square().sum(1))
    expected = d * float(own.records @ (apart @ chance @ apart.T).diagonal())
    return max(0.0, 1 - expected / differences) if differences > 0 else 0.0


def within(own: Components) -> float:
    """Variance of records around the mean of their class and site, over all dimensions together.

    For features of unit norm it is one minus the mean's squared length; for clipped features, at
    most that.
    """
    noise, d = own.noise.diagonal(), own.means.shape[1]
    lengths = own.means.square().sum(1) - d * noise
    return max(0.0, 1 - float(own.records @ lengths / own.records.sum()))
