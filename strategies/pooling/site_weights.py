"""Cap on the weight of one site, totals that no records can have, and robust centres. No Flower
types.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.privacy import shares
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import Sums, beyond, unfold
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import (
    AnySurrogate,
    HasHeader,
    Header,
    SumsSurrogate,
)
from fedsurrogate.common.targets.target import RECORDS, SQUARES, TOTALS

# The share of the weight that a trimmed mean removes at each end, and so the share of hostile sites
# that it tolerates.
TRIM = 0.2
STEPS = 30
# The defence rules that pool points. The other rules exclude sites, or do nothing.
POOLED = ("median", "trimmed")


def robust_mean(points: Tensor, weights: Tensor, rule: str) -> Tensor:
    """Centre of weighted points by a rule.

    Args:
        points: (n, ...).
        weights: of the points, (n,), zero or more.
        rule: "median" or "trimmed"; any other gives the weighted mean.

    Returns:
        (...).

    Example:
        >>> points, weights = torch.tensor([[0.0], [1.0], [1.0], [1000.0]]), torch.ones(4)
        >>> robust_mean(points, weights, "median").tolist()
        [1.0]
        >>> robust_mean(points, weights, "none").tolist()
        [250.5]
    """
    if rule == "median":
        return coordinate_median(points, weights)
    if rule == "trimmed":
        return trimmed_mean(points, weights)
    mean: Tensor = torch.tensordot(_shares(weights), points.double(), 1)
    return mean


def added(replies: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """Sums of tensors by name, float64.

    Args:
        replies: of the same names and shapes.
        shares: factor of each.
    """
    # One after the other: ten thousand second moments in double precision are too many.
    total = {name: torch.zeros_like(each).double() for name, each in replies[0].items()}
    for reply, share in zip(replies, shares, strict=True):
        for name, tensor in reply.items():
            total[name] += share * tensor.double()
    return total


def robust_tensors(tables: Sequence[Mapping[str, Tensor]], rule: str) -> dict[str, Tensor]:
    """Pool tables of tensors name by name. Each site has one vote, because a site could report a
    false number of records.

    Args:
        tables: one for each site, with the same names and shapes.
        rule: as in `robust_mean`.

    Returns:
        The centre of every tensor, float32.
    """
    votes = torch.ones(len(tables), dtype=torch.float64)
    return {
        name: robust_mean(torch.stack([table[name] for table in tables]), votes, rule).float()
        for name in tables[0]
    }


def coordinate_median(points: Tensor, weights: Tensor) -> Tensor:
    """Weighted median of every coordinate: the mean of the lower and the upper weighted median.

    At most half of the weight may be hostile.

    Args:
        points: (n, ...).
        weights: of the points, (n,).

    Returns:
        (...).

    Source: Yin et al. 2018, definition 1.

    Example:
        >>> coordinate_median(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 1.0, 3.0])).item()
        9.0
        >>> coordinate_median(torch.tensor([1.0, 2.0]), torch.ones(2)).item()
        1.5
    """
    values, order = points.sort(dim=0)
    share = _shares(weights)[order]
    below = share.cumsum(0)
    half = 0.5 * (1 - 1e-9)
    lower = (below < half).sum(0, keepdim=True).clamp_max(len(points) - 1)
    upper = (below <= 1 - half).sum(0, keepdim=True).clamp_max(len(points) - 1)
    return ((values.gather(0, lower) + values.gather(0, upper)) / 2)[0]


def trimmed_mean(points: Tensor, weights: Tensor, trim: float = TRIM) -> Tensor:
    """Weighted mean of every coordinate without a share of the weight at each end.

    Args:
        points: (n, ...).
        weights: of the points, (n,).
        trim: the share that is removed at each end.

    Returns:
        (...), float64.

    Source: Yin et al. 2018, definition 2, extended to unequal weights: a point at the cut counts in
        part.
    """
    values, order = points.sort(dim=0)
    above = _shares(weights)[order].cumsum(0)
    kept = above.clamp(trim, 1 - trim).diff(dim=0, prepend=torch.full_like(above[:1], trim))
    return (values * kept).sum(0) / kept.sum(0)


def median_weights(gram: Tensor, weights: Tensor) -> Tensor:
    """Convex weights with which a combination of points is their geometric median.

    Smoothed Weiszfeld steps on the points' weights: a step costs n^2 for any dimension.

    Args:
        gram: inner products of the points, (..., n, n).
        weights: of the points, (..., n). Weight zero means no effect.

    Returns:
        (..., n).

    Source: Pillutla et al. 2022 (RFA), algorithm 2.
    """
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    squares, mixed = gram.diagonal(dim1=-2, dim2=-1), shares
    for _ in range(STEPS):
        product = (gram @ mixed[..., None])[..., 0]
        own = (product * mixed).sum(-1, keepdim=True)
        distances = (squares - 2 * product + own).clamp_min(0).sqrt()
        typical = (shares * distances).sum(-1, keepdim=True)
        pulls = shares / distances.clamp_min(1e-6 * typical + 1e-30)
        mixed = pulls / pulls.sum(-1, keepdim=True).clamp_min(1e-300)
    return mixed


def _shares(weights: Tensor) -> Tensor:
    return weights.double() / weights.double().sum()


# Below this number no cap applies: with two sites, the smaller one would cut the weight of the
# larger one.
FEWEST_SITES = 3
# Sites with fewer records say nothing about the size of a usual site, if at least this many sites
# and this share have more.
FEWEST_RECORDS, LARGER_SITES, SHARE_OF_SITES = 10, 10, 0.25
# Scanners differ: an honest site's features may vary so many times as much as the median site's.
OTHER_SCALES = 2.0
# Multiplications by a matrix after which a vector's length is about the largest eigenvalue.
MULTIPLIED = 8


def shares_kept(
    counts: Sequence[Sequence[float]], max_share: float, power: float = 1.0, noise: float = 0.0
) -> list[float]:
    """The share of its records that each site keeps.

    A site's weight is at most `max_share` times the usual site's, for all records together and for
    its largest class. Without the second cap, a site of usual size could dominate a class by
    claiming that all its records are of this class. The usual site is the median one, without sites
    of a few records: in federations of many such sites, all data would be in sites that the cap
    silences.

    Args:
        counts: each site's records of each class.
        max_share: most weight of a site, in weights of the usual site; 0 for no cap. Nor is there a
            cap for fewer than three sites.
        power: later, n records have the weight n ** power.
        noise: standard deviation of the noise on each count. A site whose records do not stand out
            from it is one of a few records.

    Returns:
        Of each site, in (0, 1].

    Example:
        >>> shares_kept([[50, 50], [60, 40], [500, 500]], max_share=3.0)
        [1.0, 1.0, 0.3]
    """
    if not max_share or len(counts) < FEWEST_SITES:
        return [1.0] * len(counts)
    times = max_share ** (1 / power)
    totals, largest = [sum(row) for row in counts], [max(row, default=0.0) for row in counts]
    fewest = FEWEST_RECORDS + noise * _of_noise_alone(max(map(len, counts)))
    usual = [index for index, total in enumerate(totals) if total >= fewest]
    if len(usual) < max(LARGER_SITES, SHARE_OF_SITES * len(counts)):
        usual = list(range(len(counts)))
    most = times * max(1.0, statistics.median_low(totals[index] for index in usual))
    most_of_class = times * max(1.0, statistics.median_low(largest[index] for index in usual))
    return [
        min(1.0, most / max(total, 1e-9), most_of_class / max(top, 1e-9))
        for total, top in zip(totals, largest, strict=True)
    ]


def _of_noise_alone(classes: int) -> float:
    """What the sum of the positive ones of so many standard normals hardly exceeds: its mean and two
    standard deviations.
    """
    mean = 1 / math.sqrt(2 * math.pi)
    return classes * mean + 2 * math.sqrt(classes * (0.5 - mean**2))


def below_one(sent: Iterable[HasHeader], kept: Iterable[float]) -> dict[str, float]:
    """Shares that are below one, by site.

    Args:
        sent: replies of sites.
        kept: share that each keeps.
    """
    return {each.header.site: share for each, share in zip(sent, kept, strict=True) if share < 1}


def moment_shares(sums: Sequence[Mapping[str, Tensor]], max_share: float) -> list[float]:
    """The share of its weight that each site keeps by its features: those of a site whose features
    vary much more would decide what the sum of all sites says.

    A site's second moment for each record, around the middle of all sites, is at most OTHER_SCALES x
    `max_share` times the median site's: its trace and, about, its largest eigenvalue.

    Args:
        sums: exact ones of each site in one frame, with the second moment around the site's mean.
        max_share: as for `shares_kept`.

    Returns:
        Of each site, in (0, 1]; one where the sums have no second moment.
    """
    if not max_share or len(sums) < FEWEST_SITES or not all(SQUARES in each for each in sums):
        return [1.0] * len(sums)
    means = torch.stack([(each[TOTALS].double() / each[RECORDS].double()) for each in sums])
    # One after the other: ten thousand second moments in double precision are too many.
    sizes = torch.stack(
        [
            _moment_size(each, apart)
            for each, apart in zip(sums, means - means.median(0).values, strict=True)
        ]
    )
    allowed = OTHER_SCALES * max_share * sizes.median(0).values.clamp_min(1e-300)
    shares = allowed / sizes.clamp_min(1e-300)
    return [float(share) for share in shares.min(1).values.clamp_max(1.0)]


def _moment_size(sums: Mapping[str, Tensor], apart: Tensor) -> Tensor:
    """Trace and largest eigenvalue of a site's second moment for each record, around a point that is
    this far from its mean, (d,).
    """
    moment = unfold(sums[SQUARES].double(), len(apart)) / sums[RECORDS].double()
    moment = moment + torch.outer(apart, apart)
    longest = moment[moment.norm(dim=1).argmax()]
    for _ in range(MULTIPLIED):
        longest = moment @ (longest / longest.norm().clamp_min(1e-300))
    return torch.stack([moment.trace(), longest.norm()])


def scaled(surrogate: AnySurrogate, share: float) -> AnySurrogate:
    """A surrogate with its counts reduced: the means stay, and for noisy sums also the relative
    noise.

    Args:
        surrogate: of a site.
        share: of its counts that stays; from 1 on, nothing changes.
    """
    if share >= 1:
        return surrogate
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        squares = None if sums.squares is None else sums.squares * share
        sigmas = {name: sigma * share for name, sigma in sums.sigmas.items()}
        return replace(
            surrogate,
            sums=replace(
                sums,
                counts=sums.counts * share,
                sums=sums.sums * share,
                squares=squares,
                sigmas=sigmas,
            ),
        )
    counts = (surrogate.mixtures.counts.double() * share).round().long().clamp_min(1)
    return replace(surrogate, mixtures=replace(surrogate.mixtures, counts=counts))


@dataclass(frozen=True)
class Total:
    """Tensors summed over all sites.

    Attributes:
        header: of the run, with all its classes.
        tensors: the sums, float64, by name.
        sigmas: standard deviation of the noise in every entry, by tensor; empty without privacy.
        claim: of every site; None without privacy.
        public: what was done with the features before all else.
        rounding: by tensor, most that rounding to whole steps has changed an entry.
        usual_rounding: by tensor, the standard deviation of this change.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    sigmas: Mapping[str, float] = field(default_factory=dict)
    claim: Mechanism | None = None
    public: PublicMap = field(default_factory=PublicMap)
    rounding: Mapping[str, float] = field(default_factory=dict)
    usual_rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def dimension(self) -> int:
        """Columns of the sites' features before the public map."""
        projection = self.public.projection
        return (self.tensors["sums"] if projection is None else projection).shape[1]

    def mapped(self, head: Head, frame: bytes) -> Head:
        """A head of the summed features, as one of the sites' own: with what was done before all else.

        Args:
            head: that was learned from the sums.
            frame: of the columns, in which sites put their features first; empty for none.
        """
        header = replace(head.header, frame=frame)
        public, own = self.public, shares.weight_of(self.claim.centre if self.claim else "")
        changed = replace(head, projection=public.projection, centre=public.centre)
        return replace(changed, header=header, mean_over_columns=own)


