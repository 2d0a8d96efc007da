"""Defences against hostile sites, applied before learning: a bound on influence, the range of the
sites' data, a screen of updates. No Flower types.

Weights are always capped, and what one update, head or set of synthetic records changes is always
bounded. The setting `defence` selects more: "harm" lowers the weight of a site whose statistics make the
head of the others worse; "screen" excludes updates that disagree with the others; "median" and "trimmed"
pool so that a minority cannot move the result far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsurrogate.common.methods.method import measures_harm
from fedsurrogate.common.models.generators import COUNTS
from fedsurrogate.common.models.parameters import CONTROL, Parameters, Tensors
from fedsurrogate.common.surrogates.surrogates import (
    AnySurrogate,
    SumsSurrogate,
    Surrogate,
    Synthetic,
)

from ..base.outcome import Defended, Effect, Suspect
from ..pooling.site_weights import (
    FEWEST_SITES,
    below_one,
    coordinate_median,
    median_weights,
    scaled,
    shares_kept,
)
from .harm import Decided, judged, of_surrogates

# Minimum number of records for a meaningful class mean.
FEWEST_RECORDS = 5
# Allowed squared distance of a component, in that of the median site's farthest one.
FARTHER = 6.0
# Lower bound of a dimension's variance, as a share of the mean variance: a pixel may be constant in
# some classes only.
FLOOR = 0.3


@dataclass(frozen=True)
class _Data:
    """Where a site's data lie.

    Attributes:
        centre: mean of the means of its classes with enough records, of all if there are none, (d,).
        variances: mean of the variances of these classes, (d,); None where every component has about
            one record, so that variances are zero.
        means: of the classes that it has, (c, d).
        points: means of the components with enough records, which lie farther out than those of
            their classes; of its classes if there are none, (n, d).
    """

    centre: Tensor
    variances: Tensor | None
    means: Tensor
    points: Tensor


def within_reach(surrogates: Sequence[AnySurrogate]) -> list[AnySurrogate]:
    """Mixtures whose components lie far beyond all data of the other sites are moved back, towards the
    middle of all: training on samples of one such mean would fail. Others, and noisy sums, whose norms
    are bounded, stay.

    Args:
        surrogates: of the sites.
    """
    mixtures = [each for each in surrogates if isinstance(each, Surrogate)]
    if len(mixtures) < len(surrogates):
        return list(surrogates)
    sites = [_data_of(each) for each in mixtures]
    middle = torch.stack([each.centre for each in sites]).median(0).values.double()
    usual = _usual_variances(sites).double()
    scale = usual.clamp_min(FLOOR * float(usual.mean()) + 1e-30).sqrt()
    far = torch.stack([_squares(each.points, middle, scale).amax() for each in sites])
    allowed = FARTHER * _median_of_others(far).clamp_min(0)
    kept = list[AnySurrogate]()
    for each, most in zip(mixtures, allowed, strict=True):
        means = each.mixtures.means
        share = (most / _squares(means, middle, scale).clamp_min(1e-30)).sqrt()[:, None]
        if bool((share < 1).any()):
            inside = torch.where(
                share < 1, middle + share * (means.double() - middle), means.double()
            )
            each = replace(each, mixtures=replace(each.mixtures, means=inside.to(means)))
        kept.append(each)
    return kept


def _squares(points: Tensor, middle: Tensor, scale: Tensor) -> Tensor:
    """Squared distances of points (n, d) from the middle, (n,)."""
    return ((points.double() - middle) / scale).square().sum(1)


def _data_of(surrogate: Surrogate) -> _Data:
    """Where the data of a surrogate lie, with the components of each class combined."""
    table = surrogate.mixtures
    weights, shape = table.weights.double()[:, None], (len(table.counts), surrogate.dimension)
    means = torch.zeros(shape, dtype=torch.float64).index_add_(
        0, table.labels, weights * table.means.double()
    )
    apart = (table.means.double() - means[table.labels]).square()
    inside = table.covariance.variances_per_dimension().double().expand_as(apart) + apart
    variances = torch.zeros_like(means).index_add_(0, table.labels, weights * inside)
    present = table.components > 0
    certain = present & (table.counts >= FEWEST_RECORDS)
    certain = certain if certain.any() else present
    enough = table.counts[table.labels] * table.weights >= FEWEST_RECORDS
    known = (table.counts - table.components).clamp_min(0).sum() >= FEWEST_RECORDS
    # Single precision: for ten thousand sites these tables are most of what the defence holds.
    return _Data(
        means[certain].mean(0).float(),
        variances[certain].mean(0).float() if known else None,
        means[present].float(),
        table.means[enough].float() if enough.any() else means[present].float(),
    )


def _usual_variances(sites: Sequence[_Data]) -> Tensor:
    """Variances within classes (d,): the median over the sites that know them; without such sites,
    those of the means.
    """
    known = [each.variances for each in sites if each.variances is not None]
    if known:
        return torch.stack(known).median(0).values
    means = torch.cat([each.means for each in sites])
    return (means - means.median(0).values).square().median(0).values


def _median_of_others(values: Tensor) -> Tensor:
    """For every entry of (S,), the median of the others; infinite where these are fewer than two."""
    others = len(values) - 1
    if others < 2:
        return torch.full_like(values, torch.inf)
    ordered = values.sort().values
    # The sorted others lack one entry of this value.
    place = torch.searchsorted(ordered, values)
    low, high = (ordered[at + (place <= at)] for at in ((others - 1) // 2, others // 2))
    return (low + high) / 2


# Largest distance from the centre, in distances of the median site. Chosen on the digits with
# Dirichlet 0.1: 1 costs honest sites five points there, 2 a tenth of a point.
TIMES = 2.0
# Largest distance of a head in one feature, in distances of the median site there. Chosen on the
# digits: of three sites, one that moves a single feature costs 6 points, and 24 without this.
FARTHEST = 8.0
# Longest head, in lengths of the median one. Honest ones with Dirichlet 0.1 stay below it.
LONGEST = 3.0
# Standard deviations by which the length of noise exceeds its root mean square hardly ever.
TAIL = 6.0


def bounded(
    points: Sequence[Mapping[str, Tensor]], noise: float = 0.0
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Points whose distance from their coordinate median is at most TIMES the median distance.

    Args:
        points: of the sites, with the same names and shapes. Of fewer than three there is no usual
            one, so they stay as they are.
        noise: standard deviation of the privacy noise on each number. Only what a distance has
            beyond noise may be multiplied: all honest updates have about the same length of noise.

    Returns:
        The points, in their order, and the share of its distance from the centre that each keeps, in
        (0, 1]: functions of what the sites sent and of public numbers alone.
    """
    if len(points) < FEWEST_SITES:
        return [dict(each) for each in points], [1.0] * len(points)
    votes, centres = torch.ones(len(points)), dict[str, Tensor]()
    squares = torch.zeros(len(points), dtype=torch.float64)
    # One tensor after the other: all at once, in double precision, would be twice the updates.
    for name in points[0]:
        rows = torch.stack([each[name] for each in points]).double()
        centres[name] = coordinate_median(rows, votes)
        squares += (rows - centres[name]).square().flatten(1).sum(1)
    numbers = sum(tensor.numel() for tensor in points[0].values())
    distances = squares.sqrt().tolist()
    limit = limit_of(distances, noise * (math.sqrt(numbers) + TAIL))
    kept = shares_within(limit, distances)
    inside = [
        {
            name: (centre + share * (each[name].double() - centre)).to(each[name].dtype)
            for name, centre in centres.items()
        }
        if share < 1
        else dict(each)
        for each, share in zip(points, kept, strict=True)
    ]
    return inside, kept


