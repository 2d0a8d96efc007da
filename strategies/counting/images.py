"""What a survey says of the images at each site: its histograms, where a site differs from the others, and
sites whose images seem turned, inverted or empty. Nothing is said that the noise, or chance, may explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.image_histograms import OPPOSITE, Histogram, histograms_of
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.wire.surrogate_proto import Counts

Json = dict[str, Any]
# Chance that anything at all is said of sites that do not differ.
FALSE_ALARM = 0.01
# Differences of less than this part of a site's images are not named.
LEAST = 0.1
# Fewer images than this many standard deviations of their noise say nothing about shares.
VISIBLE = 5.0
# A site is turned, or inverted, if this part of how its images differ from the others' is explained by it.
EXPLAINED = 0.5


@dataclass(frozen=True)
class SiteHistogram:
    """A histogram of one site, or of several together.

    Attributes:
        counts: (K,), float64.
        variance: of the noise in each.
        total: number of images, from a table with less noise than the sum of many cells.
        uncertainty: variance of the noise in it.
    """

    counts: Tensor
    variance: float
    total: float
    uncertainty: float

    @property
    def visible(self) -> bool:
        """Whether there are more images than noise in their number, or in a cell."""
        deviation = math.sqrt(max(self.variance, self.uncertainty))
        return float(self.counts.max()) >= 1 and self.total >= max(1.0, VISIBLE * deviation)

    @property
    def shares(self) -> Tensor:
        """Each cell's part of the images, (K,)."""
        return self.counts / self.total

    def without(self, other: SiteHistogram) -> SiteHistogram:
        """The sum without that of one site."""
        return SiteHistogram(
            self.counts - other.counts,
            self.variance - other.variance,
            self.total - other.total,
            self.uncertainty - other.uncertainty,
        )

    def contrast(self, weights: Tensor, shares: Tensor) -> float:
        """Variance of the weighted sum of shares: by the noise, and by which images a site has.

        Args:
            weights: of the cells, (K,).
            shares: that are likely, (K,).
        """
        mean = float(weights @ shares)
        sampling = float((weights - mean).square() @ shares) / self.total
        noise = self.variance * float(weights.square().sum()) + mean**2 * self.uncertainty
        return sampling + noise / self.total**2


def _likely(*histograms: SiteHistogram) -> Tensor:
    """Shares of all together, none below zero."""
    counts = torch.stack([each.counts for each in histograms]).sum(0).clamp_min(0)
    return counts / max(1.0, float(counts.sum()))


def differences(own: SiteHistogram, others: SiteHistogram) -> Tensor:
    """How many standard deviations each share of a site is above that of the others, (K,).

    Args:
        own: histogram of the site.
        others: of all other sites.
    """
    shares = _likely(own, others)
    variance = torch.zeros_like(shares)
    for each in (own, others):
        noise = each.variance + shares.square() * each.uncertainty
        variance += shares * (1 - shares) / each.total + noise / each.total**2
    apart = own.shares - others.shares
    return torch.where(variance > 0, apart / variance.clamp_min(1e-300).sqrt(), 0.0)


def moved(own: SiteHistogram, others: SiteHistogram, image: Sequence[int]) -> tuple[float, float]:
    """How well a site's histogram is that of the others, moved.

    Of two histograms p and q, and q moved to q', |p - q|^2 - |p - q'|^2 = 2 p (q' - q): linear in p, and
    above zero where p is nearer to q'.

    Args:
        own: histogram of the site, p.
        others: of all other sites, q.
        image: the cell to which each cell is moved.

    Returns:
        The sum p (q' - q), in standard deviations; and as a part of what it is for p = q'.
    """
    to = torch.tensor(image)
    back = torch.empty_like(to).scatter_(0, to, torch.arange(len(to)))
    gain = others.shares[back] - others.shares
    value = float(own.shares @ gain)
    # As if the site were like the others.
    shares, likely = _likely(own), _likely(own, others)
    variance = own.contrast(gain, likely) + others.contrast(shares[to] - shares, likely)
    # Noise in q alone adds to its square.
    room = others.variance / others.total**2
    whole = float(gain.square().sum()) / 2 - room * int((to != torch.arange(len(to))).sum())
    if variance <= 0 or whole <= 0:
        return 0.0, 0.0
    return value / math.sqrt(variance), value / whole


def _reversed(histogram: Histogram) -> list[int]:
    known = len(histogram.cells) - 1
    return [*reversed(range(known)), known]


def _turns(histogram: Histogram) -> dict[str, list[int]]:
    """The other seven ways to lay an image down, as moves of the cells of its orientation."""

    def move(way: Callable[[str, str], tuple[str, str]]) -> list[int]:
        pairs = [name.split("/") for name in histogram.cells if "/" in name]
        to = [histogram.cells.index("/".join(way(row, column))) for row, column in pairs]
        return [*to, *range(len(to), len(histogram.cells))]

    # Directions of the new row and column, by those of the image as it is.
    return {
        "turned by a quarter to the right": move(lambda r, c: (OPPOSITE[c], r)),
        "turned by a quarter to the left": move(lambda r, c: (c, OPPOSITE[r])),
        "upside down": move(lambda r, c: (OPPOSITE[r], OPPOSITE[c])),
        "mirrored from left to right": move(lambda r, c: (OPPOSITE[r], c)),
        "mirrored from top to bottom": move(lambda r, c: (r, OPPOSITE[c])),
        "mirrored and turned by a quarter": move(lambda r, c: (c, r)),
        "mirrored and turned by a quarter the other way": move(
            lambda r, c: (OPPOSITE[c], OPPOSITE[r])
        ),
    }


