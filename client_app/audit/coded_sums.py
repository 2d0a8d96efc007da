"""Membership scores of records under released sums over the code of a target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.surrogates.class_sums import fold, unfold
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)

# Of exact sums: the records' own code, and their place in the second moment.
CODED, MOMENT = "LiRA on the sums of the code", "LiRA on the second moment"
# Added to the eigenvalues of a second moment, as a share of their mean.
RIDGE = 1e-3
ROWS = 512


def coded_scores(
    sent: Parameters, target: Target, features: Tensor, values: Tensor
) -> dict[str, Tensor]:
    """Scores of records, larger for those that are in the sums; from what was released alone.

    With noise, what a record would add to each statistic times the statistic, over the variance of
    its noise: apart from a constant, the logarithm of the likelihood ratio of sums with and
    without it. Exact sums are around the mean of the site's features, so a record's distance from
    that mean is measured in the second moment: times the sums of its rows, and minus its square.

    Args:
        sent: the release.
        target: of the run.
        features: of the records, (n, d).
        values: of the target, (n, k), float64.

    Returns:
        By name of the attack, (n,) float64.
    """
    code, tensors = target.code(values), {k: v.double() for k, v in sent.tensors.items()}
    if sent.claim is not None:
        clipped = clip(features.double(), sent.claim.clip)[0]
        noise = {name: sigma for name, (sigma, _) in sent.claim.noise.items()}
        return {CODED: _likelihood(tensors, noise, code, clipped)}
    records = float(tensors[RECORDS])
    apart = features.double() - tensors[TOTALS] / records
    moment = unfold(tensors[SQUARES], apart.shape[1]) / records
    moment.diagonal().add_(RIDGE * moment.trace() / len(moment))
    scaled = torch.linalg.solve(moment, apart.T).T
    sizes = (code.square().sum(0) if not target.counts else tensors[CODE]).clamp_min(1.0)
    means = tensors[SUMS] / sizes[:, None]
    return {CODED: (code @ means * scaled).sum(1), MOMENT: -(scaled * apart).sum(1)}


def _likelihood(
    tensors: Mapping[str, Tensor], noise: Mapping[str, float], code: Tensor, features: Tensor
) -> Tensor:
    parts = []
    for t, z in zip(torch.split(code, ROWS), torch.split(features, ROWS), strict=True):
        found = torch.zeros(len(z), dtype=torch.float64)
        for name, sigma in noise.items():
            found += _added(name, t, z).flatten(1) @ tensors[name].flatten() / sigma**2
        parts.append(found)
    return torch.cat(parts)


def _added(name: str, code: Tensor, features: Tensor) -> Tensor:
    """What each record adds to a statistic: codes (n, q), features (n, d)."""
    if name == RECORDS:
        return torch.ones(len(code), 1, dtype=torch.float64)
    if name in (CODE, TOTALS):
        return code if name == CODE else features
    if name == SUMS:
        return code[:, :, None] * features[:, None]
    rows = {SQUARES: features, PRODUCTS: code}[name]
    return torch.stack([fold(torch.outer(row, row)) for row in rows])
