"""Screen of updates and heads: finds those that disagree with the other sites'. Functions on
tensors; no Flower types.

far: an update, its control variates or its feature moments are much farther from the geometric
median of the others than the others are. opposed: its direction is opposite to the others', or
unrelated to them although they agree, like an update trained on wrong labels or a random one.
Honest sites with few classes also differ much, so this screen is coarse; the screen of class means
(screening.py) detects more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.strategies.base.defended import Suspect
from fedsurrogate.strategies.pooling.robust_centres import median_weights

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
    sites = [update.header.site for update in updates]
    gram = _gram([_aligned(update, updates) for update in updates])
    beside, suspects = _besides(updates), list[Suspect]()
    most = (len(sites) - 1) // 2
    while (
        len(suspects) < most
        and len(sites) >= FEWEST
        and (suspect := _worst(gram, sites, beside)) is not None
    ):
        suspects.append(suspect)
        kept = [index for index, site in enumerate(sites) if site != suspect.site]
        gram, sites = gram[kept][:, kept], [sites[index] for index in kept]
        beside = [replace(each, gram=each.gram[kept][:, kept]) for each in beside]
    return suspects


@dataclass(frozen=True)
class Beside:
    """Extra statistics sent with the parameters.

    Attributes:
        name: of the statistic, for the reason.
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


def _besides(updates: Sequence[Parameters]) -> list[Beside]:
    """The extra statistics that exist: control variates, and mean and deviation of the features."""
    extras = []
    control = [
        [tensor for name, tensor in sorted(u.tensors.items()) if name.startswith(CONTROL)]
        for u in updates
    ]
    if all(control):
        extras.append(Beside("control variate", _gram(control), far=FAR_CONTROL))
    if all("deviation" in update.tensors for update in updates):
        # Sites with another kind of image may differ by as much as the spread of the features.
        wide = (
            torch.stack([update.tensors["deviation"] for update in updates])
            .double()
            .abs()
            .median(0)
            .values
        )
        for name in ("mean", "deviation"):
            rows = torch.stack([update.tensors[name] for update in updates]).double()
            rows = rows - rows.median(0).values
            extras.append(
                Beside(f"{name} of its features", rows @ rows.T, DEVIATIONS * float(wide.norm()))
            )
    return extras


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


def _distances(gram: Tensor, least: float = 0.0, far: float = FAR) -> Tensor:
    """Scores (S,), at least 1 where a site is much farther from the others' geometric median than
    usual.
    """
    count = len(gram)
    mixed = median_weights(gram.expand(count, count, count), 1 - torch.eye(count, dtype=gram.dtype))
    squares = gram.diagonal() - 2 * (mixed * gram).sum(1) + ((mixed @ gram) * mixed).sum(1)
    away = squares.clamp_min(0).sqrt()
    # Rounding differences between equal tensors must not count.
    same = ROUNDING * gram.diagonal().median().clamp_min(0).sqrt()
    return away / torch.maximum(far * away.median(), same).clamp_min(max(least, 1e-30))


def _worst(gram: Tensor, sites: Sequence[str], beside: Sequence[Beside]) -> Suspect | None:
    count, distances = len(sites), _distances(gram)
    for each in beside:
        scores = _distances(each.gram, each.least, each.far)
        if float(scores.max()) >= 1:
            site = int(scores.argmax())
            reason = (
                f"its {each.name} is much farther from those of the other sites than these "
                "are from each other"
            )
            return Suspect(sites[site], "far", float(scores[site]), reason)
    lengths = gram.diagonal().clamp_min(1e-30).sqrt()
    cosines = gram / (lengths[:, None] * lengths)
    agreement = (cosines.sum(1) - 1) / (count - 1)
    if float(distances.max()) >= 1:
        site = int(distances.argmax())
        reason = (
            "its update is much farther from those of the other sites than these are from "
            "each other"
        )
        return Suspect(sites[site], "far", float(distances[site]), reason)
    site = int(agreement.argmin())
    least = UNRELATED if float(agreement.median()) >= AGREE else opposed_below(count)
    if float(agreement[site]) < least:
        reason = "the direction of its update disagrees with the updates of the other sites"
        return Suspect(sites[site], "opposed", 1 + least - float(agreement[site]), reason)
    return None