def limit_of(lengths: Sequence[float], noise: float = 0.0) -> float:
    """The largest length of a site: TIMES the median site's, where noise counts once only.

    Args:
        lengths: of the sites, one or more. Of an even number, the lower median counts, so that
            half of the sites cannot raise it.
        noise: the length of the noise that each has.

    Example:
        >>> limit_of([1.0, 2.0, 1e9])
        4.0
        >>> limit_of([4.0, 5.0, 1e9], noise=4.0)
        7.211102550927978
    """
    signal = max(0.0, statistics.median_low(lengths) ** 2 - noise**2)
    return math.hypot(noise, TIMES * math.sqrt(signal))


def bounded_updates(
    updates: Sequence[Parameters], noise: float = 0.0
) -> tuple[list[Parameters], dict[str, float]]:
    """Updates within the bound; SCAFFOLD's control variates have one of their own.

    Args:
        updates: of the sites, with the same tensors.
        noise: as in `bounded`.

    Returns:
        The updates, and by site the least share of a distance that is kept, where it is below 1.
    """
    parts = [
        [
            {name: t for name, t in each.tensors.items() if name.startswith(CONTROL) is control}
            for each in updates
        ]
        for control in (False, True)
    ]
    (model, of_model), (controls, of_controls) = (bounded(part, noise) for part in parts)
    kept = [
        replace(each, tensors=own | more)
        for each, own, more in zip(updates, model, controls, strict=True)
    ]
    return kept, below_one(updates, map(min, of_model, of_controls))


