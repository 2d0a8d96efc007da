"""Learn a head from noisy class sums in closed form. No Flower types.

A head trained on samples also learns the noise. The noise of the sums has a known distribution. So
this module subtracts the bias that noise adds to squares, and leaves out statistics that do not
stand out from the noise. Class means with one distributed noise are taken as they are expected given it.

So that probabilities mean what they say, all scores are multiplied by a slope in closed form; no decision
changes. Shares of classes, of which noisy counts and other hospitals may say little, then count for as
little as they did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import own_lines
from fedsurrogate.common.privacy.shares import ALL, REMOVED, weight_of
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.covariances import LowRank, eigen
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate

from ..base.outcome import ALIKE
from ..closed_form.solvers import ENOUGH_COLUMNS, Scores, cleaned, slope_of
from ..pooling.class_means import (
    Components,
    by_site,
    differ_across,
    differ_by_chance,
    even_lengths,
    noise_of_counts_and_sums,
    pool,
    shrink,
    shrink_directions,
)
from ..robustness.harm import OUT, largest

# If chance leaves more than this share of the differences between sites' class means unexplained,
# one mean per class is not enough.
SITES_DIFFER = 0.15
# Largest eigenvalue of the noise on a second moment, as a share of the variance within classes, up to
# which the second moment is used. Chosen on draws of CIFAR-10, PACS, digits and X-rays.
LOST = 0.1
# With more noise than that, up to the first, it is used where the directions that stand out have the second
# as a share of the variance: generated records that vary along five directions then gain 11 to 20 points;
# no other of nine such families, and no real features, have such a share.
NEARLY_LOST, STANDING = 0.3, 0.5
# Lower bound of the remaining variance, as a share of the total variance.
SMALLEST_SHARE = 1e-3
# Lower bound of a dimension's variance, as a share of the mean: small variances give large weights
# and are least certain.
SMALLEST_DIAGONAL = 0.1
# Numbers of sites of which a few do not choose the solver alone; by how much more harm least squares may
# do them than discriminants. Honest photos among sketches do up to four points more at epsilon 8.
FEWEST_SITES, MOST_SITES, SLACK = 4, 64, 0.05
# Keeps a linear system with nearly parallel directions solvable.
RIDGE = 1e-6


def learn_from_sums(
    surrogates: Sequence[SumsSurrogate], family: str, rank: int, rule: str = "none"
) -> tuple[Head, Mixtures]:
    """The linear head of noisy sums, and the Gaussians that correspond to it.

    If the sites' class means agree, the head is the linear discriminant of the pooled class means.
    If they differ (other scanners, other styles), and there are columns enough, it is the
    least-squares classifier of all sites' means. A second moment that is lost in its noise is not used.

    Args:
        surrogates: of one site or more, all with the same classes in the same order.
        family: "spherical" has one variance; "diag", "full" and "lowrank" use the covariance within
            classes that stands out from the noise, shared by all classes and sites; "distributed" cleans
            it for one distributed noise, and shrinks the means.
        rank: most directions of a "lowrank" covariance.
        rule: with "harm" a few sites, without which the others do not differ, choose least squares
            only if it lets them harm none of the others.

    Returns:
        The head and the mixtures. Classes lost in noise are left out of both.

    Raises:
        RunError: when no class stands out.
    """
    components, differ = _pooled(surrogates, family, rule)
    covariance, observed = observed_within(surrogates, components, family, rank)
    if family == "distributed":
        components, covariance = expected(components, covariance)
        observed = None
    combined = least_squares if differ > SITES_DIFFER else discriminant
    solved = combined(components, covariance)
    within = covariance, observed
    weight, bias = _calibrated(solved, components, within, family == "distributed")
    first = surrogates[0]
    header = replace(first.header, site="coordinator", classes=components.classes)
    head = Head(header, weight.float(), bias.float(), first.claim.clip)
    return head, _gaussians(components, covariance)


def _pooled(
    surrogates: Sequence[SumsSurrogate], family: str, rule: str
) -> tuple[Components, float]:
    """Class means of all sites, or of each where they differ; and by how much they do."""
    own = by_site(surrogates)
    of_count, of_sum = noise_of_counts_and_sums(surrogates)
    differ = _differ(surrogates) if own.means.shape[1] >= ENOUGH_COLUMNS else 0.0
    judges = rule == "harm" and FEWEST_SITES <= len(surrogates) <= MOST_SITES
    if differ > SITES_DIFFER and judges and (few := _few(surrogates)) and _harmful(surrogates, few):
        differ = 0.0
    if differ > SITES_DIFFER:
        return shrink(own)[0], differ
    pooled = pool(own)
    # One distributed noise is small, and `expected` shrinks its means.
    if family == "distributed":
        return pooled, differ
    pooled = even_lengths(pooled, own, of_count, of_sum)
    if (kept := weight_of(surrogates[0].claim.centre)) not in (ALL, REMOVED):
        pooled = shrink_directions(pooled, kept)
    return pooled, differ


def _few(surrogates: Sequence[SumsSurrogate]) -> list[int]:
    """The sites without which the others do not differ, a fifth of them at most; none if there are none."""
    left, few = list(range(len(surrogates))), list[int]()
    for _ in range(max(1, len(surrogates) // 5)):
        without = [_differ([surrogates[at] for at in left if at != one]) for one in left]
        differ = min(without)
        few.append(left.pop(without.index(differ)))
        if differ <= SITES_DIFFER:
            return few
    return []


def _harmful(surrogates: Sequence[SumsSurrogate], few: Sequence[int]) -> bool:
    """Whether least squares lets a few sites harm the others, as a site's own weight may not.

    The harm is what the others' records lose against discriminants without the few; by more than
    one in five of the sites, in a head that has not seen their records.
    """
    others = [at for at in range(len(surrogates)) if at not in few]
    harm = torch.full((2, len(surrogates)), -1.0, dtype=torch.float64)
    for judge in others:
        rest, core = (
            [surrogates[at] for at in kept if at != judge]
            for kept in (range(len(surrogates)), others)
        )
        try:
            best = _placed(surrogates[judge], core, differ=False)
            harm[:, judge] = torch.tensor(
                [best - _placed(surrogates[judge], rest, differ) for differ in (False, True)]
            )
        except RunError:
            # Without the judge no class stands out from the noise.
            continue
    pooled, apart = largest(harm).tolist()
    return bool(apart > min(OUT, max(0.0, pooled) + SLACK))


def _placed(judge: SumsSurrogate, surrogates: Sequence[SumsSurrogate], differ: bool) -> float:
    """The share of a site's records that the head of others places right, expected."""
    own, of_count, of_sum = by_site(surrogates), *noise_of_counts_and_sums(surrogates)
    components = shrink(own)[0] if differ else even_lengths(pool(own), own, of_count, of_sum)
    covariance = observed_within(surrogates, components, "spherical", 0)[0]
    head = (least_squares if differ else discriminant)(components, covariance)
    tested = by_site([judge])
    names = {name: row for row, name in enumerate(components.classes)}
    rows = torch.tensor([names.get(tested.classes[at], -1) for at in tested.labels.tolist()])
    known, means, noise = rows >= 0, tested.means, tested.noise.diagonal()
    scores = means @ head.weight.T + head.bias
    within = 1 / means.shape[1] - (means.square().mean(1) - noise).clamp(0, 1 / means.shape[1])
    apart = torch.cdist(head.weight[rows], head.weight).square() * (within + noise)[:, None]
    margin = (scores.gather(1, rows.clamp_min(0)[:, None]) - scores) / apart.clamp_min(1e-14).sqrt()
    margin.scatter_(1, rows.clamp_min(0)[:, None], torch.inf)
    right = torch.special.ndtr(margin.amin(1)) * known
    return float(right @ tested.records / tested.records.sum())


