"""Which sites' updates or heads the other sites' cannot explain. Plain functions on tensors; no Flower type in here.

far: an update lies much farther from the geometric median of the others' than these do. opposed: it points away from the
others', or has nothing in common with them where they agree, as one that was trained on other labels. Updates of honest
sites that hold few classes differ much, so what is noticed here is coarse; class means (strategies/screening.py) say more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.parameters import CONTROL, Parameters
from strategies.robust import median_weights
from strategies.screening import Suspect

# So many times the median distance from the others' geometric median.
FAR = 5.0
# Mean cosines with the others: so low is opposed; where the median site has as much as AGREE, UNRELATED is too.
OPPOSED, AGREE, UNRELATED = -0.2, 0.3, 0.1
# Fewer sites than these have no majority that could say what is usual.
FEWEST = 4


def screen_updates(updates: Sequence[Parameters]) -> list[Suspect]:
    """Suspects, the most conspicuous first; never half of the sites or more. Each is left out before the next is judged."""
    rows = [torch.cat([tensor.flatten() for tensor in _aligned(update, updates)]) for update in updates]
    sites = [update.header.site for update in updates]
    gram = torch.stack(rows).double()
    gram = gram @ gram.T
    found: list[Suspect] = []
    most = (len(sites) - 1) // 2
    while len(found) < most and len(sites) >= FEWEST and (suspect := _worst(gram, sites)) is not None:
        found.append(suspect)
        kept = [index for index, site in enumerate(sites) if site != suspect.site]
        gram, sites = gram[kept][:, kept], [sites[index] for index in kept]
    return found


def _aligned(update: Parameters, updates: Sequence[Parameters]) -> list[Tensor]:
    """What is compared: parameters without control variates; zeros for the classes that a head does not know."""
    names = tuple(dict.fromkeys(name for each in updates for name in each.header.classes))
    found = []
    for name, tensor in sorted(update.tensors.items()):
        if name.startswith(CONTROL) or name in ("mean", "deviation"):
            continue
        if len(tensor) == len(update.header.classes) and len(names) > len(tensor):
            wide = tensor.new_zeros(len(names), *tensor.shape[1:])
            wide[[names.index(each) for each in update.header.classes]] = tensor
            tensor = wide
        found.append(tensor)
    return found


def _worst(gram: Tensor, sites: Sequence[str]) -> Suspect | None:
    count = len(sites)
    mixed = median_weights(gram.expand(count, count, count), 1 - torch.eye(count, dtype=gram.dtype))
    squares = gram.diagonal() - 2 * (mixed * gram).sum(1) + ((mixed @ gram) * mixed).sum(1)
    away = squares.clamp_min(0).sqrt()
    distances = away / (FAR * away.median().clamp_min(1e-30))
    lengths = gram.diagonal().clamp_min(1e-30).sqrt()
    cosines = gram / (lengths[:, None] * lengths)
    agreement = (cosines.sum(1) - 1) / (count - 1)
    if float(distances.max()) >= 1:
        site = int(distances.argmax())
        reason = "its update is much farther from the other sites' than these are from each other"
        return Suspect(sites[site], "far", float(distances[site]), reason)
    site = int(agreement.argmin())
    least = UNRELATED if float(agreement.median()) >= AGREE else OPPOSED
    if float(agreement[site]) < least:
        reason = "its update points elsewhere than the other sites' do together"
        return Suspect(sites[site], "opposed", 1 + least - float(agreement[site]), reason)
    return None