def bounded_heads(heads: Sequence[Parameters]) -> tuple[list[Parameters], dict[str, float]]:
    """Heads within the bound, each compared in its own classes and feature by feature.

    Features with little variance have the longest weights and move predictions least, so one length
    over all features would bound only what those change: each feature, and the bias, is measured in
    units of the median site's distance. A head is drawn to the centre as a whole, because features
    are not centred: weights that are shortened without their bias are another classifier. The centre
    is that of each class's rows. In a class that fewer than three sites have there is none, so heads
    may also be at most LONGEST times as long as the median one.

    Args:
        heads: weight (C_k, d) and bias (C_k,) of each site, for its own classes.

    Returns:
        As `bounded_updates`; a share is that of the distance from the centre.
    """
    if len(heads) < FEWEST_SITES:
        return list(heads), {}
    rows = [
        torch.cat([head.tensors["weight"], head.tensors["bias"][:, None]], 1).double()
        for head in heads
    ]
    owners: dict[str, list[Tensor]] = {}
    for head, own in zip(heads, rows, strict=True):
        for name, row in zip(head.header.classes, own, strict=True):
            owners.setdefault(name, []).append(row)
    usual = {
        name: coordinate_median(torch.stack(own), torch.ones(len(own)))
        for name, own in owners.items()
        if len(own) >= FEWEST_SITES
    }
    centres = [
        torch.stack(
            [usual.get(name, row) for name, row in zip(head.header.classes, own, strict=True)]
        )
        for head, own in zip(heads, rows, strict=True)
    ]
    apart = [own - centre for own, centre in zip(rows, centres, strict=True)]
    inside = _towards_the_centre(apart)
    near = [
        float(own.norm() / each.norm()) if bool((own != each).any()) else 1.0
        for own, each in zip(inside, apart, strict=True)
    ]
    rows = [centre + each for centre, each in zip(centres, inside, strict=True)]
    lengths = [float(own.norm()) for own in rows]
    # The head of a site with a single class is zero.
    most = LONGEST * statistics.median_low([length for length in lengths if length] or [0.0])
    short = shares_within(most, lengths)
    bound = [
        replace(
            head,
            tensors={
                **head.tensors,
                "weight": (share * own[:, :-1]).to(head.tensors["weight"]),
                "bias": (share * own[:, -1]).to(head.tensors["bias"]),
            },
        )
        for head, own, share in zip(heads, rows, short, strict=True)
    ]
    return bound, below_one(heads, map(min, near, short))