# Of the second moment's trace: a covariance that is further below zero cannot be repaired.
TRACE_TOLERANCE = 0.01
GRADIENTS = {
    "the count below zero": "a number of records below zero",
    "a class sum beyond its count": "a sum of shortened gradients beyond their number",
}


def check_moments(total: Total) -> None:
    """Check that some records can have these counts, class sums and second moments.

    A record has norm one under distributed noise. Without noise, the squared length of a class sum over
    its count is at most that class's part of the second moment's trace.

    Args:
        total: counts (C,), sums (C, d) and perhaps squares, the folded second moment.

    Raises:
        RunError: for counts below zero, and for class sums or second moments that are too long for
            the counts; also where rounding hides whether they are.
    """
    counts, sums, squares = (
        total.tensors["counts"],
        total.tensors["sums"],
        total.tensors.get("squares"),
    )
    if total.sigmas:
        _check_lengths(Sums(counts, sums, squares, total.sigmas), {})
        return
    counts = counts.round()
    if float(counts.min()) < 0:
        raise false_numbers(f"a class of {float(counts.min()):g} records")
    if squares is None:
        if sums[counts <= 0].norm() > total.rounding.get("sums", 0.0) * math.sqrt(sums.numel()):
            raise false_numbers("features of a class without records")
        return
    d = sums.shape[1]
    trace, longest = float(unfold(squares, d).trace()), _squared(sums.norm(dim=1), counts)
    if longest <= trace + TRACE_TOLERANCE * abs(trace):
        return
    # What the sums and the trace are at least and at most, before whole steps.
    least = _squared(sums.norm(dim=1) - total.rounding.get("sums", 0.0) * math.sqrt(d), counts)
    if least > trace + total.rounding.get("squares", 0.0) * d:
        raise false_numbers("class sums longer than the second moment allows")
    raise RunError(
        "the features are so small that the fixed-point numbers of the secure aggregation round them away; "
        "set a smaller secure-aggregation-range (the largest magnitude of a feature) or secure-aggregation-records, "
        "after `site ledger forget` at each hospital"
    )