def _differ(surrogates: Sequence[SumsSurrogate]) -> float:
    """By how much sites differ significantly, from 0 to 1; 1 where no class stands out from noise."""
    try:
        own = by_site(surrogates)
    except RunError:
        return 1.0
    return min(shrink(own)[1], differ_across(own, noise_of_counts_and_sums(surrogates)[1]))


def alike_classes(surrogates: Sequence[SumsSurrogate]) -> dict[str, bool]:
    """Whether the class means of all sites together are alike, as a fact."""
    return {ALIKE: differ_by_chance(pool(by_site(surrogates)))}


def unused(surrogates: Sequence[SumsSurrogate], gaussians: Mixtures) -> str:
    """What the head of noisy sums does not use, as a sentence without its end; empty for nothing.

    Args:
        surrogates: of the sites.
        gaussians: of the head that was learned from them.
    """
    squares, covariance = surrogates[0].sums.squares, gaussians.covariance
    alike = isinstance(covariance, LowRank) and not covariance.factor.shape[1]
    if squares is None or len(squares) == surrogates[0].dimension or not alike:
        return ""
    return (
        "the second moment does not stand out from its noise by enough, so all directions have one "
        "variance"
    )


# The covariance within classes for a linear system, and as it was observed, with all its noise, (d, d);
# None where no second moment tells how dimensions vary together.
Within = tuple[LowRank, Tensor | None]


