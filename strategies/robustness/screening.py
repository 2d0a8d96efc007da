"""The screen: finds sites whose class means disagree with those of the other sites. Functions on
tensors; no Flower types.

Each site is compared with the mean of all other sites. Four patterns make a site a suspect. Honest
sites with other classes, sizes and image styles show none of them (benchmarks/robustness.py
measures both):

far: the distance of a class mean, or of its variances, is much larger than the extent of the
others' data. moved: one class mean is far from the others', but the site's other classes are not.
Another scanner would move them all. label: the mean or a component of class c is near the others'
class c' and far from their class c, on which they agree, and the site's other classes are not off
in the same direction; or a class that too few sites have lies where the others have another class.
unrelated: the differences between its class means have nothing in common with the others'. This
test sums over all classes, because privacy noise hides it in each single class.

Distances are squared 2-Wasserstein (Bures-Wasserstein) distances. For Gaussians with diagonal
covariance, means m and standard deviations s, the closed form is |m - m'|^2 + |s - s'|^2. The part
expected from chance and privacy noise is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.strategies.base.defended import Suspect
from fedsurrogate.strategies.robustness.agreement import Pairs, correlations, unrelated
from fedsurrogate.strategies.robustness.class_points import KNOWN_BY, ClassPoints, standard_error
from fedsurrogate.strategies.robustness.component_screening import scores_of

# Thresholds of "label": how many times nearer (squared distance) to the others' class c' than to c;
# certain position on the line from c (0) to c' (1); squared distance to c, as a multiple of the
# others' own spread.
NEARER, ASIDE, DISAGREE = 6.0, 0.6, 1.5
# Thresholds of "far": squared distance as a multiple of the extent of the others' data; absolute
# for features of norm one.
FAR, FAR_OF_UNIT = 12.0, 4.0
# Threshold of "moved": squared distance as a multiple of the usual one, which is the largest of:
# the median of the site's other classes, the median of all sites, and `USUAL` times the distance
# between two classes.
MOVED, USUAL = 6.0, 0.5
# Allowance for chance in standard errors; a smaller one for nearness, which is only needed roughly.
# Factor of the variance along the line between two classes, which is larger than in the average
# dimension.
SIGMAS, ROUGHLY, ALONG = 3.5, 1.0, 16.0
# Records of a site in a class that count, as a multiple of the median site's; the default of
# `max-share`.
MOST = 3.0
# Numbers of a table that are compared at a time.
NUMBERS = 2**17


@dataclass(frozen=True)
class Compared:
    """Comparison of every site with the mean of the others. Distances are squared, with the noise
    subtracted.

    Attributes:
        own: distance to the others' same class, (S, C).
        nearest: distance to the nearest of their other classes, (S, C).
        other: the index of that class, (S, C).
        along: position between the two (0: own class, 1: other class), minus its standard errors,
            (S, C).
        aligned: the same, minus how far the site's other classes are off in this direction, (S, C).
        deviation: standard error of `own`, (S, C).
        spread: mean squared distance of the others' means from their mean, (S, C).
        judged: whether enough others have the class, (S, C).
        between: median squared distance between two classes of the others, (S,).
        extent: squared extent of all data around the origin of the scale.
        misplaced: for each site with parts, its index, the scores (P,) of its parts and the index
            of the nearest class for each part.
    """

    own: Tensor
    nearest: Tensor
    other: Tensor
    along: Tensor
    aligned: Tensor
    deviation: Tensor
    spread: Tensor
    judged: Tensor
    between: Tensor
    extent: float
    misplaced: tuple[tuple[int, Tensor, Tensor], ...] = ()


def screen(points: ClassPoints, single_parts: bool = False) -> list[Suspect]:
    """The sites whose class means disagree with those of the other sites.

    Args:
        points: class means of all sites.
        single_parts: whether only what is out of range is examined, and components that lie where
            the others have another class. For the rest, the influence of sites is bounded
            (bounded_influence.py).

    Returns:
        Suspects, the clearest first. After each one, the other sites are compared again without it,
        because it distorts the mean of the comparison. Never half of the sites or more: without a
        majority, the honest half is unknown.

    Example:
        Five sites have two classes. At the fifth, the labels are swapped.

        >>> means = torch.tensor([[[0.0, 0.0], [4.0, 0.0]]]).repeat(5, 1, 1)
        >>> means[4] = means[4].flip(0)
        >>> sites, counts = ("a", "b", "c", "d", "e"), torch.full((5, 2), 1000.0)
        >>> noise, none = 1 / counts, torch.zeros(5, 2)
        >>> points = ClassPoints(sites, ("0", "1"), means, counts, noise, none, none[:, 0], 2.0)
        >>> [(suspect.site, suspect.kind) for suspect in screen(points)]
        [('e', 'label')]
    """
    suspects: list[Suspect] = []
    most = (len(points.sites) - 1) // 2
    pairs = None if single_parts else correlations(points)
    while len(suspects) < most and (suspect := worst(points, pairs)) is not None:
        suspects.append(suspect)
        site = points.sites.index(suspect.site)
        points, pairs = points.without(site), pairs.without(site) if pairs else None
    return suspects


def worst(points: ClassPoints, pairs: Pairs | None) -> Suspect | None:
    """The site that disagrees most with the others.

    Args:
        points: class means of all sites.
        pairs: comparison of the same sites; None to examine single parts only.

    Returns:
        The suspect; None if no site exceeds a threshold.
    """
    if points.odd is not None and float(points.odd.max()) >= 1:
        return _odd(points, int(points.odd.argmax()))
    if not points.classes:
        return None
    compared = compare(points)
    kinds = [("far", far(points, compared))]
    if pairs is not None:
        kinds += [("moved", moved(compared)), ("label", label(compared))]
    for kind, scores in kinds:
        score = scores.sum(1) if kind == "label" else scores.amax(1)
        site = int(score.argmax())
        if score[site] >= 1:
            return _suspect(
                points, compared, kind, site, int(scores[site].argmax()), float(score[site])
            )
    if (suspect := _misplaced(points, compared)) is not None:
        return suspect
    if pairs is None:
        return None
    scores = unrelated(pairs, points.power > 1, points.means.shape[2])
    site = int(scores.argmax())
    if float(scores[site]) > 1:
        why = (
            "the differences between its class means have nothing in common with those of the "
            "other sites"
        )
        return Suspect(points.sites[site], "unrelated", float(scores[site]), why)
    return None


def compare(points: ClassPoints) -> Compared:
    """Compare every site with the mean of all others. In it, no site's weight exceeds that of the
    median site of a class.

    Args:
        points: class means of all sites.
    """
    usual = (
        points.counts.masked_fill(points.counts == 0, torch.nan).nanmedian(0).values.nan_to_num(0.0)
    )
    weights = points.counts.minimum(usual) ** points.power
    # At most those of the second largest site of a class, and MOST times the median's: no site
    # alone decides how many records the others have, and records that the cap on a site's weight
    # takes away do not hide a liar.
    second = points.counts.topk(min(2, len(points.counts)), 0).values[-1]
    records = points.counts.minimum(second).minimum(MOST * usual)
    # Some sites at a time: for ten thousand sites, one more table of their means would be the
    # largest in memory.
    sites, classes, d = points.means.shape
    at_once = max(1, NUMBERS // (classes * max(classes, d)))
    own_squares = torch.cat([some.square().sum(2) for some in torch.split(points.means, at_once)])
    everyone = _Sums(
        weights.sum(0),
        torch.einsum("sc,scd->cd", weights, points.means),
        (weights.square() * points.noise).sum(0),
        (weights * points.noise).sum(0),
        (weights * own_squares).sum(0),
        (weights > 0).sum(0),
        records.sum(0),
    )
    blocks = [
        _compare_some(
            points, weights, own_squares, records, everyone, slice(first, first + at_once)
        )
        for first in range(0, sites, at_once)
    ]
    lengths = own_squares[weights > 0]
    extent = points.within + (float(lengths.median()) if len(lengths) else 0.0)
    tables = {name: torch.cat([part[name] for part, _ in blocks]) for name in blocks[0][0]}
    return Compared(
        **tables, extent=extent, misplaced=tuple(each for _, parts in blocks for each in parts)
    )


@dataclass(frozen=True)
class _Sums:
    """Sums over all sites: weight (C,), weighted means (C, d), noise of the weighted sum and
    weighted noise (C,), weighted squared length (C,), the number of sites that have a class (C,),
    and records (C,).
    """

    weight: Tensor
    means: Tensor
    noise: Tensor
    noises: Tensor
    squares: Tensor
    knowing: Tensor
    records: Tensor


def _compare_some(
    points: ClassPoints,
    weights: Tensor,
    own_squares: Tensor,
    records: Tensor,
    everyone: _Sums,
    some: slice,
) -> tuple[dict[str, Tensor], list[tuple[int, Tensor, Tensor]]]:
    """The tables of `Compared` for n sites, and their misplaced parts."""
    means, own_noise, weight, d = (
        points.means[some],
        points.noise[some],
        weights[some],
        points.means.shape[2],
    )
    left = (everyone.weight - weight).clamp_min(1e-30)
    centres = (everyone.means - weight[..., None] * means) / left[..., None]
    noise = ((everyone.noise - weight.square() * own_noise) / left.square()).clamp_min(0)
    known = everyone.knowing - (weight > 0).int() >= KNOWN_BY - 1
    judged, same = known & (weight > 0), torch.eye(known.shape[1], dtype=torch.bool)
    both, summed = noise[:, :, None] + noise[:, None], own_noise + noise
    apart = _squares(centres, centres) - d * both
    squares = _squares(means, centres) - d * (own_noise[:, :, None] + noise[:, None])
    own = squares.diagonal(dim1=1, dim2=2)
    # If privacy noise hides the distance between two classes, a site cannot be accused of confusing
    # them.
    blurred = apart < SIGMAS * standard_error(apart, both, d)
    nearest, other = squares.masked_fill(~known[:, None] | blurred | same, torch.inf).min(2)
    length = apart.gather(2, other[..., None])[..., 0].clamp_min(1e-30)
    noise_of_both = both.gather(2, other[..., None])[..., 0]
    wide = (1.0 if points.power > 1 else ALONG) * (own_noise + noise_of_both)
    error = 2 * (length * wide).sqrt() + (2 * d) ** 0.5 * noise_of_both
    ways = centres.gather(1, other[..., None].expand_as(centres)) - centres
    error += 2 * points.stretch[some] * (centres * ways).sum(2).abs()
    scatter = (everyone.squares - weight * own_squares[some]) / left - centres.square().sum(2)
    spread = scatter - d * ((everyone.noises - weight * own_noise) / left - noise)
    pairs = known[:, :, None] & known[:, None] & ~same
    along = (own - nearest - SIGMAS * error) / (2 * length) + 0.5
    tables = {
        "own": own,
        "nearest": nearest,
        "other": other,
        "along": along,
        "aligned": along - _common(means - centres, ways, judged) / length,
        "deviation": standard_error(own, summed, d),
        "spread": spread,
        "judged": judged,
        "between": apart.masked_fill(~pairs, torch.nan)
        .flatten(1)
        .nanmedian(1)
        .values.clamp_min(0)
        .nan_to_num(0.0),
    }
    left_records = everyone.records - records[some]
    misplaced = [
        (
            some.start + row,
            *scores_of(
                parts,
                centres[row],
                known[row],
                noise[row],
                apart[row],
                spread[row],
                left_records[row],
            ),
        )
        for row, parts in enumerate(points.parts[some])
        if len(parts.points)
    ]
    return tables, misplaced


def far(points: ClassPoints, compared: Compared) -> Tensor:
    """Scores of "far".

    Args:
        points: class means of all sites.
        compared: comparison of the same sites.

    Returns:
        (S, C), at least 1 where the distance of a class, or of the site's variances, exceeds the
        limit.
    """
    apart = (compared.own - SIGMAS * compared.deviation).masked_fill(~compared.judged, 0.0)
    # Means of features of norm one have a distance of at most two; a noisy count may double the
    # length of a mean.
    most = FAR * compared.extent if points.power == 1 else FAR_OF_UNIT
    return torch.maximum(apart, points.shape[:, None]) / most


def label(compared: Compared) -> Tensor:
    """Scores of "label".

    Privacy noise hides the exact distance. Then the position between both classes decides, if it is
    certain enough.

    Args:
        compared: comparison of all sites.

    Returns:
        (S, C), at least 1 where a class is near another class of the others and far from its own.
    """
    near = NEARER * (compared.nearest - ROUGHLY * compared.deviation).clamp_min(0) <= compared.own
    agreed = compared.own > DISAGREE * compared.spread
    mislabelled = (
        near & agreed & (compared.along > ASIDE) & compared.judged & compared.nearest.isfinite()
    )
    # Another scanner moves all classes of a site in one direction, which may be that from one class
    # to another.
    mislabelled = mislabelled & (compared.aligned > ASIDE)
    return torch.where(mislabelled, 2 * compared.along, 0.0)


def moved(compared: Compared) -> Tensor:
    """Scores of "moved".

    Args:
        compared: comparison of all sites.

    Returns:
        (S, C), at least 1 where one class is far away, but neither its site nor the other sites
        are.
    """
    own = compared.own.masked_fill(~compared.judged, torch.nan)
    among = own.nanmedian()
    rest = torch.stack([_median_of_others(row) for row in own])
    usual = torch.maximum(torch.maximum(rest, among), USUAL * compared.between[:, None]).clamp_min(
        1e-30
    )
    return ((own - SIGMAS * compared.deviation) / (MOVED * usual)).nan_to_num(0.0)


def _common(offsets: Tensor, ways: Tensor, judged: Tensor) -> Tensor:
    """How far the other classes of a site are off in the direction in which one class is compared.

    Args:
        offsets: of each class from the same class of the other sites, (n, C, d).
        ways: from each class to the one that it may be confused with, (n, C, d).
        judged: which classes are compared at each site, (n, C).

    Returns:
        Median of the inner products with the offsets of the other classes, (n, C); 0 where there
        are none.
    """
    products = ways @ offsets.mT
    same = torch.eye(products.shape[1], dtype=torch.bool)
    others = products.masked_fill(same | ~judged[:, None], torch.nan)
    return others.nanmedian(2).values.nan_to_num(0.0)


def _median_of_others(row: Tensor) -> Tensor:
    """For every entry of (C,), the median of the other entries without NaN, or 0."""
    without = row.expand(len(row), -1).masked_fill(torch.eye(len(row), dtype=torch.bool), torch.nan)
    return without.nanmedian(1).values.nan_to_num(0.0)


def _squares(one: Tensor, two: Tensor) -> Tensor:
    """Squared distances (..., n, m) between rows, in double precision because small noise is
    subtracted later.
    """
    a, b = one.double(), two.double()
    lengths = a.square().sum(-1)[..., None] + b.square().sum(-1)[..., None, :]
    return torch.baddbmm(lengths, a, b.mT, alpha=-2).clamp_min(0).float()


def _odd(points: ClassPoints, site: int) -> Suspect:
    assert points.odd is not None
    why = "a component, or the spread of its data, is outside the range of the other sites' data"
    return Suspect(points.sites[site], "far", float(points.odd[site]), why)


def _misplaced(points: ClassPoints, compared: Compared) -> Suspect | None:
    """The site with the component that lies most clearly where the others have another class."""
    tops = [float(scores.max()) for _, scores, _ in compared.misplaced]
    if not tops or max(tops) < 1:
        return None
    site, scores, other = compared.misplaced[tops.index(max(tops))]
    index, top = int(scores.argmax()), float(scores.max())
    name, where = points.parts[site].names[index], points.classes[int(other[index])]
    why = f"a component of its class {name!r} lies where the other sites have class {where!r}"
    return Suspect(points.sites[site], "label", top, why)


def _suspect(
    points: ClassPoints, compared: Compared, kind: str, site: int, index: int, score: float
) -> Suspect:
    name = points.classes[index]
    if kind == "label":
        other = points.classes[int(compared.other[site, index])]
        why = (
            f"its class {name!r} lies where the other sites have class {other!r}, not where "
            f"they have {name!r}"
        )
        return Suspect(points.sites[site], "label", score, why)
    if kind == "far":
        why = (
            f"its class {name!r}, or the spread of its data, differs from the other sites by "
            "more than their data's extent"
        )
        return Suspect(points.sites[site], "far", score, why)
    why = (
        f"its class {name!r} is far from the same class at the other sites, but its other "
        "classes are not"
    )
    return Suspect(points.sites[site], "moved", score, why)
