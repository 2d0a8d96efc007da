"""Defences against hostile sites, applied before learning. No Flower types.

Weights are always capped, and what one update, head or set of synthetic records changes is always
bounded. The setting `defence` selects more: "harm" lowers the weight of a site whose statistics make the
head of the others worse; "screen" excludes updates that disagree with the others; "median" and "trimmed"
pool so that a minority cannot move the result far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fedsurrogate.common.models.generators import COUNTS
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Synthetic
from fedsurrogate.strategies.base.outcome import Defended, Effect, Suspect
from fedsurrogate.strategies.pooling.site_weights import scaled, shares_kept
from fedsurrogate.strategies.robustness.harm import Decided, judged, of_surrogates
from fedsurrogate.strategies.robustness.influence import (
    bounded_heads,
    bounded_images,
    bounded_updates,
    screen_updates,
)
from fedsurrogate.strategies.robustness.reach import within_reach

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
        rule: "harm" lowers the weight of harmful sites, and leaves some out; any other does not.
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
    if rule != "harm":
        return Defended(kept, capped)
    sites = [each.header.site for each in kept]
    found = by_harm(sites, judged(of_surrogates(kept, classes)), capped, power)
    kept = [
        scaled(each, found.effects[each.header.site].kept) for each in without(kept, found.suspects)
    ]
    return replace(found, kept=kept)


def by_harm(
    names: Sequence[str],
    found: Decided,
    capped: Mapping[str, float],
    power: float = 1.0,
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
            f"it costs the others {100 * harm:.1f} points of {found.measure}; "
            "`coordinator relearn RUN --defence none` puts it back"
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
    names = [each.header.site for each in sent]
    return shares, {site: share for site, share in zip(names, shares, strict=True) if share < 1}
