"""The defence of fedpft for methods in closed form: class sums are compared as the Gaussians with the
same class means and covariance. No Flower types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.shared_covariances import AnyCovariance, StoredGram
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.robustness.defence import defend_surrogates


def defend_sums(
    sent: Sequence[Parameters], rule: str, max_share: float, classes: tuple[str, ...]
) -> Defended[Parameters]:
    """Cap weights, exclude suspects, and bound the influence of the others.

    Args:
        sent: checked class sums of the sites, without privacy.
        rule: as in `defend_surrogates`.
        max_share: as in `defend_surrogates`.
        classes: of the run.

    Returns:
        The messages with bounded means and covariances. Their counts stay: `capped` states the
        share of its weight that each site keeps.
    """
    mixtures = [gaussians(each) for each in sent]
    defended = defend_surrogates(mixtures, rule, max_share, classes)
    own = {each.header.site: (each, mixture) for each, mixture in zip(sent, mixtures, strict=True)}
    kept = [
        with_gaussians(*own[each.header.site], each)
        for each in defended.kept
        if isinstance(each, Surrogate)
    ]
    return Defended(kept, defended.capped, defended.suspects)


def gaussians(sent: Parameters) -> Surrogate:
    """One Gaussian for each class, with the covariance that all classes share.

    Args:
        sent: counts (C,), sums (C, d), and squares (d (d + 1) / 2,) of the records around their class
            means.
    """
    counts = sent.tensors["counts"].double()
    means = sent.tensors["sums"].double() / counts.clamp_min(1e-30)[:, None]
    covariance = _covariance(sent.tensors, means.shape[1], float(counts.sum()))
    present = torch.arange(len(counts))[counts > 0]
    if isinstance(covariance, Diagonal):
        covariance = Diagonal(covariance.variances[present])
    table = Mixtures(
        counts.round().long(), present, torch.ones(len(present)), means[present].float(), covariance
    )
    return Surrogate(sent.header, table)


def with_gaussians(sent: Parameters, before: Surrogate, after: Surrogate) -> Parameters:
    """A message with the class means and the covariance that its Gaussians have now.

    Args:
        sent: class sums.
        before: its `gaussians`.
        after: the same with other means, or with a covariance times a factor.
    """
    old, new = before.mixtures, after.mixtures
    scale = _ratio(new.covariance, old.covariance)
    moves = torch.zeros(len(old.counts), before.dimension, dtype=torch.float64)
    moves[old.labels] = new.means.double() - old.means.double()
    if scale == 1 and not moves.any():
        return sent
    tensors = dict(sent.tensors)
    moved = tensors["sums"].double() + tensors["counts"].double()[:, None] * moves
    tensors["sums"] = moved.to(tensors["sums"])
    for name in tensors.keys() & {"squares", "variances"}:
        tensors[name] = tensors[name] * scale
    return replace(sent, tensors=tensors)


def _covariance(tensors: Tensors, dimension: int, records: float) -> AnyCovariance:
    """The covariance of all records around their class means; ones where sites do not send it."""
    squares = tensors.get("squares")
    if squares is None:
        return Diagonal(torch.ones(len(tensors["counts"]), dimension))
    rows = torch.arange(dimension)
    diagonal = squares.double()[rows * dimension - rows * (rows - 1) // 2] / records
    # Unfolded at each use: the coordinator holds one matrix, not one for each site.
    read: Callable[[], Tensor] = lambda: unfold(squares.double(), dimension) / records  # noqa: E731
    return StoredGram(read, diagonal.clamp_min(0)[None])


def _ratio(new: AnyCovariance, old: AnyCovariance) -> float:
    if new is old:
        return 1.0
    total = float(old.variances_per_dimension().double().sum())
    return float(new.variances_per_dimension().double().sum()) / total if total > 0 else 1.0
