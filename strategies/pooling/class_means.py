"""Noisy class means of many sites: pooled, or shrunk towards the pooled mean by the part of
differences due to chance.

Noisy class means whose differences are mostly chance along the own mean of features, or across it.

Where classes differ in their level alone, one direction tells them apart, and all others hold noise
that a head would give as much weight as it is large. The own mean is known to be one direction
(`common/privacy/own_mean.py`), so both parts are judged alone.

Lengths of noisy class means, shrunk towards what all classes have in common.

A mean is a noisy sum over a noisy count. The noise of the count makes it longer or shorter, and a
head takes a long mean for a class that is far from the others. Lengths of all classes together are
known far better than that of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.privacy.gaussian_mechanism import public_signs
from fedsurrogate.common.privacy.own_mean import OwnParts
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


# A part of which less is left than this share of the other's is shrunk.
MOSTLY = 0.2


def shrink_directions(pooled: Components, own: OwnParts) -> Components:
    """Class means of which the differences along the own mean, along the length, or across both, are
    shrunk where chance explains most of them. Chance includes privacy noise and sampling error. Were all
    shrunk, shares of classes would count for more.

    Args:
        pooled: one per class, as from `pool`.
        own: what features keep of both.

    Returns:
        The means and their noise; as they were where chance explains all differences.

    Source: James & Stein 1961, for blocks of dimensions.
    """
    means, d = pooled.means, pooled.means.shape[1]
    shares = pooled.records / pooled.records.sum()
    apart = torch.eye(len(shares), dtype=means.dtype) - shares
    differences = apart @ means
    lines = [torch.ones(d) / d**0.5, *([public_signs(d)] if own.length else [])]
    parts = [(1, differences @ line.outer(line).to(means)) for line in lines]
    parts.append((d - len(parts), differences - sum(part for _, part in parts)))
    sampling = (within(pooled) / d / pooled.records).diag()
    chance = float(shares @ (apart @ (pooled.noise + sampling) @ apart.T).diagonal())
    seen = [float(shares @ part.square().sum(1)) for _, part in parts]
    left = [
        max(0.0, 1 - size * chance / each) if each > 0 else 0.0
        for (size, _), each in zip(parts, seen, strict=True)
    ]
    if not any(left):
        return pooled
    kept = [each / max(left) if each < MOSTLY * max(left) else 1.0 for each in left]
    shrunk, noise = means - differences, torch.zeros_like(pooled.noise)
    for share, (size, part) in zip(kept, parts, strict=True):
        shrunk = shrunk + share * part
        mixing = torch.eye(len(shares), dtype=means.dtype) - (1 - share) * apart
        # On average over all dimensions, as noise is stated.
        noise += size / d * (mixing @ pooled.noise @ mixing.T)
    return replace(pooled, means=shrunk, noise=noise)


# With fewer lengths, their spread says too little of how classes differ.
FEWEST = 4
# Smallest squared length that is told from noise, and the largest change of a length.
SHORTEST, MOST = 1e-3, 2.0


def even_lengths(
    pooled: Components, own: Components, of_count: Tensor, of_sum: Tensor
) -> Components:
    """Class means with lengths as they are expected given the noise.

    The logarithm of a length is taken as normal around one value for all classes, with the variance
    by which lengths differ beyond their noise (DerSimonian & Laird 1986). Noise of a count changes
    it by the count's relative error; noise of a sum adds to its square.

    Args:
        pooled: one per class, as from `pool`.
        own: one per class and site, as from `by_site`, that were pooled.
        of_count: standard deviation of the noise in the count of each of these, (J,).
        of_sum: the same in an entry of its sum, (J,).

    Returns:
        The means, longer or shorter, and their noise. With fewer than four classes as they were.

    Source: Efron & Morris 1975, for the logarithms of lengths.
    """
    if len(pooled.labels) < FEWEST:
        return pooled
    shares = mixing_of(own, 2.0).square()
    by_count = shares @ (of_count / own.records).square()
    by_sum = shares @ (of_sum / own.records).square()
    d = pooled.means.shape[1]
    squares = (pooled.means.square().sum(1) - d * by_sum).clamp_min(SHORTEST)
    error = by_count + (d * by_sum.square() / 2 + squares * by_sum) / squares.square()
    lengths, precision = squares.log() / 2, 1 / error
    middle = precision @ lengths / precision.sum()
    spread = precision @ (lengths - middle).square() - (len(lengths) - 1)
    between = float(spread / (precision.sum() - precision @ precision / precision.sum()))
    kept = max(0.0, between) / (max(0.0, between) + error)
    factors = ((1 - kept) * (middle - lengths)).exp().clamp(1 / MOST, MOST)
    # What the noise of counts adds to every dimension is as much smaller as the shrinkage leaves.
    noise = pooled.noise - ((1 - kept) * by_count * squares / d).diag()
    return replace(
        pooled,
        means=pooled.means * factors[:, None],
        noise=noise * torch.outer(factors, factors),
    )
