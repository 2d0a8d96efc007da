"""The defence by harm for numbers, labels and times: how much worse the model of the others puts each
site's records in order because of one site, from sums over a code of the records. No Flower types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.robustness.evidence import directions
from fedsurrogate.strategies.robustness.harm import (
    CLEARED,
    FEW,
    Decided,
    by_chance,
    largest,
    losses,
    lowered,
    ridged,
    without_one_and_of_all,
)

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


@dataclass(frozen=True)
class Outputs:
    """The sums of S sites in k directions, in which records vary by about one.

    Harm is by how much better the model of all but the judge puts the judge's records in order without a
    site than with it, by the mean over the outputs.

    Attributes:
        ordering: of the order.
        records: (S,).
        means: (S, k).
        covariances: (S, k, k).
        known: as in `Coded`, (S, o).
        totals: (S, o).
        squares: (S, o).
        sums: (S, o, k).
        features: (S, o, k).
        noise: (S, o).
        columns: M^T M for the map M, (k, k).
    """

    ordering: Ordering
    records: Tensor
    means: Tensor
    covariances: Tensor
    known: Tensor
    totals: Tensor
    squares: Tensor
    sums: Tensor
    features: Tensor
    noise: Tensor
    columns: Tensor

    def __len__(self) -> int:
        return len(self.records)

    def of(self, kept: Sequence[int]) -> Outputs:
        """Some of the sites."""
        rows = list(kept)
        return replace(self, **{name: getattr(self, name)[rows] for name in BY_SITE})

    def weighed(self, weights: Tensor) -> Outputs:
        """The same with weights (S,)."""
        values = {name: getattr(self, name) for name in ADDED}
        scaled = {
            name: value * weights.reshape(-1, *[1] * (value.ndim - 1))
            for name, value in values.items()
        }
        return replace(self, **scaled)

    def noisier(self, draw: torch.Generator) -> Outputs | None:
        """With as much noise in the sums again; None without noise."""
        if not self.noise.any():
            return None
        noise = torch.randn(self.sums.shape, generator=draw, dtype=torch.float64)
        noise = noise @ torch.linalg.cholesky(self.columns).T
        return replace(self, sums=self.sums + self.noise[..., None] * noise)

    def needed(self) -> Tensor:
        """Sites with an output that few know."""
        can = self._can_judge()
        return (can & (can.sum(0) <= FEW)).any(1)

    def harms(self) -> Tensor:
        """As in the class, (S, J)."""
        added = self._added()

        def right(judge: int, others: list[int]) -> Tensor:
            less = without_one_and_of_all([each[others] for each in added])
            return self._ordered(judge, _models(less))

        return losses(self._can_judge().any(1), right)

    def gains(self) -> Tensor:
        """What each site's own records gain by its being there, (S,); zero where it cannot judge."""
        rows = _models(without_one_and_of_all(self._added()))
        found = torch.zeros(len(self), dtype=torch.float64)
        for at in torch.nonzero(self._can_judge().any(1)).flatten().tolist():
            without, with_ = self._ordered(at, rows[[at, -1]])
            found[at] = with_ - without
        return found

    def _added(self) -> list[Tensor]:
        """What adds up over sites."""
        first = self.records[:, None] * self.means
        second = self.records[:, None, None] * self.covariances
        second = second + first[:, :, None] * self.means[:, None]
        return [self.records, first, second, self.known, self.totals, self.sums, self.features]

    def _can_judge(self) -> Tensor:
        """Which outputs each site judges, (S, o) bool."""
        least = self.ordering.fewest
        if self.ordering.binary:
            return (self.totals >= least) & (self.known - self.totals >= least)
        return self.known >= least

    def _ordered(self, judge: int, rows: Tensor) -> Tensor:
        """How well models (m, o, k) put the records of a site in order, by the mean of its outputs, (m,)."""
        known = self.known[judge].clamp_min(1e-9)
        mean = self.totals[judge] / known
        centre = self.features[judge] / known[:, None]
        cross = self.sums[judge] / known[:, None] - mean[:, None] * centre
        own = self.squares[judge] / known - mean.square()
        spread = ((rows @ self.covariances[judge]) * rows).sum(2)
        found = (rows * cross).sum(2) / (spread * own).clamp_min(1e-24).sqrt()
        shares = self.ordering.of(found.clamp(-MOST_CORRELATED, MOST_CORRELATED), mean)
        return shares[:, self._can_judge()[judge]].mean(1)


# Fields of `Outputs` with a row a site, and those that grow with a site's weight.
CODED = ("known", "totals", "squares", "sums", "features", "noise")
ADDED = ("records", *CODED[:-1])
BY_SITE = (*ADDED, "means", "covariances", "noise")


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
        ordering,
        records,
        (means - centre) @ into,
        within,
        known,
        totals,
        squares,
        sums @ into,
        features @ into,
        noise,
        into.T @ into,
    )


def judged_outputs(outputs: Outputs) -> Decided:
    """The weights with which no site costs more than one in five of the others, and at least two, more
    than the ordering allows, as far as what they sent shows. Never half are lowered.
    """
    ordering, count = outputs.ordering, len(outputs)
    first = largest(outputs.harms())
    chance = by_chance(outputs, first)
    limits = torch.full((count,), ordering.most, dtype=torch.float64) + chance
    clear = first > ordering.clear + chance
    cleared = torch.where(clear, CLEARED * limits, limits)
    weights, out = lowered(outputs, first > limits, cleared, chance + ordering.out)
    return Decided(
        weights, first, outputs.gains(), out=out, limit=ordering.out, measure=ordering.name
    )
