"""Defences against hostile sites, applied before learning. No Flower types.

Weights are always capped, and what one update, head or set of synthetic records changes is always
bounded. The setting `defence` selects more: "screen" excludes sites that disagree with the others;
"median" and "trimmed" pool so that a minority cannot move the result far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fedsurrogate.common.models.generators import COUNTS
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.surrogates.synthetic import Synthetic
from fedsurrogate.strategies.base.defended import Defended, Suspect
from fedsurrogate.strategies.pooling.site_weights import scaled, shares_kept
from fedsurrogate.strategies.robustness.bounded_surrogates import bounded, can_bound, harmful
from fedsurrogate.strategies.robustness.class_points import class_points
from fedsurrogate.strategies.robustness.influence import (
    bounded_heads,
    bounded_images,
    bounded_updates,
)
from fedsurrogate.strategies.robustness.screening import screen
from fedsurrogate.strategies.robustness.update_screening import screen_updates

# Most weight of an update or head with "screen", in weights of the usual site. A false one within the
# bound is not found, so it must not count as much as three honest ones.
EQUAL = 1.0
T = TypeVar("T")
R = TypeVar("R", Parameters, Synthetic)


def defend_surrogates(
    surrogates: Sequence[AnySurrogate], rule: str, max_share: float, classes: tuple[str, ...]
) -> Defended[AnySurrogate]:
    """Cap the weights of surrogates of one kind, exclude suspects, and bound the others' influence.

    Args:
        surrogates: of the sites. Noisy sums all have the same classes.
        rule: "screen" excludes suspects and bounds the others; any other does neither.
        max_share: most weight of a site, as in `shares_kept`.
        classes: of the run.
    """
    # Pooled private means are weighted by the square of records; the cap must bound this weight.
    power = 2.0 if any(isinstance(surrogate, SumsSurrogate) for surrogate in surrogates) else 1.0
    suspects: list[Suspect] = []
    bound = rule == "screen" and can_bound(surrogates)
    # Never half of the sites or more, by both together: without a majority, the honest half is
    # unknown.
    most = (len(surrogates) - 1) // 2
    if bound:
        # First, because a harmful site distorts what the screen compares the others with.
        suspects = harmful(_with_caps(surrogates, max_share, power)[0], most)
    if rule == "screen":
        points = class_points(_without(surrogates, suspects), classes)
        suspects += screen(points, single_parts=bound)[: most - len(suspects)]
    kept, capped = _with_caps(_without(surrogates, suspects), max_share, power)
    return Defended(bounded(kept) if bound else kept, capped, suspects)


def _with_caps(
    surrogates: Sequence[AnySurrogate], max_share: float, power: float
) -> tuple[list[AnySurrogate], dict[str, float]]:
    """Surrogates with capped counts, and the share of weight that each capped site keeps."""
    counts = [[max(0.0, float(count)) for count in surrogate.counts] for surrogate in surrogates]
    noise = max(
        (each.sums.sigmas["counts"] for each in surrogates if isinstance(each, SumsSurrogate)),
        default=0.0,
    )
    shares = shares_kept(counts, max_share, power, noise)
    kept = [scaled(surrogate, share) for surrogate, share in zip(surrogates, shares, strict=True)]
    return kept, _capped([surrogate.header.site for surrogate in surrogates], shares)


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
    defended = cap_records(_without(sets, suspects), max_share)
    kept, shares = bounded_images(defended.kept)
    return replace(defended, kept=kept, bounded=shares, suspects=suspects)


def _screened(sent: Sequence[Parameters], rule: str, max_share: float) -> Defended[Parameters]:
    suspects = screen_updates(sent) if rule == "screen" else []
    defended = cap_records(_without(sent, suspects), max_share)
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
    shares = shares_kept([[float(max(1, reply.records))] for reply in replies], max_share)
    kept = [
        replace(reply, records=max(1, round(reply.records * share))) if share < 1 else reply
        for reply, share in zip(replies, shares, strict=True)
    ]
    return Defended(kept, _capped([reply.header.site for reply in replies], shares))


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
    shares = shares_kept(counts, max_share, 2.0 if private else 1.0)
    kept = [
        replace(reply, tensors={name: tensor * share for name, tensor in reply.tensors.items()})
        if share < 1
        else reply
        for reply, share in zip(replies, shares, strict=True)
    ]
    return Defended(kept, _capped([reply.header.site for reply in replies], shares))


A = TypeVar("A", AnySurrogate, Parameters, Synthetic)


def _without(given: Sequence[A], suspects: Sequence[Suspect]) -> list[A]:
    names = {suspect.site for suspect in suspects}
    return [each for each in given if each.header.site not in names]


def _capped(sites: Sequence[str], shares: Sequence[float]) -> dict[str, float]:
    return {site: share for site, share in zip(sites, shares, strict=True) if share < 1}