def _towards_the_centre(apart: Sequence[Tensor]) -> list[Tensor]:
    """Distances (C_k, d + 1) from the centre, the bias last, each times one number of its site.

    In units of the median site, a column's root mean square over a site's classes: that of all
    columns and that of the bias are at most TIMES, and no column is longer than FARTHEST. A column
    in which the median site has none is left at the centre.
    """
    lengths = torch.stack([each.square().mean(0).sqrt() for each in apart])
    # The head of a site with a single class is zero, and says nothing about the others'.
    known = lengths[lengths.amax(1) > 0]
    if not len(known):
        return list(apart)
    usual = known.median(0).values
    seen = usual > 0
    units = lengths.where(seen, torch.zeros(())) / usual.where(seen, torch.ones(()).to(usual))
    farthest = torch.stack(
        [
            units.square().sum(1).div(seen.sum().clamp_min(1)).sqrt() / TIMES,
            units[:, -1] / TIMES,
            units.amax(1) / FARTHEST,
        ]
    ).amax(0)
    return [own * seen / far.clamp_min(1.0) for own, far in zip(apart, farthest, strict=True)]


def shares_within(most: float, lengths: Sequence[float]) -> list[float]:
    """The share of each length that is at most `most`.

    Example:
        >>> shares_within(2.0, [0.0, 1.0, 8.0])
        [1.0, 1.0, 0.25]
    """
    return [min(1.0, most / length) if length else 1.0 for length in lengths]


def bounded_images(sets: Sequence[Synthetic]) -> tuple[list[Synthetic], dict[str, float]]:
    """Synthetic records of which none is longer than TIMES the median site's longest.

    Args:
        sets: of the sites, values (n, d).

    Returns:
        The sets, and by site the least share of a record's length that is kept, where it is below
        1.
    """
    if len(sets) < FEWEST_SITES:
        return list(sets), {}
    lengths = [each.values.double().norm(dim=1) for each in sets]
    most = limit_of([float(each.max()) for each in lengths])
    # Zero over zero: a record without any length stays whole where all are.
    shares = [(most / each).nan_to_num(1.0).clamp_max(1) for each in lengths]
    kept = [
        replace(each, values=each.values * share[:, None].to(each.values))
        for each, share in zip(sets, shares, strict=True)
    ]
    return kept, below_one(sets, (float(share.min()) for share in shares))


# Allowed distance from the others' geometric median, as a multiple of the median distance; the same of
# control variates, which are long at sites with few steps. What passes is bounded (influence.py).
FAR, FAR_CONTROL = 5.0, 25.0
# Allowed distance of feature moments, in deviations of the features; relative distance that counts
# as rounding error.
DEVIATIONS, ROUNDING = 3.0, 1e-5
# Mean cosine with the others: below the limit of `opposed_below` a site is a suspect; below UNRELATED
# if the median site has at least AGREE. Updates of few sites with classes of their own are
# opposed to each other, because softmax takes from one class what it gives to another: with S sites
# of one class each the mean cosine is -1 / (S - 1). Chosen on the digits, Dirichlet 0.1, seeds 0 to 5
# and 50 to 55, where honest sites of FedAvg reach -0.27 of four, -0.21 of five and -0.09 of ten.
OPPOSED, CROWDED, AGREE, UNRELATED = -0.15, 0.8, 0.5, 0.1
# Minimum number of sites for a meaningful majority.
FEWEST = 4


def screen_updates(updates: Sequence[Parameters]) -> list[Suspect]:
    """The sites whose updates disagree with the other sites'.

    Args:
        updates: of the sites. Fewer than FEWEST have no meaningful majority: then there are no
            suspects.

    Returns:
        Suspects, the clearest first; never half of the sites or more. Each is removed before the
        next one is judged.
    """
    checks, left, suspects = _checks(updates), list(range(len(updates))), list[Suspect]()
    most = (len(updates) - 1) // 2
    while len(suspects) < most and len(left) >= FEWEST:
        found = _worst([replace(each, gram=each.gram[left][:, left]) for each in checks])
        if found is None:
            break
        suspects.append(replace(found[1], site=updates[left.pop(found[0])].header.site))
    return suspects


