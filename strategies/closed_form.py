"""Learn a head from noisy class sums in closed form. No Flower type in here.

A head trained on samples learns the noise along with the signal. The noise of sums is known exactly, so here it is
subtracted wherever it biases a square, and what does not stand out from it is left out. Nothing is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.covariances import LowRank
from common.errors import RunError
from common.mixtures import Mixtures
from common.sums import unfold
from common.surrogates import Head, Header, SumsSurrogate

# A noisy count within this many standard deviations of zero may belong to a class the site does not have.
PRESENT = 2.0
# What is left of the variance when all others have their part is kept above this share of it.
SMALLEST_SHARE = 1e-3
# A dimension of little variance gets a large weight, and its estimate is the least certain.
SMALLEST_DIAGONAL = 0.1


@dataclass(frozen=True)
class Pooled:
    """All sites' sums together, of the C classes that stand out (`kept`, a mask of the run's): means (C, d), the variance
    (C,) of the noise in each of their entries, and records (C,) of each class.
    """

    classes: tuple[str, ...]
    kept: Tensor
    means: Tensor
    noise: Tensor
    records: Tensor


def learn_from_sums(surrogates: Sequence[SumsSurrogate], family: str, rank: int) -> tuple[Head, Mixtures]:
    """The linear discriminant of the pooled sums, and the Gaussians it stands for. Classes lost in noise are left out.

    spherical: nearest class mean. diag, full and lowrank: with the within-class covariance, tied across classes and sites,
    as far as it stands out from the noise. All surrogates hold the same classes in the same order.
    Raises RunError when no class stands out, or there is nothing to learn from.
    """
    if not surrogates:
        raise RunError("no surrogate to learn from")
    for surrogate in surrogates:
        if surrogate.header.classes != surrogates[0].header.classes:
            raise RunError(f"noisy sums of site {surrogate.header.site!r} are of other classes than the others'")
    pooled = pool(surrogates)
    covariance = within(surrogates, pooled, family, rank)
    weight, trace = _solve(covariance, pooled.means)
    # A noisy mean is longer than the mean, in the metric of the covariance by noise times trace.
    squares = (weight * pooled.means).sum(1) - pooled.noise * trace
    shares = pooled.records / pooled.records.sum()
    first = surrogates[0]
    header = Header(first.header.method, first.header.run, "coordinator", first.header.fingerprint, pooled.classes)
    head = Head(header, weight.float(), (shares.log() - squares / 2).float(), first.claim.clip)
    count = len(pooled.classes)
    gaussians = Mixtures(
        pooled.records.round().long().clamp_min(1),
        torch.arange(count),
        torch.ones(count),
        pooled.means.float(),
        LowRank(covariance.factor.float(), covariance.variances.float()),
    )
    return head, gaussians


def pool(surrogates: Sequence[SumsSurrogate]) -> Pooled:
    """Class means over all sites, each site's mean weighted by the inverse of its variance.

    A site's mean of a class has noise of variance sigma^2 / n^2, so the best weights of the sums are its n: a site with a
    noisy count near zero adds no noise to a class it hardly has. For plain sums all sites' noise counts in full.
    """
    counts = torch.stack([surrogate.sums.counts for surrogate in surrogates]).double()
    sums = torch.stack([surrogate.sums.sums for surrogate in surrogates]).double()
    sigmas = torch.tensor([[s.sums.sigmas["counts"], s.sums.sigmas["sums"]] for s in surrogates], dtype=torch.float64)
    weights = torch.where(counts > PRESENT * sigmas[:, :1], counts, 0.0)
    kept = weights.sum(0) > 0
    if not kept.any():
        raise RunError("no class stands out from the privacy noise; more records, more sites or a larger epsilon are needed")
    counts, sums, weights = counts[:, kept], sums[:, kept], weights[:, kept]
    total = (weights * counts).sum(0)
    means = (weights[:, :, None] * sums).sum(0) / total[:, None]
    noise = (weights * sigmas[:, 1:]).square().sum(0) / total.square()
    names = tuple(name for name, keep in zip(surrogates[0].header.classes, kept.tolist(), strict=True) if keep)
    return Pooled(names, kept, means, noise, weights.sum(0))


def within(surrogates: Sequence[SumsSurrogate], pooled: Pooled, family: str, rank: int) -> LowRank:
    """The covariance within classes, as factor and variances, without what noise adds to it."""
    d = pooled.means.shape[1]
    tables = [surrogate.sums.squares for surrogate in surrogates if surrogate.sums.squares is not None]
    if family == "spherical" or len(tables) < len(surrogates):
        # Of a feature of unit norm, what is not in its class's mean is variance. A clip norm makes that a bound.
        shares = pooled.records / pooled.records.sum()
        explained = float((shares * (pooled.means.square().sum(1) - d * pooled.noise)).sum())
        variance = max(1 - explained, SMALLEST_SHARE) / d
        return LowRank(torch.zeros(d, 0, dtype=torch.float64), torch.full((d,), variance, dtype=torch.float64))
    counts = torch.stack([surrogate.sums.counts[pooled.kept] for surrogate in surrogates]).double().clamp_min(0)
    sizes = counts.sum(1)
    # As with the means, a site's second moment weighs as its records do.
    total = float(sizes.square().sum())
    second = torch.zeros_like(tables[0], dtype=torch.float64)
    for size, table in zip(sizes.tolist(), tables, strict=True):
        second.add_(table, alpha=size / total)
    sigmas = torch.tensor([surrogate.sums.sigmas["squares"] for surrogate in surrogates], dtype=torch.float64)
    noise = float((sizes * sigmas).norm()) / total
    shares = (sizes[:, None] * counts).sum(0) / total
    excess = float((shares * pooled.noise).sum())
    if family == "diag":
        return _diagonal(second - shares @ pooled.means.square() + excess, noise)
    between = (shares[:, None] * pooled.means).T @ pooled.means
    matrix = unfold(second, d) - between + excess * torch.eye(d, dtype=torch.float64)
    return _spiked(matrix, noise, rank if family == "lowrank" else None)


def _diagonal(variances: Tensor, noise: float) -> LowRank:
    """Variances (d,), each with noise of standard deviation `noise`, drawn to their mean by as much as noise made them vary
    (James & Stein 1961).
    """
    mean = max(float(variances.mean()), 0.0) or 1.0
    spread = float((variances - mean).square().sum())
    kept = max(0.0, 1 - (len(variances) - 3) * noise**2 / spread) if spread else 0.0
    drawn = (mean + kept * (variances - mean)).clamp_min(mean * SMALLEST_DIAGONAL)
    return LowRank(torch.zeros(len(variances), 0, dtype=torch.float64), drawn)


def _spiked(matrix: Tensor, noise: float, rank: int | None) -> LowRank:
    """A symmetric matrix (d, d) with noise of `noise` (off the diagonal over sqrt(2)) as spikes on a sphere.

    The eigenvalues of such noise fill a half circle of radius R = noise sqrt(2 d) about their centre. One at distance y > R
    is best replaced by one at sqrt(y^2 - R^2) for Frobenius loss (spiked Wigner model; Donoho, Gavish & Johnstone 2018),
    one within it by the centre. The trace, of which noise takes little, is kept. With `rank` only so many spikes, upwards.
    """
    d = len(matrix)
    values, vectors = torch.linalg.eigh(matrix)
    radius = noise * math.sqrt(2 * d)
    away = values - values.median()
    spikes = (away.square() - radius**2).clamp_min(0).sqrt() * away.sign() * (away.abs() > radius)
    if rank is not None:
        spikes = spikes.clamp_min(0)
        spikes[: max(0, d - rank)] = 0
    trace = max(float(values.sum()), 1e-12)
    centre = (trace - float(spikes.sum())) / d
    # A variance smaller than the noise is only known to be small; taken for zero it would outweigh everything.
    kept = (centre + spikes).clamp_min(max(min(centre, radius), trace * SMALLEST_SHARE / d))
    base = float(kept.min())
    above = kept > base
    factor = vectors[:, above] * (kept[above] - base).sqrt()
    return LowRank(factor, torch.full((d,), base, dtype=torch.float64))


def _solve(covariance: LowRank, means: Tensor) -> tuple[Tensor, float]:
    """means (C, d) times the inverse covariance, and the trace of that inverse, by Woodbury's identity."""
    factor, variances = covariance.factor, covariance.variances
    scaled = factor / variances[:, None]
    core = torch.linalg.inv(torch.eye(factor.shape[1], dtype=factor.dtype) + factor.T @ scaled)
    solved = means / variances - (means @ scaled) @ core @ scaled.T
    return solved, float((1 / variances).sum() - ((scaled @ core) * scaled).sum())
