"""The defence by harm: how many records of each site the head of the others loses because of one
site, from the statistics that sites sent; for numbers, labels and times, how much worse the order of
its records becomes. No Flower types.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedsurrogate.common.methods.method import FEWEST_JUDGED
from fedsurrogate.common.surrogates.class_sums import PRESENT
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate

from ..closed_form.solvers import ENOUGH_COLUMNS, LEAST_EXCESS, LEAST_RATIO
from ..closed_form.statistics import (
    Factored,
    Outline,
    Statistics,
    dense,
    of_mixtures,
    outline,
    outline_of_mixtures,
)

# A site's covariance counts at most so many times the median site's where it is the common scale.
WIDEST = 3.0


def of_surrogates(surrogates: Sequence[AnySurrogate], classes: Sequence[str]) -> Sites:
    """The evidence of mixtures, by their moments, or of noisy sums.

    Args:
        surrogates: of the sites, of one kind, with the weights that they have.
        classes: that hold all of every site's; not used for noisy sums, which have the same ones.
    """
    sums = [each for each in surrogates if isinstance(each, SumsSurrogate)]
    if sums:
        parts, noise = _of_noisy_sums(sums)
        return sites_of(lambda: parts, noise)
    mixtures = [each for each in surrogates if isinstance(each, Surrogate)]
    outlines = [outline_of_mixtures(each, classes) for each in mixtures]
    return sites_of(lambda: (of_mixtures(each, classes) for each in mixtures), outlines=outlines)


def _of_noisy_sums(surrogates: Sequence[SumsSurrogate]) -> tuple[list[Statistics], Tensor]:
    """Statistics with one variance, as features of norm one have it, and the noise of class means."""
    counts, sums = (
        torch.stack([getattr(each.sums, name) for each in surrogates]).double()
        for name in ("counts", "sums")
    )
    sigmas = [[each.sums.sigmas[name] for name in ("counts", "sums")] for each in surrogates]
    of_count, of_sum = torch.tensor(sigmas, dtype=torch.float64).T[..., None]
    counts = torch.where(counts > PRESENT * of_count, counts, 0.0)
    known, d = counts.clamp_min(1), sums.shape[2]
    means = torch.where(counts[..., None] > 0, sums / known[..., None], 0.0)
    privacy = (of_sum / known).square()
    length = (means.square().mean(2) - privacy).clamp(0, 1 / d)
    noise = privacy + length * (of_count / known).square()
    there = counts > 0
    within = float((1 / d - length[there]).clamp_min(0).mean()) if there.any() else 1.0
    one = Factored(torch.zeros(d, 0).double(), torch.full((d,), within, dtype=torch.float64))
    # Pooled noisy means are weighted by the square of records.
    weights = counts.square() / float(counts[there].mean()) if there.any() else counts
    parts = [Statistics(*each, one) for each in zip(weights, means, strict=True)]
    return parts, torch.where(there, noise, 0.0)


def sites_of(
    parts: Callable[[], Iterable[Statistics]],
    noise: Tensor | None = None,
    outlines: Iterable[Outline] | None = None,
) -> Sites:
    """The statistics of sites in the directions in which their class means differ.

    Args:
        parts: gives the statistics of each site, one at a time, so that memory holds two covariances;
            called twice, and once more without outlines.
        noise: variance of the noise in each class mean, (S, C); None without privacy.
        outlines: of the parts, where they are known without the covariances.
    """
    tables = outlines or map(outline, parts())
    counts, means, sizes = (torch.stack(each) for each in zip(*tables, strict=True))
    centre = (counts[..., None] * means).sum((0, 1)) / counts.sum().clamp_min(1e-300)
    apart = (means - centre).flatten(0, 1) * counts.flatten().sqrt()[:, None]
    into, own = directions(parts, counts.sum(1), sizes, apart)
    return Sites(
        into.T @ into,
        torch.zeros_like(counts) if noise is None else noise,
        counts,
        torch.where(counts[..., None] > 0, (means - centre) @ into, 0.0),
        own,
        means.shape[2],
    )


def directions(
    parts: Callable[[], Iterable[Statistics]],
    records: Tensor,
    sizes: Tensor,
    apart: Tensor,
    noisy: bool = False,
) -> tuple[Tensor, Tensor]:
    """The directions in which some vectors are longest, in deviations of a record of all sites.

    Args:
        parts: as in `sites_of`.
        records: of each site, (S,).
        sizes: traces of the sites' covariances, (S,).
        apart: the vectors, (n, d).
        noisy: whether covariances are noisy: only that of all sites counts then.

    Returns:
        The map of columns to directions, (d, k), and the covariance of each site in these, (S, k, k).
    """
    d = apart.shape[1]
    limits = (WIDEST * sizes.median() / sizes.clamp_min(1e-300)).clamp_max(1.0)
    weights = (records / records.sum().clamp_min(1e-300) * limits).tolist()
    common = torch.zeros(d, d, dtype=torch.float64)
    for part, weight in zip(parts(), weights, strict=True):
        common += weight * dense(part.covariance)
    # Few records in many columns vary hardly at all in most directions: only as far as they show.
    shrunk = max(RIDGE, d / (d + float(records.sum())))
    least = float(common.diagonal().mean()) + 1e-30
    if noisy:
        least -= min(0.0, float(torch.linalg.eigvalsh(common)[0]) / shrunk)
    common = (1 - shrunk) * common
    common.diagonal().add_(shrunk * least)
    root = torch.linalg.cholesky(common)
    whitened = torch.linalg.solve_triangular(root, apart.T, upper=False)
    lines = torch.linalg.svd(whitened, full_matrices=False)[0]
    into = torch.linalg.solve_triangular(root.T, lines[:, :DIRECTIONS], upper=True)
    one = torch.eye(into.shape[1], dtype=torch.float64)
    if noisy:
        return into, one.expand(len(records), -1, -1)
    own = torch.stack([into.T @ dense(part.covariance) @ into for part in parts()])
    share = (d / (d + records))[:, None, None]
    return into, (1 - share) * own + share * one


# Largest harm of a site with its whole weight, and of one that stays; shares of records. In 64 columns an
# honest hospital with photos costs those with sketches 0.107.
MOST, OUT = 0.03, 0.125
# The first where the others are alike and the site's own records are mostly placed wrong: it contradicts
# them. Honest sites with other devices or styles have at least 0.7 of theirs placed right. To the share
# CLEARED of its limit a site is lowered whose harm no honest site reaches.
MOST_ALIKE, CONTRADICTS, CLEARED = 0.005, 0.5, 0.2
# Directions of the class means in which harm is measured: with more, heads of few records fit their noise.
# The ridge of heads there, in mean variances.
DIRECTIONS, RIDGE = 32, 0.02
# At most so many sites judge the others, each with at least so many records.
JUDGES, RECORDS = 50, 10.0
# Shares of its weight that a harmful site may keep.
STEPS = (0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02, 0.0)
# What the harm of a needed site may be beyond that which no weight takes away, because it is in its classes.
BY_CLASSES = 0.01
# Holders of a class below whose number none is left out.
FEW = 2
# Largest variance of the noise in a site's class means, in that of a record, with which it judges; and how
# often noise is drawn again.
LOST, DRAWS = 0.5, 4
# Counts (m, C), means (m, C, k) and covariances within classes (m, k, k) to weights (m, C, k) and biases.
Heads = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Evidence(ABC):
    """What S sites sent, in k directions, as far as harm is measured in it.

    Attributes:
        columns: M^T M for the map M of columns to directions, (k, k): how noise of one variance varies
            in the directions.
        noise: variance of the noise of privacy in each row of what is noisy, (S, r), in columns before
            the map.
        core: sites that are alike, if they are all but a few; else none.
    """

    columns: Tensor
    noise: Tensor
    core: tuple[int, ...] = field(default=(), kw_only=True)
    # Fields with a row a site, those that grow with its weight, and the noisy one.
    BY_SITE: ClassVar[tuple[str, ...]]
    ADDED: ClassVar[tuple[str, ...]]
    NOISY: ClassVar[str]

    @property
    def out(self) -> float:
        """The harm above which a site is left out."""
        return OUT

    @property
    def metric(self) -> str:
        """What harm is a share of, in words."""
        return "records that are placed right"

    def __len__(self) -> int:
        return len(self.noise)

    @abstractmethod
    def sums(self) -> list[Tensor]:
        """What adds up over sites, (S, ...)."""

    @abstractmethod
    def models(self, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What is learned from some sums (m, ...), each part with m rows."""

    @abstractmethod
    def right(self, judge: int, models: Sequence[Tensor]) -> Tensor:
        """What is right by a judge in some models, (m,)."""

    @abstractmethod
    def able(self) -> Tensor:
        """Sites that can judge, (S,) bool."""

    @abstractmethod
    def needed(self) -> Tensor:
        """Sites without which something that is learned would be at hardly any, (S,) bool."""

    @abstractmethod
    def limits(self, harm: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """The largest harm that each site may do with its whole weight, (S,), and whose harm is clear:
        that is lowered to CLEARED of the limit, (S,) bool.
        """

    def prepared(self) -> Self:
        """The same as it is judged."""
        return self

    def of(self, kept: Sequence[int]) -> Self:
        """Some of the sites."""
        return replace(self, **{name: getattr(self, name)[list(kept)] for name in self.BY_SITE})

    def weighed(self, weights: Tensor) -> Self:
        """The same with weights (S,)."""
        values = {name: getattr(self, name) for name in self.ADDED}
        rows = {name: (-1, *[1] * (value.ndim - 1)) for name, value in values.items()}
        return replace(self, **{n: weights.reshape(rows[n]) * each for n, each in values.items()})

    def noisier(self, draw: torch.Generator) -> Self | None:
        """The same with as much noise again; None without noise."""
        if not self.noise.any():
            return None
        value = getattr(self, self.NOISY)
        noise = torch.randn(value.shape, generator=draw, dtype=torch.float64)
        noise = self.noise.sqrt()[..., None] * (noise @ torch.linalg.cholesky(self.columns).T)
        return replace(self, **{self.NOISY: value + noise})

    def harms(self) -> Tensor:
        """What each judge loses by each site, (S, J), in the model of all or in that of all but the judge,
        whichever shows more; -1 for a judge itself.

        The judge's own records hide harm. A model without them knows the classes that no other honest site
        has by a false one alone, which then seems to harm nobody. With noise, a model with the judge is
        right by the judge's own noise, so only that without it counts.
        """
        count, places = len(self), torch.nonzero(self.able()).flatten()
        if count < FEWEST_JUDGED:
            places = places[:0]
        spaced = torch.linspace(0, len(places) - 1, min(len(places), JUDGES)).round().long()
        judges, sums = places[spaced].tolist(), self.sums()
        harm = torch.full((count, len(judges)), -1.0, dtype=torch.float64)
        noisy = bool(self.noise.any())
        with_judge = () if noisy else self.models(_without_one_and_of_all(sums))
        for at, judge in enumerate(judges):
            others = [each for each in range(count) if each != judge]
            without = self.models(_without_one_and_of_all([each[others] for each in sums]))
            found = self.right(judge, without)
            harm[others, at] = found[:-1] - found[-1]
            if not noisy:
                found = self.right(judge, with_judge)
                harm[others, at] = torch.maximum(harm[others, at], found[others] - found[-1])
        return harm

    def gains(self) -> Tensor:
        """What each site's own records gain by its being there, (S,)."""
        models = self.models(_without_one_and_of_all(self.sums()))
        right = [self.right(at, [each[[at, -1]] for each in models]) for at in range(len(self))]
        return torch.stack([with_ - without for without, with_ in right]).nan_to_num()


@dataclass(frozen=True)
class Sites(Evidence):
    """Statistics of S sites in k directions, in which records vary by about one.

    Harm is the share of each judge's records that a site turns wrong: what a head places right
    without the site, less what it places right with it. The noise is that of class means, (S, C).

    Attributes:
        counts: records, (S, C).
        means: of each class, (S, C, k).
        covariances: within classes, (S, k, k).
        dimension: number of columns before the map.
        heads: what is learned.
    """

    counts: Tensor
    means: Tensor
    covariances: Tensor
    dimension: int
    heads: Heads = field(default_factory=lambda: discriminant)
    BY_SITE: ClassVar = ("counts", "means", "covariances", "noise")
    ADDED: ClassVar = ("counts",)
    NOISY: ClassVar = "means"

    def prepared(self) -> Sites:
        """With the head that is chosen as the run's own, but by what no few of the sites decide."""
        core = tuple(alike(self))
        few = self.dimension < ENOUGH_COLUMNS
        return replace(self, heads=discriminant if few or core else least_squares, core=core)

    def needed(self) -> Tensor:
        """Sites with a class that few have."""
        has = self.counts > 0
        return (has & (has.sum(0) <= FEW)).any(1)

    def able(self) -> Tensor:
        """Sites with records enough, whose noise is small; none where noise hides most of them."""
        records = self.counts.sum(1)
        noise = (self.counts * self.noise).sum(1) * self.columns.diagonal().mean()
        enough = records >= RECORDS
        clear = enough & (noise <= LOST * records)
        return clear & (2 * clear.sum() > enough.sum())

    def limits(self, harm: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Less for sites that contradict a core of others that are alike."""
        limits = torch.full_like(harm, MOST)
        if self.core:
            every = self.models([each.sum(0)[None] for each in self.sums()])
            own = torch.cat([self.right(at, every) for at in range(len(self))]).nan_to_num(1.0)
            limits[own < CONTRADICTS] = MOST_ALIKE
        limits += chance
        # Two false sites hide each other: with less of one, the other seems to harm less.
        return limits, (limits < MOST) & (harm > limits)

    def sums(self) -> list[Tensor]:
        """Records, and first and second moments."""
        counts, means = self.counts, self.means
        firsts = counts[..., None] * means
        seconds = counts.sum(1)[:, None, None] * self.covariances + firsts.mT @ means
        return [counts, firsts, seconds]

    def models(self, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Weights (m, C, k) and biases (m, C) of heads."""
        counts, first, second = sums
        counts = counts.clamp_min(0)
        centres = first / counts.clamp_min(1e-9)[..., None]
        within = second - (counts[..., None] * centres).mT @ centres
        within = within / counts.sum(1).clamp_min(1e-9)[:, None, None]
        return self.heads(counts, centres, within)

    def right(self, judge: int, models: Sequence[Tensor]) -> Tensor:
        """The share of the judge's records that each head places right, expected, (m,)."""
        rows, bias = models
        return placed(self, judge, rows, bias)


@dataclass(frozen=True)
class Decided:
    """What the defence decides.

    Attributes:
        weights: of the sites, (S,): one for most; zero for those that are left out.
        harm: of each site with its whole weight, a share of records, (S,).
        gain: what each site's own records gain by its being there, a share of them, (S,).
        alike: whether class means agree without the few sites that differ most.
        out: sites that are left out, in this order.
        limit: the harm above which a site is left out.
        metric: what harm is a share of, in words.
    """

    weights: Tensor
    harm: Tensor
    gain: Tensor
    alike: bool = False
    out: tuple[int, ...] = ()
    limit: float = OUT
    metric: str = "records that are placed right"


def judged(evidence: Evidence) -> Decided:
    """The weights with which no site harms more than one in five of the sites, and at least two, by
    more than the evidence's limit, as far as what they sent shows. Of so many sites as `measures_harm`
    says.

    A site that harms by more than the limit for leaving out is left out, unless it is needed; and any
    that harms by too much with a fiftieth of its weight. Never half of them.
    """
    evidence = evidence.prepared()
    first = largest(evidence.harms())
    chance = by_chance(evidence, first)
    limits, clear = evidence.limits(first, chance)
    cleared = torch.where(clear, CLEARED * limits, limits)
    weights, out = lowered(evidence, first > limits, cleared, chance + evidence.out)
    gains = evidence.gains()
    return Decided(weights, first, gains, bool(evidence.core), out, evidence.out, evidence.metric)


def lowered(
    evidence: Evidence, harmful: Tensor, limits: Tensor, out: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """The weights with which no site harms by more than its limit, and the sites that are left out, the
    most harmful first. Never half of them are lowered.

    Args:
        evidence: of S sites.
        harmful: which of them harm by too much, (S,) bool; without one all keep their weights.
        limits: the largest harm of each site that stays, (S,).
        out: the harm above which a site is left out, (S,), unless it is needed.
    """
    count = len(evidence)
    weights = torch.ones(count, dtype=torch.float64)
    if not harmful.any():
        return weights, ()
    most, kept, left = (count - 1) // 2, list(range(count)), list[int]()
    while len(left) < most and len(kept) > FEWEST_JUDGED - 1:
        some = evidence.of(kept)
        above = largest(some.harms()) - out[kept]
        at = int(above.argmax())
        # Beside a needed site that harms more, others seem to harm.
        if float(above[at]) <= 0 or some.needed()[at]:
            break
        left.append(kept.pop(at))
    weights[left] = 0.0
    weights[kept] = _weighed(evidence.of(kept), most - len(left), limits[kept], out[kept])
    # Without any weight a site's class means would still name classes.
    left += [at for at in kept if weights[at] == 0]
    return weights, tuple(left)


def _weighed(evidence: Evidence, most: int, limits: Tensor, out: Tensor) -> Tensor:
    """Weights (S,), of which at most so many are below one, with which no harm is above its limit; of a
    needed site, whose classes harm with any weight, not above that for leaving out.
    """
    weights = torch.ones(len(evidence), dtype=torch.float64)
    limits, needed = limits.clone(), evidence.needed()
    for _ in range(3 * len(evidence)):
        harm = largest(evidence.weighed(weights).harms())
        over = harm > 1.02 * limits
        if int((weights < 1).sum()) >= most:
            over[weights == 1] = False
        over[weights == 0] = False
        if not over.any():
            break
        at = int(torch.where(over, harm, -1.0).argmax())
        if needed[at]:
            harms = [_with_less(evidence, weights, at, step)[1] for step in (1.0, *STEPS[:-1])]
            of_classes = torch.stack(harms).min()
            if of_classes <= out[at]:
                limits[at] = torch.maximum(limits[at], of_classes + BY_CLASSES)
            needed[at] = False
            continue
        for step in STEPS:
            tried, harm = _with_less(evidence, weights, at, step)
            if step == 0.0 or harm <= limits[at]:
                break
        weights = tried
    return weights


def _with_less(evidence: Evidence, weights: Tensor, at: int, share: float) -> tuple[Tensor, Tensor]:
    """The weights with a share of one site's, and its harm then."""
    less = weights.clone()
    less[at] *= share
    return less, largest(evidence.weighed(less).harms())[at]


def by_chance(evidence: Evidence, own: Tensor) -> Tensor:
    """By how much as much noise again moves the sites' own harm (S,); zero without noise."""
    moved = torch.zeros(len(evidence), dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        if (again := evidence.noisier(draw)) is None:
            break
        moved = torch.maximum(moved, (largest(again.harms()) - own).abs())
    return moved


def alike(sites: Sites) -> list[int]:
    """The sites whose class means agree when at most a fifth is left out, those that differ most; none
    where they do not agree then.
    """
    kept, most = list(range(len(sites))), max(1, len(sites) // 5)
    together = 1 + most // 20
    while len(sites) - len(kept) < most:
        found, excess = differ_without_one(sites.of(kept))
        worst = excess.argsort(stable=True)[:together].tolist()
        kept = [each for at, each in enumerate(kept) if at not in worst]
        if not found[worst[0]]:
            return kept
    return []


def differ_without_one(sites: Sites) -> tuple[Tensor, Tensor]:
    """For all sites but each: whether their class means differ, as `SiteDifferences` decides, and the
    variance between them above that of chance and noise, as a share of that within (S,).
    """
    counts, firsts, seconds = sites.sums()
    squares = (counts * sites.means.square().sum(2)).sum(1)
    within = seconds.diagonal(dim1=1, dim2=2).sum(1) - squares
    noise = (counts * sites.noise).sum(1) * sites.columns.trace()
    groups = (counts > 0).double().sum(1)
    counts, firsts, squares, within, noise, groups = (
        _without_one(each) for each in (counts, firsts, squares, within, noise, groups)
    )
    records, there = counts.sum(1), counts > 1e-6
    pooled = (firsts.square().sum(2) / counts.clamp_min(1e-6) * there).sum(1)
    freedom = groups - there.sum(1)
    variance = within / (records - groups).clamp_min(1e-9)
    chance = (freedom * variance).clamp_min(1e-300)
    ratio = (squares - pooled - noise) / chance
    excess = (ratio - 1).clamp_min(0) * freedom / records.clamp_min(1e-300)
    return (freedom > 0) & (ratio > LEAST_RATIO) & (excess > LEAST_EXCESS), excess


def discriminant(counts: Tensor, means: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Linear discriminants."""
    rows = ridged(within, means)
    has = counts > 1e-6
    prior = (counts / counts.sum(1, keepdim=True)).clamp_min(1e-12).log()
    return rows, torch.where(has, prior - (rows * means).sum(2) / 2, -1e6)


def least_squares(counts: Tensor, means: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares on one-hot targets, every class with the same weight."""
    has = counts > 1e-6
    shares = has.double() / has.sum(1, keepdim=True)
    centre = (shares[:, None] @ means).squeeze(1)
    apart = torch.where(has[..., None], means - centre[:, None], 0.0) * shares.sqrt()[..., None]
    rows = ridged(within + apart.mT @ apart, apart * shares.sqrt()[..., None])
    return rows, torch.where(has, shares - (rows @ centre[..., None]).squeeze(2), -1e6)


def ridged(matrices: Tensor, rows: Tensor) -> Tensor:
    """Rows (m, r, k) times the inverses of matrices (m, k, k) with a ridge."""
    mean = matrices.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    ridged = matrices + (RIDGE * mean)[:, None, None] * torch.eye(matrices.shape[1]).double()
    roots, failed = torch.linalg.cholesky_ex(ridged)
    # Sums with a huge false one leave only rounding; a head of those must be bad, and must not stop a run.
    broken = (failed > 0)[:, None, None]
    roots = torch.where(broken, torch.eye(matrices.shape[1]).double(), roots)
    return torch.cholesky_solve(rows.mT, roots).mT.nan_to_num()


def _without_one(table: Tensor) -> Tensor:
    """The sums of all rows but each, without a difference, of which a huge row would leave rounding."""
    none = torch.zeros_like(table[:1])
    before = torch.cat([none, table[:-1].cumsum(0)])
    after = torch.cat([table[1:].flip(0).cumsum(0).flip(0), none])
    return before + after


def _without_one_and_of_all(tables: Sequence[Tensor]) -> list[Tensor]:
    """For each table (n, ...) the sums without each row, and last those of all rows, (n + 1, ...)."""
    return [torch.cat([_without_one(each), each.sum(0)[None]]) for each in tables]


def placed(sites: Sites, judge: int, rows: Tensor, bias: Tensor) -> Tensor:
    """The share of the judge's records that each head places right, expected, (m,).

    Records of a class are normal, and the nearest wrong class alone is looked at.
    """
    has = sites.counts[judge] > 0
    counts, means = sites.counts[judge][has], sites.means[judge][has]
    scores = means @ rows.mT + bias[:, None]
    own = torch.nonzero(has).flatten()
    gap = scores.gather(2, own[None, :, None].expand(len(rows), -1, 1)) - scores
    spread = rows @ sites.covariances[judge] @ rows.mT
    variance = _of_pairs(spread)[:, own]
    # A noisy class mean is uncertain: scores vary by as much more.
    noise = sites.noise[judge][has][:, None]
    variance = variance + noise * _of_pairs(rows @ sites.columns @ rows.mT)[:, own]
    margin = gap / variance.clamp_min(1e-14).sqrt()
    margin.scatter_(2, own[None, :, None].expand(len(rows), -1, 1), torch.inf)
    right: Tensor = torch.special.ndtr(margin.amin(2))
    return right @ counts / counts.sum()


def _of_pairs(spread: Tensor) -> Tensor:
    """The variance of the differences of scores, from their covariance (m, C, C)."""
    own = spread.diagonal(dim1=1, dim2=2)
    return own[..., None] + own[:, None] - 2 * spread


def largest(harm: Tensor) -> Tensor:
    """The harm of each site that more than one in five of the sites, and at least two, have (S,).

    False sites claim records enough to judge, which small honest ones have not.
    """
    judges = min(harm.shape[1] - 1, max(2, 1 + min(len(harm), JUDGES) // 5))
    if judges < 1:
        return torch.zeros(len(harm), dtype=torch.float64)
    return harm.topk(judges, 1).values[:, -1].clamp_min(0.0)


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

    Harm is by how much better a model puts the judge's records in order without a site than with
    it, by the mean over the outputs. The noise is that of the sums, (S, o).

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
    def metric(self) -> str:
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

    def models(self, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Ridges (m, o, k)."""
        records, first, second, known, totals, products, features = sums
        count = records.clamp_min(1e-9)[:, None]
        mean = first / count
        within = second / count[..., None] - mean[:, :, None] * mean[:, None]
        of_known = known.clamp_min(1e-9)
        average, centre = totals / of_known, features / of_known[..., None]
        cross = products / of_known[..., None] - average[..., None] * centre
        return (ridged(within, cross),)

    def right(self, judge: int, models: Sequence[Tensor]) -> Tensor:
        """How well models put the records of a site in order, by the mean of its outputs, (m,)."""
        (rows,) = models
        known = self.known[judge].clamp_min(1e-9)
        mean = self.totals[judge] / known
        centre = self.features[judge] / known[:, None]
        cross = self.products[judge] / known[:, None] - mean[:, None] * centre
        own = self.squares[judge] / known - mean.square()
        spread = ((rows @ self.covariances[judge]) * rows).sum(2)
        found = (rows * cross).sum(2) / (spread * own).clamp_min(1e-24).sqrt()
        shares = self.ordering.of(found.clamp(-MOST_CORRELATED, MOST_CORRELATED), mean)
        return shares[:, self._can_judge()[judge]].mean(1)


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
