"""Table of the class means of many sites, in a common scale, for the screen. No Flower types."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.surrogates.class_sums import PRESENT
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate
from fedsurrogate.strategies.robustness.reach import FEWEST, Moments, Reach
from fedsurrogate.strategies.robustness.second_moments import oddness

# Minimum number of sites with a class to judge it: with two sites that disagree, the wrong one is
# unknown.
KNOWN_BY = 3
# Largest distance in standard deviations within classes. Larger ones are cut off, so that squares
# stay finite.
FARTHEST = 1e6
# Lower bound of a dimension's variance, as a share of the mean variance: some pixels are nearly
# constant.
FLOOR = 0.01


@dataclass(frozen=True)
class Parts:
    """P points of one site that are judged one by one: components of classes with several
    components, and means of classes that too few other sites have.

    Attributes:
        points: (P, d), in the scale of the class means.
        labels: class index, or -1 if too few sites have it, (P,).
        noise: variance by chance, (P,).
        names: P class names.
    """

    points: Tensor
    labels: Tensor
    noise: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class ClassPoints:
    """Means of S sites and C classes in d dimensions.

    Attributes:
        sites: S names.
        classes: C names.
        means: (S, C, d).
        counts: records, (S, C); zero where a site has too few records of a class, or its count does
            not stand out from the privacy noise.
        noise: variance of every coordinate of a mean, by chance and privacy noise, (S, C).
        stretch: relative standard error of a mean's length, due to the noisy count, (S, C).
        shape: squared Bures distance between the diagonals of a site's and the median site's
            covariance within classes, (S,); zero where a site has too few records for one.
        within: sum of all variances within classes.
        power: the exponent that turns a count into a weight; 2 for noisy sums.
        odd: at least 1 if any part of a site is outside the range of the other sites' data, for any
            class and count, (S,).
        parts: for each site, the points that are judged one by one.
    """

    sites: tuple[str, ...]
    classes: tuple[str, ...]
    means: Tensor
    counts: Tensor
    noise: Tensor
    stretch: Tensor
    shape: Tensor
    within: float
    power: float = 1.0
    odd: Tensor | None = None
    parts: tuple[Parts, ...] = ()

    def without(self, site: int) -> ClassPoints:
        """The table without one row."""
        kept = [index for index in range(len(self.sites)) if index != site]
        names = ("means", "counts", "noise", "stretch", "shape")
        tables: dict[str, Any] = {name: getattr(self, name)[kept] for name in names}
        tables["odd"] = None if self.odd is None else self.odd[kept]
        tables["parts"] = tuple(self.parts[index] for index in kept) if self.parts else ()
        return replace(self, sites=tuple(self.sites[index] for index in kept), **tables)


def standard_error(squares: Tensor, noise: Tensor, d: int) -> Tensor:
    """The standard error of squared distances from which noise was subtracted.

    Args:
        squares: the distances, of any shape.
        noise: variance of every coordinate, of the same shape.
        d: number of dimensions.

    Returns:
        Of the same shape.
    """
    return 2 * (squares.clamp_min(0) * noise).sqrt() + math.sqrt(2 * d) * noise


def class_points(surrogates: Sequence[AnySurrogate], classes: tuple[str, ...]) -> ClassPoints:
    """The table of surrogates of one kind.

    Args:
        surrogates: of the sites: mixtures, or noisy sums.
        classes: of the run. Not used for noisy sums, which have those of their header.
    """
    sums = [surrogate for surrogate in surrogates if isinstance(surrogate, SumsSurrogate)]
    if sums:
        return of_sums(sums)
    return of_mixtures(
        [surrogate for surrogate in surrogates if isinstance(surrogate, Surrogate)], classes
    )


def of_mixtures(surrogates: Sequence[Surrogate], classes: tuple[str, ...]) -> ClassPoints:
    """Means of mixtures, in units of the standard deviation within classes (the median site's,
    dimension by dimension).

    Args:
        surrogates: of the sites.
        classes: of the run. The table has those of several sites.
    """
    names, d = tuple(s.header.site for s in surrogates), surrogates[0].dimension
    # Only classes of several sites: one site must not enlarge the table with invented classes.
    holders = Counter(
        name
        for s in surrogates
        for name, count in zip(s.header.classes, s.counts, strict=True)
        if count >= FEWEST
    )
    classes = tuple(name for name in classes if holders[name] >= KNOWN_BY)
    moments = [Moments.of(surrogate) for surrogate in surrogates]
    reach = Reach.of(moments)
    means, counts = torch.zeros(len(names), len(classes), d), torch.zeros(len(names), len(classes))
    usual = reach.variances.clamp_min(FLOOR * float(reach.variances.mean()) + 1e-30)
    parts = []
    for row, (surrogate, own) in enumerate(zip(surrogates, moments, strict=True)):
        indices = class_indices(classes, surrogate.header.classes)
        present = (indices >= 0) & own.present
        means[row, indices[present]] = own.means[present]
        counts[row, indices[present]] = own.counts[present].float()
        parts.append(_parts(surrogate, indices, usual))
    counts = torch.where(counts >= FEWEST, counts, 0.0)
    shape = _shapes(moments, usual)
    # In place: for ten thousand sites this table is most of the memory.
    means.div_(usual.sqrt()).clamp_(-FARTHEST, FARTHEST)
    noise = 1 / counts.clamp_min(1)
    odd = torch.stack(
        [reach.scores(row, surrogate).amax() for row, surrogate in enumerate(surrogates)]
    ).float()
    table = (means, counts, noise, torch.zeros_like(noise), shape)
    return ClassPoints(names, classes, *table, float(d), odd=odd, parts=tuple(parts))


def _shapes(moments: Sequence[Moments], usual: Tensor) -> Tensor:
    """Squared distances (S,) of the sites' standard deviations from the median; zero for sites that
    do not know them.
    """
    shape, known = (
        torch.zeros(len(moments)),
        [row for row, each in enumerate(moments) if each.spread],
    )
    if known:
        variances = torch.stack([moments[row].usual_variances() for row in known])
        deviations = (variances / usual).sqrt().clamp_max(FARTHEST)
        shape[known] = (deviations - deviations.median(0).values).square().sum(1)
    return shape


def _parts(surrogate: Surrogate, indices: Tensor, usual: Tensor) -> Parts:
    """Components with enough records whose position differs from a judged class mean, or has none."""
    table = surrogate.mixtures
    labels, records = indices[table.labels], table.counts[table.labels] * table.weights
    chosen = (records >= FEWEST) & ((labels < 0) | (table.components[table.labels] > 1))
    points = (table.means[chosen].float() / usual.sqrt()).clamp(-FARTHEST, FARTHEST)
    names = tuple(surrogate.header.classes[label] for label in table.labels[chosen].tolist())
    return Parts(points, labels[chosen], 1 / records[chosen].float(), names)


def of_sums(surrogates: Sequence[SumsSurrogate]) -> ClassPoints:
    """Means of noisy class sums, where a class stands out from the noise of its count.

    Args:
        surrogates: of the sites, of features of norm at most one, with the same classes in the same
            order.
    """
    first = surrogates[0]
    counts, sums = (
        torch.stack([getattr(s.sums, name) for s in surrogates]).float()
        for name in ("counts", "sums")
    )
    sigmas = torch.tensor(
        [[s.sums.sigmas["counts"], s.sums.sigmas["sums"]] for s in surrogates], dtype=torch.float32
    )
    # The same threshold for use and for judgement: exactly the classes in use are judged.
    counts = torch.where(counts > PRESENT * sigmas[:, :1], counts, 0.0)
    known, d = counts.clamp_min(1), first.dimension
    means = sums / known[..., None]
    privacy = (sigmas[:, 1:] / known).square()
    # An honest mean has at most length one. Without this clamp, a false long mean would increase
    # its own standard error.
    length = (means.square().mean(2) - privacy).clamp(0, 1 / d)
    # For features of unit norm, variance is one minus the mean's squared length.
    chance = (1 / d - length).clamp_min(0) / known
    stretch = sigmas[:, :1] / known
    noise = privacy + length * stretch.square() + chance
    present = counts > 0
    within = d * float((1 / d - length[present]).clamp_min(0).mean()) if present.any() else 1.0
    names = tuple(surrogate.header.site for surrogate in surrogates)
    table = (means, counts, noise, stretch, torch.zeros(len(names)))
    return ClassPoints(names, first.header.classes, *table, within, 2.0, odd=oddness(surrogates))