@dataclass(frozen=True)
class Combined:
    """A head whose weights are sums of the directions Sigma^-1 m_j of components.

    Attributes:
        directions: (J, d).
        mixing: of the directions in each class's weight, (C, J).
        bias: (C,).
        trace: of Sigma^-1.
    """

    directions: Tensor
    mixing: Tensor
    bias: Tensor
    trace: float

    @property
    def weight(self) -> Tensor:
        """Of the head, (C, d)."""
        return self.mixing @ self.directions


def discriminant(components: Components, covariance: LowRank) -> Combined:
    """Linear discriminant analysis with one component per class.

    Args:
        components: one per class, of C classes in d dimensions.
        covariance: around them.

    Returns:
        The head.
    """
    weight, trace = _times_inverse(covariance, components.means)
    # Noise lengthens a mean: its squared length in the metric of the covariance grows by noise
    # times trace on average.
    squares = (weight * components.means).sum(1) - components.noise.diagonal() * trace
    bias = (components.records / components.records.sum()).log() - squares / 2
    return Combined(weight, torch.eye(len(weight), dtype=weight.dtype), bias, trace)


def _calibrated(
    solved: Combined, components: Components, within: Within, distributed: bool
) -> tuple[Tensor, Tensor]:
    """Weight (C, d) and bias (C,) whose probabilities mean what they say.

    Discriminant analysis takes its weights and its covariance for true. New records differ less than
    it expects by the noise of the means, and vary by more along the differences of class means, which
    are not directions like any other.
    """
    directions, mixing, (covariance, observed) = solved.directions, solved.mixing, within
    noise = components.noise * solved.trace
    means = mixing @ (directions @ components.means.T - noise) + solved.bias[:, None]
    spread = spread_of(directions, covariance, noise, observed, distributed)
    scores = of_classes((means, mixing @ spread @ mixing.T), components)
    shares = components.records / components.records.sum()
    priors = shares @ one_hot(components.labels, len(components.classes)).to(shares)
    slope = slope_of(scores, priors)
    return slope * solved.weight, slope * solved.bias


def least_squares(components: Components, covariance: LowRank) -> Combined:
    """The affine scores that best fit 1 for a record's class and 0 for the others.

    A score is a weighted sum of the directions Sigma^-1 m_j of all components. On a record of
    component j, direction i has the mean m_i Sigma^-1 mu_j. The product of the two noisy means,
    minus their common noise, estimates it. The variance around it follows from Sigma and includes
    the direction's noise. So noise in the means acts as a penalty and is not learned (regression
    with errors in variables).

    Args:
        components: any number per class, of C classes in d dimensions.
        covariance: around them, Sigma.

    Returns:
        The head.
    """
    directions, trace = _times_inverse(covariance, components.means)
    scores = directions @ components.means.T - components.noise * trace
    spread = (directions @ covariance.factor) @ (directions @ covariance.factor).T
    spread += (directions * covariance.variances) @ directions.T
    count, shares = len(scores), components.records / components.records.sum()
    inputs = torch.cat([scores, scores.new_ones(1, count)])
    moments = (inputs * shares) @ inputs.T
    moments[:count, :count] += spread
    moments += RIDGE * moments.diagonal().mean() * torch.eye(count + 1, dtype=moments.dtype)
    wanted = one_hot(components.labels, len(components.classes)).to(moments)
    solved = torch.linalg.solve((moments + moments.T) / 2, (inputs * shares) @ wanted)
    return Combined(directions, solved[:count].T, solved[count], trace)