@dataclass(frozen=True)
class Check:
    """What may be too far from the others': the update, or a statistic sent with it.

    Attributes:
        name: for the reason.
        gram: inner products of the sites' statistics, (S, S).
        least: distance that honest sites may have.
        far: allowed distance, as a multiple of the median distance.
    """

    name: str
    gram: Tensor
    least: float = 0.0
    far: float = FAR


def opposed_below(sites: int) -> float:
    """The mean cosine below which a site of so many is opposed to the others.

    Example:
        >>> [round(opposed_below(sites), 2) for sites in (4, 5, 10, 100)]
        [-0.42, -0.35, -0.24, -0.16]
    """
    return OPPOSED - CROWDED / (sites - 1)


def _checks(updates: Sequence[Parameters]) -> list[Check]:
    """Control variates, mean and deviation of the features, where they exist, and last the updates."""
    checks = []
    control = [
        [tensor for name, tensor in sorted(u.tensors.items()) if name.startswith(CONTROL)]
        for u in updates
    ]
    if all(control):
        checks.append(Check("control variate", _gram(control), far=FAR_CONTROL))
    if all("deviation" in update.tensors for update in updates):
        # Sites with another kind of image may differ by as much as the spread of the features.
        wide = torch.stack([update.tensors["deviation"] for update in updates]).double().abs()
        least = DEVIATIONS * float(wide.median(0).values.norm())
        for name in ("mean", "deviation"):
            rows = torch.stack([update.tensors[name] for update in updates]).double()
            rows = rows - rows.median(0).values
            checks.append(Check(f"{name} of its features", rows @ rows.T, least))
    return [*checks, Check("update", _gram([_aligned(update, updates) for update in updates]))]


def _aligned(update: Parameters, updates: Sequence[Parameters]) -> list[Tensor]:
    """The parameters to compare: heads in one order of classes, with zero rows for those that a site
    does not have.
    """
    names = tuple(dict.fromkeys(name for each in updates for name in each.header.classes))
    tensors = []
    for name, tensor in sorted(update.tensors.items()):
        if name.startswith(CONTROL) or name in ("mean", "deviation"):
            continue
        if len(tensor) == len(update.header.classes) and update.header.classes != names:
            wide = tensor.new_zeros(len(names), *tensor.shape[1:])
            wide[[names.index(each) for each in update.header.classes]] = tensor
            tensor = wide
        tensors.append(tensor)
    return tensors


def _gram(sites: Sequence[Sequence[Tensor]]) -> Tensor:
    """Inner products (S, S) of S sites' tensors, one tensor after the other to save memory."""
    total = torch.zeros(len(sites), len(sites), dtype=torch.float64)
    for tensors in zip(*sites, strict=True):
        rows = torch.stack([tensor.flatten() for tensor in tensors]).double()
        total += rows @ rows.T
    return total


def _distances(check: Check) -> Tensor:
    """Scores (S,), at least 1 where a site is much farther from the others' geometric median than
    usual.
    """
    gram, count = check.gram, len(check.gram)
    mixed = median_weights(gram.expand(count, count, count), 1 - torch.eye(count, dtype=gram.dtype))
    squares = gram.diagonal() - 2 * (mixed * gram).sum(1) + ((mixed @ gram) * mixed).sum(1)
    away = squares.clamp_min(0).sqrt()
    # Rounding differences between equal tensors must not count.
    same = ROUNDING * gram.diagonal().median().clamp_min(0).sqrt()
    return away / torch.maximum(check.far * away.median(), same).clamp_min(max(check.least, 1e-30))