def _moves(name: str, histogram: Histogram) -> dict[str, list[int]]:
    """What a site's images may be against the others', and how it moves the cells of a histogram."""
    if name == "orientation":
        return {
            f"are {way} against those of the others, as their files state": move
            for way, move in _turns(histogram).items()
        }
    if name == "mirror":
        why = "lie on their side against those of the others: other sides of them mirror each other"
        return {why: _reversed(histogram)}
    if name == "brightness":
        why = "seem inverted: their brightness is the mirror image of that of the others (white is zero, "
        return {f"{why}as in MONOCHROME1, may be shown as black is zero)": _reversed(histogram)}
    return {}


def images_of_sites(
    counts: Sequence[Counts], own: CountingSettings, mechanism: Mechanism | None, questions: int = 1
) -> Json:
    """The histograms of images at each site, what differs, and warnings.

    Args:
        counts: of the sites.
        own: settings, which name the histograms.
        mechanism: of the run; None for exact counts.
        questions: number of questions about records; each record is in one cell of each.
    """
    histograms = histograms_of(own.images, own.image_bins)
    sizes = [len(each.cells) for each in histograms.values()]
    parts: dict[str, dict[str, SiteHistogram]] = {name: {} for name in histograms}
    for site in sorted(counts, key=lambda each: each.header.site):
        split = torch.split(site.tables["images"].double(), sizes)
        for name, part in zip(histograms, split, strict=True):
            total, uncertainty = float(part.sum()), 0.0
            if mechanism is not None:
                records = site.tables["records"]
                total = float(records.sum()) / questions
                uncertainty = site.variance("records") * records.numel() / questions**2
            parts[name][site.header.site] = SiteHistogram(
                part, site.variance("images"), total, uncertainty
            )
    found = [_of_histogram(name, histograms[name], own, parts) for name, own in parts.items()]
    result: Json = {
        "histograms": {name: each for name, (each, _) in zip(histograms, found, strict=True)},
        "noise": {site.header.site: site.variance("images") ** 0.5 for site in counts},
        "warnings": [warning for _, warnings in found for warning in warnings],
    }
    if mechanism is not None:
        precision = {name: (bound / sigma) ** 2 for name, (sigma, bound) in mechanism.noise.items()}
        whole = sum(precision.values())
        result["budget"] = {name: each / whole for name, each in precision.items()}
    return result


def _of_histogram(
    name: str,
    histogram: Histogram,
    sites: Mapping[str, SiteHistogram],
    parts: Mapping[str, Mapping[str, SiteHistogram]],
) -> tuple[Json, list[Json]]:
    everything = SiteHistogram(
        torch.stack([each.counts for each in sites.values()]).sum(0),
        sum(each.variance for each in sites.values()),
        sum(each.total for each in sites.values()),
        sum(each.uncertainty for each in sites.values()),
    )
    moves = _moves(name, histogram)
    # Of all that is tested in a survey, two-sided.
    tests = len(sites) * sum(len(own[next(iter(own))].counts) for own in parts.values())
    least = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * tests))
    differing: dict[str, dict[str, float]] = {}
    warnings: list[Json] = []
    for site, own in sites.items():
        others = everything.without(own)
        if name == "contrast" and own.visible:
            warnings += _empty(site, own, least)
        if len(sites) < 2 or not (own.visible and others.visible):
            continue
        apart, shares = differences(own, others), own.shares - others.shares
        clear = (apart.abs() > least) & (shares.abs() >= LEAST)
        differing[site] = {
            histogram.cells[cell]: round(float(shares[cell]), 3)
            for cell in clear.nonzero().flatten()
        }
        moved_to = {why: moved(own, others, move) for why, move in moves.items()}
        likely = [
            each for each in moved_to.items() if each[1][0] > least and each[1][1] > EXPLAINED
        ]
        if likely:
            why = max(likely, key=lambda each: each[1][1])[0]
            warnings.append({"site": site, "histogram": name, "why": f"its images {why}"})
    described: Json = {
        "title": histogram.title,
        "unit": histogram.unit,
        "cells": list(histogram.cells),
        "per_site": {site: each.counts.long().tolist() for site, each in sites.items()},
        "totals": {site: round(each.total) for site, each in sites.items()},
        "hidden": [site for site, each in sites.items() if not each.visible],
        "differing": {site: cells for site, cells in differing.items() if cells},
    }
    return described, warnings


def _empty(site: str, own: SiteHistogram, least: float) -> list[Json]:
    """A warning of images of one grey level; nothing where the noise may be all of them."""
    count, deviation = float(own.counts[0]), math.sqrt(own.variance)
    share = count / own.total
    if count <= least * deviation or share < LEAST:
        return []
    why = f"about {share:.0%} of its images are empty: nothing but one grey level"
    return [{"site": site, "histogram": "contrast", "why": why}]
