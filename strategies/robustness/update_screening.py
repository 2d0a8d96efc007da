"""Screen of updates and heads: finds those that disagree with the other sites'. Functions on
tensors; no Flower types.

far: an update, its control variates or its feature moments are much farther from the geometric
median of the others than the others are. opposed: its direction is opposite to the others', or
unrelated to them although they agree, like an update trained on wrong labels or a random one.
Honest sites with few classes also differ much, so this screen is coarse, and no default.
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