def _worst(checks: Sequence[Check]) -> tuple[int, Suspect] | None:
    """The place of the clearest suspect, and what is said of it without its name."""
    for each in checks:
        scores = _distances(each)
        if float(scores.max()) >= 1:
            reason = (
                f"its {each.name} is much farther from those of the other sites than these are "
                "from each other"
            )
            return int(scores.argmax()), Suspect("", "far", float(scores.max()), reason)
    gram = checks[-1].gram
    lengths = gram.diagonal().clamp_min(1e-30).sqrt()
    agreement = ((gram / (lengths[:, None] * lengths)).sum(1) - 1) / (len(gram) - 1)
    least = UNRELATED if float(agreement.median()) >= AGREE else opposed_below(len(gram))
    if float(agreement.min()) >= least:
        return None
    reason = "the direction of its update disagrees with the updates of the other sites"
    score = 1 + least - float(agreement.min())
    return int(agreement.argmin()), Suspect("", "opposed", score, reason)


# Most weight of an update or head with "screen", in weights of the usual site. A false one within the
# bound is not found, so it must not count as much as three honest ones.
EQUAL = 1.0
R = TypeVar("R", Parameters, Synthetic)


def defend_surrogates(
    surrogates: Sequence[AnySurrogate], rule: str, max_share: float, classes: tuple[str, ...]
) -> Defended[AnySurrogate]:
    """Cap the weights of surrogates of one kind, and lower those of sites that harm the others.

    Args:
        surrogates: of the sites. Noisy sums all have the same classes.
        rule: "harm" lowers the weight of harmful sites, and leaves some out, where
            `measures_harm` says so; any other does not.
        max_share: most weight of a site, as in `shares_kept`.
        classes: of the run.
    """
    noises = [e.sums.sigmas["counts"] for e in surrogates if isinstance(e, SumsSurrogate)]
    # Pooled private means are weighted by the square of records; the cap must bound this weight.
    power = 2.0 if noises else 1.0
    if rule == "harm":
        surrogates = within_reach(surrogates)
    counts = [[max(0.0, float(count)) for count in each.counts] for each in surrogates]
    shares, capped = caps(surrogates, counts, max_share, power, max(noises, default=0.0))
    kept = list(map(scaled, surrogates, shares))
    if not measures_harm(rule, len(kept)):
        return Defended(kept, capped)
    sites = [each.header.site for each in kept]
    found = by_harm(sites, judged(of_surrogates(kept, classes)), capped, power)
    kept = [
        scaled(each, found.effects[each.header.site].kept) for each in without(kept, found.suspects)
    ]
    return replace(found, kept=kept)


def by_harm(
    names: Sequence[str], found: Decided, capped: Mapping[str, float], power: float = 1.0
) -> Defended[Any]:
    """What is done with sites by the harm that they do.

    Args:
        names: of the sites.
        found: what is decided about them.
        capped: the share of its weight that each site has already, by its name; one for others.
        power: n records have the weight n ** power.

    Returns:
        Effects, suspects and shares, without anything kept.
    """
    shares = found.weights.pow(1 / power).tolist()
    values = zip(names, found.harm.tolist(), found.gain.tolist(), shares, strict=True)
    effects = {name: Effect(harm, gain, kept) for name, harm, gain, kept in values}
    suspects = []
    for at in found.out:
        harm = effects[names[at]].harm
        why = (
            f"it costs the others {100 * harm:.1f} points of {found.metric}; "
            "`coordinator refit RUN --defence none` puts it back"
        )
        suspects.append(Suspect(names[at], "harm", harm / found.limit, why))
    left_out = {each.site for each in suspects}
    all_ = {name: capped.get(name, 1.0) * effects[name].kept for name in names}
    lowered = {name: share for name, share in all_.items() if share < 1 and name not in left_out}
    return Defended([], lowered, suspects, effects=effects, alike=found.alike)


def defend_updates(
    updates: Sequence[Parameters], rule: str, max_share: float, noise: float = 0.0
) -> Defended[Parameters]:
    """Exclude suspects, cap the weights of updates, and bound what each changes.

    Args:
        updates: of the sites. Private updates report no records: all weights are one.
        rule: "screen" excludes suspects; any other excludes no site.
        max_share: most weight of a site, as in `shares_kept`.
        noise: standard deviation of the privacy noise on each number of an update.
    """
    defended = _screened(updates, rule, max_share)
    kept, shares = bounded_updates(defended.kept, noise)
    return replace(defended, kept=kept, bounded=shares)


