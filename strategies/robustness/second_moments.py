"""Screen of noisy second moments: finds sites that disagree with the other sites. Functions on
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.class_sums import PRESENT, fold
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate

# Allowed squared distance from the median: a multiple of the median site's, plus a multiple of the
# median's squared length, plus a number of standard errors for noise.
FARTHER, SHARE, SIGMAS = 6.0, 1.0, 5.0


def oddness(surrogates: Sequence[SumsSurrogate]) -> Tensor:
    """Scores of the sites' variation within classes.

    The part explained by the site's own class means is subtracted from the second moment per
    record. The rest is compared with the coordinate median of all sites, one vote each. The noise
    in the squared distance is subtracted.

    Args:
        surrogates: of the S sites.

    Returns:
        (S,), at least 1 where the variation differs too much from the other sites'.
    """
    tables = [within(surrogate) for surrogate in surrogates]
    scores = torch.zeros(len(surrogates))
    judged = [index for index, table in enumerate(tables) if table is not None]
    if len(judged) < 3:
        return scores
    rest = torch.stack([table[0] for table in tables if table is not None])
    noise = torch.tensor([table[1] for table in tables if table is not None], dtype=torch.float64)
    middle, entries = rest.median(0).values, rest.shape[1]
    # The median of n normal values has pi / (2 n) times the variance of one value.
    around = noise + noise.median() * torch.pi / (2 * len(judged))
    squares = (rest - middle).square().sum(1) - entries * around
    error = (2 * entries) ** 0.5 * around + 2 * (squares.clamp_min(0) * around).sqrt()
    length = (
        middle.square().sum() - entries * noise.median() * torch.pi / (2 * len(judged))
    ).clamp_min(0)
    allowed = FARTHER * squares.clamp_min(0).median() + SHARE * length + SIGMAS * error
    scores[judged] = (squares / allowed.clamp_min(1e-30)).clamp_min(0).float()
    return scores


def within(surrogate: SumsSurrogate) -> tuple[Tensor, float] | None:
    """The variation of a site's records within classes.

    Args:
        surrogate: of the site.

    Returns:
        The second moment per record around the class means, (d,) or folded, and the noise variance
        of its entries; None without second moments, or if the site's records do not stand out from
        the noise.
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
        explained = fold(
            (weights[:, None] * means).T @ means - blur * torch.eye(d, dtype=torch.float64)
        )
    return sums.squares.double() / total - explained, (sums.sigmas["squares"] / total) ** 2
