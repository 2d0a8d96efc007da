"""Which sites' noisy second moments the other sites' do not explain. Plain functions on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.surrogates.class_sums import PRESENT, fold
from common.surrogates.surrogates import SumsSurrogate

# So many times as far (in squared distance) from the others' median as the median site; and as much of the square of what
# is usual. Standard errors that noise is given.
FARTHER, SHARE, SIGMAS = 6.0, 1.0, 5.0


def oddness(surrogates: Sequence[SumsSurrogate]) -> Tensor:
    """Scores (S,), at least 1 where what a site's records vary within classes is unlike the other sites'.

    Of the second moment by record, what its own class means explain is taken off; the rest is compared with the coordinate
    median of all sites, one vote each. What noise adds to the squared distance is subtracted.
    """
    tables = [within(surrogate) for surrogate in surrogates]
    scores = torch.zeros(len(surrogates))
    judged = [index for index, table in enumerate(tables) if table is not None]
    if len(judged) < 3:
        return scores
    rest = torch.stack([table[0] for table in tables if table is not None])
    noise = torch.tensor([table[1] for table in tables if table is not None], dtype=torch.float64)
    middle, entries = rest.median(0).values, rest.shape[1]
    # The median of normal noise varies by pi / 2 over their number.
    around = noise + noise.median() * torch.pi / (2 * len(judged))
    squares = (rest - middle).square().sum(1) - entries * around
    error = (2 * entries) ** 0.5 * around + 2 * (squares.clamp_min(0) * around).sqrt()
    length = (middle.square().sum() - entries * noise.median() * torch.pi / (2 * len(judged))).clamp_min(0)
    allowed = FARTHER * squares.clamp_min(0).median() + SHARE * length + SIGMAS * error
    scores[judged] = (squares / allowed.clamp_min(1e-30)).clamp_min(0).float()
    return scores


def within(surrogate: SumsSurrogate) -> tuple[Tensor, float] | None:
    """The second moment by record around the class means, (d,) or folded, and the variance of the noise in its entries;
    None without one, or where the site's records do not stand out from the noise.
    """
    sums = surrogate.sums
    if sums.squares is None:
        return None
    counts = sums.counts.double()
    total = float(counts.clamp_min(0).sum())
    if total <= PRESENT * sums.sigmas["counts"] * len(counts) ** 0.5:
        return None
    kept = counts > PRESENT * sums.sigmas["counts"]
    weights, means = counts[kept] / total, sums.sums[kept].double() / counts[kept, None]
    d = means.shape[1]
    blur = float((weights * (sums.sigmas["sums"] / counts[kept]).square()).sum())
    if len(sums.squares) == d:
        explained = weights @ means.square() - blur
    else:
        explained = fold((weights[:, None] * means).T @ means - blur * torch.eye(d, dtype=torch.float64))
    return sums.squares.double() / total - explained, (sums.sigmas["squares"] / total) ** 2
