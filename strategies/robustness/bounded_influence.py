"""Bounded influence of each site on the class means and covariances of a run. Functions on tensors.

A bound needs no guess about who is hostile. Each class mean of a site may lie as far from the robust
centre of all sites as the sites themselves differ, beyond chance and privacy noise. What is farther
is moved back to that distance, as in centred clipping (Karimireddy et al. 2021).

Honest sites of another kind lie far away too. So the sites' own data decide whether a site is moved
at all: it stays as it is, unless with it the pooled classes fit the other sites' records worse. This
harm is computed for each of the others; their median counts, so that a minority decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.strategies.pooling.robust_centres import coordinate_median

# Allowed distance from the centre: the larger of that by which the sites differ, and the one that
# moves the pooled mean by SHARE of the way to the nearest other class; and a standard error.
SHARE = 0.05
# Allowed variance of a site along any direction between classes, in multiples of the median site's.
WIDER = 2.0
# Harm that is no reason to move a site: root mean square, over classes, of the share of the others'
# records that it would turn wrong.
HARM = 0.01
# A harmful site is left out if a squared distance is so many times the allowed one.
OUT = 10.0
# Real records lie farther from their class mean than Gaussian ones: factor of their deviation.
TAILS = 2.0
# Of the sites with a class, one in so many, or one, may be hostile.
ONE_IN = 4
# Largest variance of a class mean, in units of the records' own, with which a site has the class.
NOISIEST = 1.0
# Sites with a class that are needed to tell which of them is wrong; and records that the others of a
# class need together to have as many votes as its largest site.
JUDGES, FEWEST = 3, 5.0
# Most directions between class means, and most others, in which harm is measured.
DIRECTIONS, OTHERS = 64, 64
# Ridge of covariances, as a share of their mean variance.
RIDGE = 0.02
# The median of n normal values has this many times the variance of their mean.
MEDIAN = math.pi / 2

# The covariances (S, k, k) of the sites' records around their class means, along k directions, which
# are the columns of a matrix (d, k).
Within = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SiteClasses:
    """The classes of S sites, in units of the deviation within classes.

    Attributes:
        means: (S, C, d), float64.
        counts: records, (S, C), float64; zero where a site does not have a class.
        noise: variance of every coordinate of a mean, by chance and privacy noise, (S, C), float64.
        power: the exponent that turns a count into a weight; 2 for noisy sums.
        within: None where the covariance is known to be the identity: the model has one variance,
            and the sites' differences are no part of it.
    """

    means: Tensor
    counts: Tensor
    noise: Tensor
    power: float = 1.0
    within: Within | None = None

    @property
    def has(self) -> Tensor:
        """Which site has which class, (S, C): where noise is not larger than the records' own
        spread. A mean that is all noise has hardly any weight in the sum, and judges nobody.
        """
        return (self.counts > 0) & (self.noise <= NOISIEST)

    @property
    def weights(self) -> Tensor:
        """Weights of the sites in the pooled mean of each class, (S, C)."""
        weights: Tensor = self.counts**self.power
        return weights / weights.sum(0).clamp_min(1e-300)


@dataclass(frozen=True)
class Bounds:
    """What bounded influence does to each site.

    Attributes:
        moves: what to add to the class means, (S, C, d); zero for sites that do no harm.
        scales: factors of the covariances, (S,); one for sites that do no harm.
        scores: squared distance over the allowed one, without what all classes of the site have in
            common, where JUDGES sites have the class; zero for sites that do no harm, (S, C).
        nearest: the class whose centre is nearest to each class mean, (S, C).
        harm: (S,).
    """

    moves: Tensor
    scales: Tensor
    scores: Tensor
    nearest: Tensor
    harm: Tensor


def bounds(sites: SiteClasses) -> Bounds:
    """The bounds of all sites.

    Args:
        sites: two or more, with at least one class.

    Example:
        Four sites have two classes at 0 and 8. The last one states 32 for the first class.

        >>> means = torch.tensor([[[0.0, 0.0], [8.0, 0.0]]], dtype=torch.float64).repeat(4, 1, 1)
        >>> means[3, 0, 0] = 32.0
        >>> counts = torch.full((4, 2), 100.0, dtype=torch.float64)
        >>> found = bounds(SiteClasses(means, counts, 1 / counts))
        >>> (found.harm > HARM).tolist(), (found.scores > OUT).any(1).tolist()
        ([False, False, False, True], [False, False, False, True])
        >>> found.moves[3].round().tolist()
        [[-30.0, 0.0], [0.0, 0.0]]
    """
    has = sites.has
    centres, blur = _centres(sites)
    known = has.any(0)
    between = centres[known] - centres[known].mean(0)
    rows = torch.linalg.svd(between, full_matrices=False)[2]
    lines = rows[: max(1, min(len(between) - 1, DIRECTIONS))].T
    off = torch.where(has[..., None], sites.means - centres, 0.0)
    along = off @ lines
    aside = off - along @ lines.T
    noise = sites.noise + blur
    room = SHARE * _ways(centres @ lines, blur, known) / sites.weights.clamp_min(1e-9)
    moves, scores = torch.zeros_like(off), torch.zeros_like(sites.counts)
    # Noise has as much length in every dimension, and most dimensions are not between classes.
    # Bounded apart, the few that are have a much smaller bound.
    for part, whole, dims, more in (
        (along, along @ lines.T, lines.shape[1], _within_lines(centres, blur, known)),
        (aside, aside, off.shape[2] - lines.shape[1], torch.zeros_like(blur)),
    ):
        squares = part.square().sum(2)
        allowed = _allowed(squares, noise, more, room, has, dims)
        alone = torch.minimum(squares, _apart(part, has).square().sum(2))
        factor = (allowed / squares.clamp_min(1e-300)).sqrt().clamp_max(1.0)
        moves += (factor - 1)[..., None] * whole
        scores = torch.maximum(scores, torch.where(has, alone / allowed.clamp_min(1e-300), 0.0))
    basis = lines if sites.within is None else _with_others(lines, aside, sites.weights)
    if sites.within is None:
        # Not expanded: torch's median of an expanded tensor returns uninitialised memory.
        covariances = torch.eye(basis.shape[1], dtype=off.dtype).repeat(len(off), 1, 1)
        scales = torch.ones(len(off), dtype=off.dtype)
    else:
        covariances = sites.within(basis)
        k = lines.shape[1]
        scales = _scales(covariances[:, :k, :k], sites.counts.sum(1))
    harm = _harm(sites, sites.means @ basis, moves @ basis, covariances, scales)
    kept = harm <= HARM
    judged = (has.sum(0) >= JUDGES) & ~kept[:, None]
    apart = torch.cdist(sites.means @ lines, (centres @ lines).expand(len(off), -1, -1))
    return Bounds(
        torch.where(kept[:, None, None], 0.0, moves),
        torch.where(kept, 1.0, scales),
        torch.where(judged, scores, 0.0),
        apart.masked_fill(~known, torch.inf).argmin(2),
        harm,
    )


def _centres(sites: SiteClasses) -> tuple[Tensor, Tensor]:
    """Coordinate medians of the class means (C, d), and the variance (C,) of their coordinates.
    No site has more votes than the median site of a class, unless the others know next to nothing
    of the class.
    """
    has, counts = sites.has, sites.counts
    usual = counts.masked_fill(~has, torch.nan).nanquantile(0.5, 0, interpolation="lower")
    own = counts.masked_fill(~has, 0.0)
    others = own.sum(0) - own.amax(0)
    votes = torch.where(others < FEWEST, own, own.minimum(usual.nan_to_num(0.0)))
    centres = torch.zeros_like(sites.means[0])
    for label in has.any(0).nonzero().flatten().tolist():
        own = has[:, label]
        centres[label] = coordinate_median(sites.means[own, label], votes[own, label])
    shares = votes / votes.sum(0).clamp_min(1e-300)
    return centres, MEDIAN * (shares.square() * sites.noise).sum(0)


def _apart(off: Tensor, has: Tensor) -> Tensor:
    """Distance of each class of a site from its place, less that of the site's other classes.

    Another scanner moves all classes together. It is bounded, and no reason to leave a site out.

    Args:
        off: from the centres, zero where a site does not have a class, (S, C, d).
        has: (S, C).

    Returns:
        (S, C, d).
    """
    classes = has.sum(1)[:, None, None]
    others = (off.sum(1, keepdim=True) - off) / (classes - 1).clamp_min(1)
    return torch.where((classes > 1) & has[..., None], off - others, off)


def _ways(centres: Tensor, blur: Tensor, known: Tensor) -> Tensor:
    """Distance from each class to the nearest other one, (C,), without noise."""
    both = blur[:, None] + blur
    squares = torch.cdist(centres, centres).square() - centres.shape[1] * both
    others = known & ~torch.eye(len(known), dtype=torch.bool)
    ways: Tensor = squares.clamp_min(0).masked_fill(~others, torch.inf).min(1).values.sqrt()
    return ways


def _within_lines(centres: Tensor, blur: Tensor, known: Tensor) -> Tensor:
    """Squared length (C,) of a centre's own noise along the lines between centres.

    A line to a centre of few records leads along this centre's noise, of which the lines then hold
    as much as all dimensions have, and not only their share.
    """
    noise = centres.shape[1] * blur
    apart = (centres - centres[known].mean(0)).square().sum(1)
    return noise.square() / torch.maximum(apart, noise).clamp_min(1e-300)


def _allowed(
    squares: Tensor, noise: Tensor, more: Tensor, room: Tensor, has: Tensor, dims: int
) -> Tensor:
    """Allowed squared distances from the centres, (S, C). By chance alone they are `noise` in each
    dimension, and `more`.

    The sites' spread is that of a site within the majority: the largest without those that may be
    hostile. For a class of too few sites it is the median class's.
    """
    holders, chance = has.sum(0), dims * noise + more
    rank = (holders - (holders // ONE_IN).clamp_min(1) - 1).clamp_min(0)
    beyond = (squares - chance).clamp_min(0).masked_fill(~has, torch.inf)
    spread = beyond.sort(0).values.gather(0, rank[None])[0]
    judged = holders >= JUDGES
    usual = spread[judged].median() if judged.any() else spread.new_zeros(())
    spread = torch.where(judged, spread, usual)
    limit = torch.maximum(spread, room.square())
    error = math.sqrt(2 * dims) * noise + 2 * (limit * (noise + more)).sqrt()
    return limit + chance + error


def _with_others(lines: Tensor, aside: Tensor, weights: Tensor) -> Tensor:
    """Orthonormal directions (d, k): those between classes first, then those in which sites differ
    most.
    """
    rows = (weights.sqrt()[..., None] * aside).flatten(0, 1)
    left = min(OTHERS, lines.shape[0] - lines.shape[1])
    others = torch.linalg.svd(rows, full_matrices=False)[2][:left].T
    basis: Tensor = torch.linalg.qr(torch.cat([lines, others], 1))[0]
    return basis


def _scales(covariances: Tensor, records: Tensor) -> Tensor:
    """Factors (S,) of covariances (S, k, k) after which no variance of a site along any direction
    exceeds WIDER times the median site's, beyond chance (Marchenko & Pastur 1967).
    """
    values, vectors = torch.linalg.eigh(covariances.median(0).values)
    whitening = vectors / values.clamp_min(0.05 * float(values.mean()) + 1e-300).sqrt()
    widest = torch.linalg.eigvalsh(whitening.T @ covariances @ whitening)[:, -1]
    chance = (1 + (covariances.shape[1] / records.clamp_min(1)).sqrt()).square()
    scales: Tensor = (WIDER * chance / widest.clamp_min(1e-300)).clamp_max(1.0)
    return scales


def _harm(
    sites: SiteClasses, means: Tensor, moves: Tensor, covariances: Tensor, scales: Tensor
) -> Tensor:
    """How much worse the classes fit the other sites' records if a site is not bounded but all
    others are, (S,).

    Args:
        sites: of which counts and power are used.
        means: in k directions, (S, C, k).
        moves: of the bounded sites, (S, C, k).
        covariances: (S, k, k).
        scales: of the bounded covariances, (S,).
    """
    has, weights = sites.has, sites.counts**sites.power
    test = _ridged(covariances.median(0).values)

    def right(chosen: Tensor, factors: Tensor) -> Tensor:
        pooled = _pooled(means + chosen, weights, sites.within is not None)
        within = (weights.sum(1) * factors) @ covariances.flatten(1) / weights.sum()
        return _right(means, *pooled, _ridged(within.view_as(test)), test)

    bounded, harm = right(moves, scales), torch.zeros(len(means), dtype=means.dtype)
    for site in range(len(means)):
        if not moves[site].any() and scales[site] >= 1:
            continue
        chosen, factors = moves.clone(), scales.clone()
        chosen[site], factors[site] = 0.0, 1.0
        lost = (bounded - right(chosen, factors)).masked_fill(~has, torch.nan)
        lost[site] = torch.nan
        by_class = lost.nanquantile(0.5, 0)[has.any(0)].nan_to_num(0.0).clamp_min(0)
        harm[site] = by_class.square().mean().sqrt()
    return harm


def _pooled(means: Tensor, weights: Tensor, scatter: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled class means (C, k), the classes' weights (C,), and the sites' scatter (k, k)."""
    totals = weights.sum(0)
    pooled = (weights[..., None] * means).sum(0) / totals.clamp_min(1e-300)[:, None]
    rows = (weights.sqrt()[..., None] * (means - pooled)).flatten(0, 1)
    between = rows.T @ rows / weights.sum() if scatter else rows.new_zeros(2 * rows.shape[1:])
    return pooled, totals, between


def _right(
    own: Tensor, pooled: Tensor, totals: Tensor, scatter: Tensor, within: Tensor, test: Tensor
) -> Tensor:
    """Probability (S, C) that a discriminant of the pooled classes prefers the class of a site's
    records over any single other one.
    """
    known = totals > 0
    weight = torch.linalg.solve(within + scatter, pooled[known].T).T
    bias = (totals[known] / totals.sum()).log() - (weight * pooled[known]).sum(1) / 2
    scores = own[:, known] @ weight.T + bias
    gaps = scores.diagonal(dim1=1, dim2=2)[..., None] - scores
    gram = weight @ test @ weight.T
    squares = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    margins = gaps / (TAILS * squares.clamp_min(1e-12).sqrt())
    margins.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    right = torch.ones_like(own[..., 0])
    right[:, known] = torch.special.ndtr(margins.amin(2))
    return right


def _ridged(matrix: Tensor) -> Tensor:
    ridge = RIDGE * float(matrix.diagonal().mean()) + 1e-300
    ridged: Tensor = matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype)
    return ridged