def observed_within(
    surrogates: Sequence[SumsSurrogate], components: Components, family: str, rank: int
) -> Within:
    """The covariance around the components, with the contribution of noise subtracted, and what was
    observed of it.

    Args:
        surrogates: of the sites, whose second moments are used.
        components: class means of these surrogates.
        family: as in `learn_from_sums`. "spherical" where a site has no second moment.
        rank: as in `learn_from_sums`.

    Returns:
        The covariance as factor (d, r) and variances (d,), float64. Where the second moment is lost
        in its noise, as for "spherical".
    """
    means, d = components.means, components.means.shape[1]
    noise_of_means = components.noise.diagonal()
    tables = [
        surrogate.sums.squares for surrogate in surrogates if surrogate.sums.squares is not None
    ]
    # For features of unit norm, variance is one minus the mean's squared length; for clipped
    # features, at most that.
    shares = components.records / components.records.sum()
    explained = float((shares * (means.square().sum(1) - d * noise_of_means)).sum())
    variance = max(1 - explained, SMALLEST_SHARE)
    alike = LowRank(
        torch.zeros(d, 0, dtype=torch.float64), torch.full((d,), variance / d, dtype=torch.float64)
    )
    if family == "spherical" or len(tables) < len(surrogates):
        return alike, None
    # Like the means, a site's second moment is weighted by its number of records.
    sizes = (
        torch.stack([surrogate.sums.counts for surrogate in surrogates])
        .double()
        .clamp_min(0)
        .sum(1)
    )
    total = float(sizes.square().sum())
    sigmas = torch.tensor(
        [surrogate.sums.sigmas["squares"] for surrogate in surrogates], dtype=torch.float64
    )
    noise = float((sizes * sigmas).norm()) / total
    second = torch.zeros_like(tables[0], dtype=torch.float64)
    for size, table in zip(sizes.tolist(), tables, strict=True):
        second.add_(table, alpha=size / total)
    excess = float((components.shares * noise_of_means).sum())
    if family == "diag":
        variances = second - components.shares @ means.square() + excess
        return _diagonal(variances, noise), None
    between = (components.shares[:, None] * means).T @ means
    matrix = unfold(second, d) - between + excess * torch.eye(d, dtype=torch.float64)
    if family == "distributed":
        return cleaned(matrix, noise), matrix
    lost = noise * math.sqrt(2 * d) / variance
    if lost > NEARLY_LOST:
        return alike, None
    found = _spiked(matrix, noise, rank if family == "lowrank" else None)
    standing = float(found.factor.square().sum())
    clear = lost <= LOST or standing >= STANDING * (standing + float(found.variances.sum()))
    found, observed = (found, matrix) if clear else (alike, None)
    if (own := weight_of(surrogates[0].claim.centre)) not in (ALL, REMOVED):
        found = _along_lines(found, matrix, noise, own_lines(d, own))
    return found, observed


def _along_lines(found: LowRank, matrix: Tensor, noise: float, lines: Tensor) -> LowRank:
    """The covariance, along the lines (k, d) of the mean and the length as it was observed: records vary
    by less along them than across, and they are known, so no direction is chosen by its noise.
    """
    if noise > float(found.variances.mean()) / 2:
        return found
    values, vectors = eigen(lines @ matrix @ lines.T)
    within = (vectors * values.clamp_min(noise)) @ vectors.T
    apart = torch.eye(len(matrix), dtype=matrix.dtype) - lines.T @ lines
    whole = found.factor @ found.factor.T + found.variances.diag()
    values, vectors = eigen(apart @ whole @ apart + lines.T @ within @ lines)
    above, base = values > values.min(), values.min()
    factor = vectors[:, above] * (values[above] - base).sqrt()
    return LowRank(factor, base.repeat(len(values)))