def defend_heads(heads: Sequence[Parameters], rule: str, max_share: float) -> Defended[Parameters]:
    """The same for heads, each of which has its site's own classes.

    Args:
        heads: of the sites.
        rule: as in `defend_updates`.
        max_share: as in `defend_updates`.
    """
    defended = _screened(heads, rule, max_share)
    kept, shares = bounded_heads(defended.kept)
    return replace(defended, kept=kept, bounded=shares)


def defend_synthetic(
    sets: Sequence[Synthetic], gradients: Sequence[Tensors], rule: str, max_share: float
) -> Defended[Synthetic]:
    """Exclude suspects, cap the weights of sets of synthetic records, and bound their lengths.

    Args:
        sets: of the sites.
        gradients: of the loss of each set at the model: what a set changes.
        rule: as in `defend_updates`.
        max_share: as in `defend_updates`.
    """
    updates = [
        Parameters(replace(each.header, classes=()), each.round, own)
        for each, own in zip(sets, gradients, strict=True)
    ]
    suspects = screen_updates(updates) if rule == "screen" else []
    defended = cap_records(without(sets, suspects), max_share)
    kept, shares = bounded_images(defended.kept)
    return replace(defended, kept=kept, bounded=shares, suspects=suspects)


def _screened(sent: Sequence[Parameters], rule: str, max_share: float) -> Defended[Parameters]:
    suspects = screen_updates(sent) if rule == "screen" else []
    defended = cap_records(without(sent, suspects), max_share)
    kept = defended.kept
    if rule == "screen" and max_share:
        # A rule for all sites: who is larger than usual is not reported as capped.
        kept = cap_records(kept, EQUAL).kept
    return replace(defended, kept=kept, suspects=suspects)


def cap_records(replies: Sequence[R], max_share: float) -> Defended[R]:
    """Cap the weights of replies that report their number of records.

    Args:
        replies: of the sites.
        max_share: most weight of a site, as in `shares_kept`.
    """
    counts = [[float(max(1, reply.records))] for reply in replies]
    shares, capped = caps(replies, counts, max_share)
    kept = [
        replace(reply, records=max(1, round(reply.records * share))) if share < 1 else reply
        for reply, share in zip(replies, shares, strict=True)
    ]
    return Defended(kept, capped)


def cap_sums(
    replies: Sequence[Parameters], max_share: float, private: bool
) -> Defended[Parameters]:
    """Cap the weights of the class sizes and sums in the first round of a generative run.

    Args:
        replies: of the sites, with counts (C,).
        max_share: most weight of a site, as in `shares_kept`.
        private: whether the sums are noisy; later, the weight is then the square of the records.
    """
    counts = [reply.tensors[COUNTS].clamp_min(0).tolist() for reply in replies]
    shares, capped = caps(replies, counts, max_share, 2.0 if private else 1.0)
    kept = [
        replace(reply, tensors={name: tensor * share for name, tensor in reply.tensors.items()})
        if share < 1
        else reply
        for reply, share in zip(replies, shares, strict=True)
    ]
    return Defended(kept, capped)


A = TypeVar("A", AnySurrogate, Parameters, Synthetic)


def without(sent: Sequence[A], suspects: Sequence[Suspect]) -> list[A]:
    """What was sent by the sites that are not left out."""
    names = {suspect.site for suspect in suspects}
    return [each for each in sent if each.header.site not in names]


def caps(
    sent: Sequence[A],
    counts: Sequence[Sequence[float]],
    max_share: float,
    power: float = 1.0,
    noise: float = 0.0,
) -> tuple[list[float], dict[str, float]]:
    """The share of its weight that each site keeps, and those below one by the site's name.

    Args:
        sent: of the sites.
        counts: each site's records of each class.
        max_share: most weight of a site, as in `shares_kept`.
        power: as there.
        noise: as there.
    """
    shares = shares_kept(counts, max_share, power, noise)
    return shares, below_one(sent, shares)
