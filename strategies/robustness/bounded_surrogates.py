"""Bounded influence for surrogates of FedPFT: mixtures and noisy sums. No Flower types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.surrogates.covariances import Full
from fedsurrogate.common.surrogates.shared_covariances import Gram, LowRank
from fedsurrogate.common.surrogates.surrogates import (
    AnySurrogate,
    SumsSurrogate,
    Surrogate,
    class_order,
)
from fedsurrogate.strategies.base.defended import Suspect
from fedsurrogate.strategies.robustness.bounded_influence import OUT, Bounds, SiteClasses, bounds
from fedsurrogate.strategies.robustness.class_points import FLOOR, of_sums
from fedsurrogate.strategies.robustness.reach import Moments

# Most sites that are compared each with each, and numbers in their table of class means. In larger
# federations one site has little weight.
MOST_SITES, MOST_NUMBERS = 64, 2**24


def can_bound(surrogates: Sequence[AnySurrogate]) -> bool:
    """Whether the sites are three or more, and few enough to be compared each with each."""
    numbers = len(surrogates) * len(class_order(surrogates)) * surrogates[0].dimension
    return 2 < len(surrogates) <= MOST_SITES and numbers <= MOST_NUMBERS


def harmful(surrogates: Sequence[AnySurrogate], most: int) -> list[Suspect]:
    """The sites that do harm and are far from the others, the clearest first.

    Args:
        surrogates: of the sites, of one kind, with capped counts.
        most: sites that may be named. After each one, the others are compared again without it.
    """
    left, suspects = list(surrogates), list[Suspect]()
    while len(suspects) < most:
        table, names, _ = _table(left)
        if not table.has.any():
            break
        found = bounds(table)
        site = int(found.scores.amax(1).argmax())
        if float(found.scores[site].max()) < OUT:
            break
        suspects.append(_suspect(left.pop(site).header.site, names, found, site))
    return suspects


def bounded(surrogates: Sequence[AnySurrogate]) -> list[AnySurrogate]:
    """The surrogates with bounded class means and covariances.

    Args:
        surrogates: of the sites, of one kind, with capped counts.
    """
    table, names, unit = _table(surrogates)
    if not table.has.any():
        return list(surrogates)
    found = bounds(table)
    return [_changed(each, found, row, names, unit) for row, each in enumerate(surrogates)]


def _suspect(name: str, classes: tuple[str, ...], found: Bounds, site: int) -> Suspect:
    scores = found.scores[site]
    worst = int(scores.argmax())
    other = int(found.nearest[site, worst])
    if other != worst:
        why = (
            f"its class {classes[worst]!r} lies where the other sites have class "
            f"{classes[other]!r}, not where they have {classes[worst]!r}"
        )
        return Suspect(name, "label", float(scores[worst] / OUT), why)
    why = (
        f"its class {classes[worst]!r} is farther from the same class at the other sites than these "
        "differ, and makes the model worse for them"
    )
    return Suspect(name, "moved", float(scores[worst] / OUT), why)


def _table(
    surrogates: Sequence[AnySurrogate],
) -> tuple[SiteClasses, tuple[str, ...], Tensor]:
    """The sites' classes, their names, and the unit of their means, (d,) or a scalar."""
    if isinstance(surrogates[0], SumsSurrogate):
        points = of_sums([each for each in surrogates if isinstance(each, SumsSurrogate)])
        unit = torch.tensor(points.within / points.means.shape[2], dtype=torch.float64).sqrt()
        unit = unit.clamp_min(1e-12)
        table = SiteClasses(
            points.means.double() / unit,
            points.counts.double(),
            points.noise.double() / unit.square(),
            points.power,
        )
        return table, points.classes, unit
    mixtures = [each for each in surrogates if isinstance(each, Surrogate)]
    classes = class_order(mixtures)
    shape = (len(mixtures), len(classes), mixtures[0].dimension)
    means, counts = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[:2]).double()
    moments = [Moments.of(each) for each in mixtures]
    for row, (each, own) in enumerate(zip(mixtures, moments, strict=True)):
        columns = class_indices(classes, each.header.classes)
        means[row, columns], counts[row, columns] = own.means.double(), own.counts.double()
    usual = torch.stack([own.usual_variances() for own in moments]).double().median(0).values
    unit = usual.clamp_min(FLOOR * float(usual.mean()) + 1e-30).sqrt()

    def within(directions: Tensor) -> Tensor:
        return torch.stack([_within(each, directions.T / unit) for each in mixtures])

    table = SiteClasses(means / unit, counts, 1 / counts.clamp_min(1), within=within)
    return table, classes, unit


def _within(surrogate: Surrogate, directions: Tensor) -> Tensor:
    """The mean covariance of the components along directions (k, d), as (k, k)."""
    table = surrogate.mixtures
    match table.covariance:
        case LowRank(factor, variances):
            coloured = directions @ factor.double()
            return coloured @ coloured.T + (directions * variances.double()) @ directions.T
        case Gram() as gram:
            return directions @ gram.matrix.double() @ directions.T
    shares = (table.counts[table.labels] * table.weights).double()
    shares = shares / shares.sum()
    if isinstance(table.covariance, Full):
        each = directions @ table.covariance.cholesky.double()
        return torch.einsum("m,mke,mle->kl", shares, each, each)
    variances = table.covariance.variances_per_dimension().double().expand_as(table.means)
    return (directions * (shares @ variances)) @ directions.T


def _changed(
    surrogate: AnySurrogate, found: Bounds, row: int, names: tuple[str, ...], unit: Tensor
) -> AnySurrogate:
    """A surrogate with its bounded means and covariance."""
    moves, scale = found.moves[row] * unit, float(found.scales[row])
    if not moves.any() and scale >= 1:
        return surrogate
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        change = moves * sums.counts.double().clamp_min(1)[:, None]
        return replace(surrogate, sums=replace(sums, sums=(sums.sums + change).to(sums.sums)))
    table = surrogate.mixtures
    own = moves[class_indices(names, surrogate.header.classes)[table.labels]]
    covariance = table.covariance if scale >= 1 else table.covariance.scaled(scale**0.5)
    means = (table.means + own).to(table.means)
    return replace(surrogate, mixtures=replace(table, means=means, covariance=covariance))