def _gaussians(components: Components, covariance: LowRank) -> Mixtures:
    order = components.labels.argsort(stable=True)
    labels, records = components.labels[order], components.records[order]
    totals = torch.zeros(len(components.classes), dtype=torch.float64).index_add_(
        0, labels, records
    )
    return Mixtures(
        totals.round().long().clamp_min(1),
        labels,
        (records / totals[labels]).float(),
        components.means[order].float(),
        LowRank(covariance.factor.float(), covariance.variances.float()),
    )


def _diagonal(variances: Tensor, noise: float) -> LowRank:
    """Variances (d,), each with noise of standard deviation `noise`, shrunk towards their mean by
    the share of their spread that is noise (James & Stein 1961).
    """
    mean = max(float(variances.mean()), 0.0) or 1.0
    spread = float((variances - mean).square().sum())
    kept = max(0.0, 1 - max(0, len(variances) - 3) * noise**2 / spread) if spread else 0.0
    drawn = (mean + kept * (variances - mean)).clamp_min(mean * SMALLEST_DIAGONAL)
    return LowRank(torch.zeros(len(variances), 0, dtype=torch.float64), drawn)


def _spiked(matrix: Tensor, noise: float, rank: int | None) -> LowRank:
    """Denoise a symmetric matrix (d, d) whose noise has standard deviation `noise` (off the
    diagonal noise / sqrt(2)).

    Eigenvalues of such noise fill a half circle of radius R = noise sqrt(2 d) around their centre.
    An eigenvalue at distance y > R from it moves to distance sqrt(y^2 - R^2), which is optimal for
    Frobenius loss (spiked Wigner model; Donoho, Gavish & Johnstone 2018). All others move to the
    centre. The trace stays: noise changes it little. With `rank`, at most that many eigenvalues
    stay above the centre and none below.
    """
    d = len(matrix)
    values, vectors = eigen(matrix)
    radius = noise * math.sqrt(2 * d)
    away = values - values.median()
    spikes = (away.square() - radius**2).clamp_min(0).sqrt() * away.sign() * (away.abs() > radius)
    if rank is not None:
        spikes = spikes.clamp_min(0)
        spikes[: max(0, d - rank)] = 0
    trace = max(float(values.sum()), 1e-12)
    centre = (trace - float(spikes.sum())) / d
    # A variance below the noise is only known to be small. Set to zero, it would get too large a
    # weight.
    kept = (centre + spikes).clamp_min(max(min(centre, radius), trace * SMALLEST_SHARE / d))
    base = float(kept.min())
    above = kept > base
    factor = vectors[:, above] * (kept[above] - base).sqrt()
    return LowRank(factor, torch.full((d,), base, dtype=torch.float64))


def _times_inverse(covariance: LowRank, means: Tensor) -> tuple[Tensor, float]:
    """means (C, d) times the inverse covariance, and the trace of that inverse, by Woodbury's
    identity.
    """
    factor, variances = covariance.factor, covariance.variances
    scaled = factor / variances[:, None]
    core = torch.linalg.inv(torch.eye(factor.shape[1], dtype=factor.dtype) + factor.T @ scaled)
    solved = means / variances - (means @ scaled) @ core @ scaled.T
    return solved, float((1 / variances).sum() - ((scaled @ core) * scaled).sum())


# What a covariance does not hold of how features vary together: records vary along the differences
# of class means as if that variance were one of so many dimensions, if it holds nothing, and if it
# holds the directions that stand out. Exact statistics have 17 to 63, and 20 to 106 (features of
# CIFAR-10 and PACS, pixels of X-rays and digits). With distributed noise, a cleaned covariance holds all
# directions; chosen on CIFAR-10.
DIMENSIONS, OTHER_DIMENSIONS, DISTRIBUTED_DIMENSIONS = 22.0, 66.0, 120.0