def check_gradients(total: Total) -> None:
    """Check a noisy sum of gradients, each of norm one at most.

    Args:
        total: records (1,) and gradients (p,), with the deviations of their noise.

    Raises:
        RunError: for a number of records below zero, or a sum of gradients that is longer than it.
    """
    noise = {"counts": total.sigmas["records"], "sums": total.sigmas["gradients"]}
    _check_lengths(
        Sums(total.tensors["records"], total.tensors["gradients"][None], None, noise), GRADIENTS
    )


def weight_of(total: Total, sites: int, each: float = 0.0) -> float:
    """The sum of the sites' weights.

    Args:
        total: with the tensor "records", their number at all sites together.
        sites: number of sites in the sum.
        each: the weight of every site where it is public; then no site can change it. 0 where the
            weight of a site is the number of its records.

    Raises:
        RunError: if there are no records.

    Example:
        >>> from fedsurrogate.common.surrogates.surrogates import Header
        >>> header = Header("fedavg", "0" * 16, "coordinator", "", ("a", "b"))
        >>> total = Total(header, {"records": torch.tensor([30.0], dtype=torch.float64)})
        >>> weight_of(total, sites=3), weight_of(total, sites=3, each=0.5)
        (30.0, 1.5)
    """
    if each:
        return sites * each
    records = float(total.tensors["records"].sum().round())
    if records < 0:
        raise false_numbers(f"{records:g} records")
    if not records:
        raise RunError(
            "no site of the secure aggregation has enough records of any class of the run"
        )
    return records


def false_numbers(what: str) -> RunError:
    """The error for a total that is not possible.

    Args:
        what: the secure aggregation has that no records can have.
    """
    return RunError(
        f"the secure aggregation has {what}, so some site has added false numbers, or more records than "
        "secure-aggregation-records, or without privacy features beyond secure-aggregation-range; nothing shows "
        "which one: run again with other sites, with larger ones of these, or with a defence instead "
        "of secure-aggregation"
    )


def _squared(lengths: Tensor, counts: Tensor) -> float:
    """Sum of squared lengths (C,) over counts (C,). A negative length is zero."""
    return float((lengths.clamp_min(0).square() / counts.clamp_min(1)).sum())


def _check_lengths(sums: Sums, names: Mapping[str, str]) -> None:
    if what := beyond(sums, names):
        raise false_numbers(what)
