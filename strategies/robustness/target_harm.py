"""The defence by harm for numbers, labels and times: how much worse the model of the others puts each
site's records in order because of one site, from sums over a code of the records. No Flower types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.robustness.harm import FEW, Evidence, directions, ridged

# Correlations of which areas and concordances are computed at most.
MOST_CORRELATED = 0.999


@dataclass(frozen=True)
class Ordering:
    """How well a score puts the records of a site in order, and what a site may cost.

    Attributes:
        name: for people.
        of: from correlations with the output (m, o), and the output's means (o,), to shares, (m, o).
        most: largest harm of a site with its whole weight.
        clear: harm above which a site is lowered to CLEARED of `most`: no honest site reaches it.
        out: harm above which a site is left out.
        fewest: records with which a site judges.
        binary: whether an output is there or not; a site then judges with as many records of each.
    """

    name: str
    of: Callable[[Tensor, Tensor], Tensor]
    most: float
    clear: float
    out: float
    fewest: float
    binary: bool = False


def _concordance(found: Tensor, mean: Tensor) -> Tensor:
    """The share of pairs in the right order, of normal scores and outputs."""
    return 0.5 + torch.asin(found) / math.pi


def _area(found: Tensor, mean: Tensor) -> Tensor:
    """The area under the ROC curve, of scores that are normal in both groups."""
    groups = (mean * (1 - mean)).clamp_min(1e-9)
    area: Tensor = torch.special.ndtr(found / (2 * groups * (1 - found.square())).sqrt())
    return area


# Not R²: by it an honest site with sketches costs four with photos 0.59 of numbers, and is no liar.
CONCORDANCE = Ordering("concordance", _concordance, 0.06, 0.08, 0.15, 10.0)
AREA = Ordering("AUROC", _area, 0.03, 0.03, 0.10, 5.0, binary=True)


@dataclass(frozen=True)
class Coded:
    """Sums of one site over a linear code of o outputs.

    Attributes:
        moment: of all its records, as one class.
        known: records of which each output is known, (o,), float64.
        totals: of the output, (o,).
        squares: of its square, (o,).
        sums: of the output times the features, (o, d).
        features: sums of the features of the records of `known`, (o, d).
        noise: standard deviation of the noise in an entry of `sums`, (o,).
    """

    moment: Statistics
    known: Tensor
    totals: Tensor
    squares: Tensor
    sums: Tensor
    features: Tensor
    noise: Tensor


# Fields of `Coded` besides the moment.
CODED = ("known", "totals", "squares", "sums", "features", "noise")


@dataclass(frozen=True)
class Outputs(Evidence):
    """The sums of S sites in k directions, in which records vary by about one.

    Harm is by how much better the model of all but the judge puts the judge's records in order without a
    site than with it, by the mean over the outputs. The noise is that of the sums, (S, o).

    Attributes:
        ordering: of the order.
        records: (S,).
        means: (S, k).
        covariances: (S, k, k).
        known: as in `Coded`, (S, o).
        totals: (S, o).
        squares: (S, o).
        products: the `sums` of `Coded`, (S, o, k).
        features: (S, o, k).
    """

    ordering: Ordering
    records: Tensor
    means: Tensor
    covariances: Tensor
    known: Tensor
    totals: Tensor
    squares: Tensor
    products: Tensor
    features: Tensor
    ADDED: ClassVar = ("records", "known", "totals", "squares", "products", "features")
    BY_SITE: ClassVar = (*ADDED, "means", "covariances", "noise")
    NOISY: ClassVar = "products"

    @property
    def out(self) -> float:
        """The harm above which a site is left out."""
        return self.ordering.out

    @property
    def measure(self) -> str:
        """What harm is a share of."""
        return self.ordering.name

    def needed(self) -> Tensor:
        """Sites with an output that few know."""
        can = self._can_judge()
        return (can & (can.sum(0) <= FEW)).any(1)

    def able(self) -> Tensor:
        """Sites that judge an output."""
        return self._can_judge().any(1)

    def limits(self, harm: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the ordering."""
        return self.ordering.most + chance, harm > self.ordering.clear + chance

    def sums(self) -> list[Tensor]:
        """Records, and first and second moments; of each output what its model takes."""
        first = self.records[:, None] * self.means
        second = self.records[:, None, None] * self.covariances
        second = second + first[:, :, None] * self.means[:, None]
        return [self.records, first, second, self.known, self.totals, self.products, self.features]

    def _can_judge(self) -> Tensor:
        """Which outputs each site judges, (S, o) bool."""
        least = self.ordering.fewest
        if self.ordering.binary:
            return (self.totals >= least) & (self.known - self.totals >= least)
        return self.known >= least

    def right(self, judge: int, sums: Sequence[Tensor]) -> Tensor:
        """How well models put the records of a site in order, by the mean of its outputs, (m,)."""
        rows = _models(sums)
        known = self.known[judge].clamp_min(1e-9)
        mean = self.totals[judge] / known
        centre = self.features[judge] / known[:, None]
        cross = self.products[judge] / known[:, None] - mean[:, None] * centre
        own = self.squares[judge] / known - mean.square()
        spread = ((rows @ self.covariances[judge]) * rows).sum(2)
        found = (rows * cross).sum(2) / (spread * own).clamp_min(1e-24).sqrt()
        shares = self.ordering.of(found.clamp(-MOST_CORRELATED, MOST_CORRELATED), mean)
        return shares[:, self._can_judge()[judge]].mean(1)


def _models(added: Sequence[Tensor]) -> Tensor:
    """Ridges (m, o, k) from sums."""
    records, first, second, known, totals, sums, features = added
    count = records.clamp_min(1e-9)[:, None]
    mean = first / count
    within = second / count[..., None] - mean[:, :, None] * mean[:, None]
    of_known = known.clamp_min(1e-9)
    average, centre = totals / of_known, features / of_known[..., None]
    return ridged(within, sums / of_known[..., None] - average[..., None] * centre)


def outputs_of(parts: Callable[[], Iterable[Coded]], ordering: Ordering) -> Outputs:
    """The sums of sites in the directions in which sites differ and outputs depend on features.

    Args:
        parts: gives the sums of each site, one at a time, so that memory holds two second moments;
            called three times.
        ordering: of the order.
    """
    tables = list[tuple[Tensor, ...]]()
    for part in parts():
        moment = part.moment
        size = moment.covariance.diagonal().sum()
        own = [getattr(part, name) for name in CODED]
        tables.append((moment.counts[0], moment.means[0], size, *own))
    records, means, sizes, known, totals, squares, sums, features, noise = (
        torch.stack(each) for each in zip(*tables, strict=True)
    )
    centre = (records[:, None] * means).sum(0) / records.sum()
    sums = sums - totals[..., None] * centre
    features = features - known[..., None] * centre
    of_known = known.clamp_min(1e-9)
    mean = totals / of_known
    all_known = known.sum(0).clamp_min(1e-9)
    variance = squares.sum(0) / all_known - (totals.sum(0) / all_known).square()
    cross = (sums - mean[..., None] * features) / variance.clamp_min(1e-9).sqrt()[:, None]
    rows = (cross / of_known.sqrt()[..., None]).flatten(0, 1)
    apart = torch.cat([rows, records.sqrt()[:, None] * (means - centre)])
    into, within = directions(
        lambda: (part.moment for part in parts()), records, sizes, apart, bool(noise.any())
    )
    return Outputs(
        into.T @ into,
        noise.square(),
        ordering,
        records,
        (means - centre) @ into,
        within,
        known,
        totals,
        squares,
        sums @ into,
        features @ into,
    )