def of_classes(scores: Scores, components: Components) -> Scores:
    """The same by class, with the differences between a class's components in the spread.

    Args:
        scores: by component.
        components: of the classes.
    """
    shares = components.records / components.records.sum()
    belongs = one_hot(components.labels, len(components.classes)).to(shares)
    means = (scores[0] * shares) @ belongs / (shares @ belongs)
    apart = scores[0] - means[:, components.labels]
    return means, scores[1] + (apart * shares) @ apart.T


def spread_of(
    directions: Tensor,
    covariance: LowRank,
    noise: Tensor,
    observed: Tensor | None = None,
    distributed: bool = False,
) -> Tensor:
    """The covariance of the products of new records with directions.

    The covariance of a discriminant is too small along the directions that it gives weight to: it
    takes what does not stand out as alike in all directions, and directions were chosen by it. The
    larger one is taken of the observed covariance along them, and of a usual one.

    Args:
        directions: (J, d).
        covariance: from which they were made, around class means.
        noise: the part of their products with each other, in the metric of that covariance, that is
            noise, along which records vary as along any direction, (J, J).
        observed: the covariance with all its noise, (d, d); None if there is none.
        distributed: whether the covariance was released with one distributed noise.

    Returns:
        The covariance (J, J).
    """
    factor, (count, d) = directions @ covariance.factor, directions.shape
    known = covariance.factor.shape[1]
    unknown = OTHER_DIMENSIONS if known else DIMENSIONS
    along = max(1.0, d / (DISTRIBUTED_DIMENSIONS if distributed else unknown))
    rest = (directions * covariance.variances) @ directions.T - noise
    usual = factor @ factor.T + along * rest + noise
    if observed is None or count < 2:
        return usual
    seen = directions @ observed @ directions.T
    return max(usual, seen, key=_between)


def _between(spread: Tensor) -> float:
    """The sum of the variances of all differences."""
    return float(len(spread) * spread.trace() - spread.sum())


# Powers of the eigenvalues, and ratios of signal to noise, among which the spread of class means is
# chosen.
POWERS = torch.arange(0, 3.5, 0.5, dtype=torch.float64)
RATIOS = torch.linspace(-6, 20, 105, dtype=torch.float64).exp()


def expected(components: Components, covariance: LowRank) -> tuple[Components, LowRank]:
    """The class means as they are expected given the noise, and the covariance of a new record
    around them.

    The true means are taken as normal around their pooled mean, with a variance in the direction of
    each eigenvector of the covariance that is a multiple of a power of its eigenvalue. Both are
    those of the largest likelihood under the known noise (empirical Bayes). What stays uncertain
    about the means adds to the covariance, so their noise needs no other correction and becomes
    zero.

    Args:
        components: noisy class means, one per class.
        covariance: within classes.

    Returns:
        Both as they are expected. With fewer than two classes nothing is changed.
    """
    if len(components.means) < 2:
        return components, covariance
    matrix = covariance.factor @ covariance.factor.T + covariance.variances.diag()
    values, vectors = eigen(matrix)
    values = values.clamp_min(1e-12)
    shares = components.records / components.records.sum()
    centre = shares @ components.means
    apart, noise = (components.means - centre) @ vectors, components.noise.diagonal()
    spread = _spread(apart.square().sum(0) / (len(apart) - 1), values, float(shares @ noise))
    kept = spread / (spread + noise[:, None])
    means = centre + (kept * apart) @ vectors.T
    total = values + shares @ (kept * noise[:, None])
    base = float(total.min())
    uncertain = LowRank(vectors * (total - base).clamp_min(0).sqrt(), torch.full_like(values, base))
    return replace(components, means=means, noise=torch.zeros_like(components.noise)), uncertain


def _spread(noisy: Tensor, values: Tensor, noise: float) -> Tensor:
    """Variance (d,) of the true means by direction, from `noisy`, that of the noisy ones (d,), by
    largest likelihood.
    """
    shapes = (values / values.mean()) ** POWERS[:, None]
    shapes = shapes / shapes.mean(1, keepdim=True)
    whole = noise * (1 + RATIOS[:, None, None] * shapes)
    best = int((whole.log() + noisy / whole).sum(2).argmin())
    return whole.flatten(0, 1)[best] - noise
