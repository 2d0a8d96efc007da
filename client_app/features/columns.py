"""Columns of a site's features whose scale or offset 16 bits cannot hold together with the others, and the
frame that makes all columns alike.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.client_app.features.on_disk import chunks, written
from fedsurrogate.common.surrogates.columns import LARGEST, SMALLEST, Frame, in_frame

# Distance of a column from zero, in its own range. At 16 bits a mean is off by a 4,000th of it.
FAR = 64.0
# The largest number, over the range of the median column; and that over the range below which a
# tenth of the columns lie. Features of backbones stay below 8.
UNEQUAL = 32.0
# The largest number, over the smallest range. With few records some columns vary little by chance,
# so it counts from so many records on; features of backbones then stay below 300.
SMALLEST_SHARE, ENOUGH = 512.0, 32
# Range of the median column, from which on squares leave what messages and solvers hold. Features of
# backbones stay between 2^-7 and 2^7.
LEAST, MOST = 2.0**-13, 2.0**13
# Squared norm of the mean record, over the mean squared distance from it. Gradients and sums of squares
# then see little but the mean. Features of backbones stay below 3.
FAR_TOGETHER = 8.0
# Mean squared norm of the features in a frame that only shifts them: a bias, whose feature is 1, then
# learns about as fast as the weights of the largest directions.
SQUARED_NORM = 10.0
# Of these records the ranges are found.
SAMPLE = 8192
# A column varies if this share of the records differs from the others, by more than rounding.
SHARE, ROUNDING = 0.05, 2.0**-20


def frame_of(features: Tensor) -> Frame | None:
    """The mean and the deviation of every column, if any column is odd, or all are tiny or huge; the
    mean and one scale for all columns, if only their means together are far from zero.

    Args:
        features: of the training records, (n, d).

    Returns:
        The frame; None where 16 bits hold all columns, as those of most backbones.

    Example:
        >>> drawn = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> frame_of(drawn) is None, frame_of(drawn + torch.tensor([0.0, 1e4, 0.0])) is None
        (True, False)
        >>> frame_of(1e-9 * drawn) is None
        False
        >>> frame_of(drawn + 9.0).scale.unique().numel()
        1
    """
    unequal = bool(odd_columns(features)) or _tiny_or_huge(features)
    if not (unequal or _far_together(features)):
        return None
    count = len(features)
    total = torch.zeros(features.shape[1], dtype=torch.float64)
    for rows in chunks(*features.shape):
        total += features[rows].cpu().double().sum(0)
    # The offset is exact in single precision, so the deviation is around the offset that is sent.
    mean = (total / count).float().double()
    squares = torch.zeros_like(total)
    for rows in chunks(*features.shape):
        squares += (features[rows].cpu().double() - mean).square().sum(0)
    deviation = (squares / count).sqrt().float().double()
    if not unequal:
        one_scale = (deviation.square().sum() / SQUARED_NORM).sqrt().float().double()
        deviation = torch.full_like(deviation, float(one_scale))
    # Subnormal numbers in single precision stay as they are.
    deviation = torch.where(deviation < SMALLEST, 0.0, deviation)
    return Frame(mean, deviation) if float(mean.abs().max()) <= LARGEST else None


def _tiny_or_huge(features: Tensor) -> bool:
    """Whether the usual column is, which a privacy clip and public ranges do not mind."""
    few = features[:SAMPLE].cpu()
    if not few.numel():
        return False
    least, most = (each.double() for each in few.aminmax(dim=0))
    ranges = (most - least)[most > least]
    return bool(len(ranges)) and not LEAST <= float(ranges.median()) <= MOST


def _far_together(features: Tensor) -> bool:
    """Whether the mean of all columns is far from zero, beside what the records differ by."""
    few = features[:SAMPLE].cpu().double()
    if len(few) < 2:
        return False
    variance, mean = torch.var_mean(few, dim=0, correction=0)
    return float(mean.square().sum()) > FAR_TOGETHER * float(variance.sum())


def framed(features: Tensor, frame: bytes, folder: Path | None) -> Tensor:
    """Features in a frame.

    Args:
        features: (n, d).
        frame: of their columns; empty: the features stay as they are.
        folder: for a file to which they are written chunk by chunk; None: they stay in memory.

    Returns:
        Features (n, d), float32.

    Raises:
        SurrogateError: for a frame of other columns.
    """
    if not frame or folder is None:
        return in_frame(features, frame)
    parts = (in_frame(features[rows], frame) for rows in chunks(*features.shape))
    return written(parts, features.shape[1], folder)


def odd_columns(features: Tensor) -> list[int]:
    """Columns that take part of the 16 bits from others, or lose their own.

    Args:
        features: of the records, (n, d).

    Returns:
        Indices, the worst first; empty for features that need no frame.

    Example:
        >>> drawn = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> odd_columns(drawn * torch.tensor([1.0, 1e-4, 1.0]))
        [1]
    """
    few = features[:SAMPLE].cpu().float()
    if len(few) < 2 or not few.shape[1]:
        return []
    least, most = (each.double() for each in few.aminmax(dim=0))
    sizes, ranges = torch.maximum(least.abs(), most.abs()), most - least
    varies = _varying(few, ROUNDING * sizes)
    if not varies.any():
        return []
    own, largest = ranges[varies], float(sizes.max())
    usual, lower = float(own.median()), float(own.quantile(0.1))
    odd = varies & (sizes > FAR * ranges)
    odd |= sizes > UNEQUAL * usual
    if usual > UNEQUAL * lower:
        odd |= varies & (ranges * UNEQUAL < usual)
    if len(few) >= ENOUGH:
        odd |= varies & (ranges * SMALLEST_SHARE < largest)
    # How far a column is from the median one, in either direction.
    apart = torch.maximum(sizes / usual, usual / ranges.clamp_min(1e-300)).masked_fill(~odd, 0.0)
    return [int(index) for index in apart.argsort(descending=True)[: int(odd.sum())]]


def _varying(records: Tensor, least: Tensor) -> Tensor:
    """Whether the numbers of a column between which all but SHARE at each end lie are further apart
    than a bound.

    Args:
        records: (n, d), float32.
        least: the bound of each column, (d,), float64.

    Returns:
        True or False for each column, (d,).
    """
    low, high = (1 + round(share * (len(records) - 1)) for share in (SHARE, 1 - SHARE))
    # Enough records on both sides of the mean decide most columns, in a fifth of the time of ranks.
    mean = records.mean(0).double()
    below, above = (mean - least).float(), (mean + least).float()
    varies = above.double() - below.double() > least
    varies &= (records <= below).sum(0) >= low
    varies &= (records >= above).sum(0) > len(records) - high
    if len(rest := (~varies).nonzero().flatten()):
        columns = records[:, rest].T.contiguous()
        ends = [columns.kthvalue(rank).values.double() for rank in (low, high)]
        varies[rest] = ends[1] - ends[0] > least[rest]
    return varies


def warning_of(features: Tensor) -> str:
    """What a person must know where a run puts odd columns into no frame; empty without any.

    Args:
        features: of the training records, (n, d).

    Example:
        >>> drawn = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> warning_of(drawn + torch.tensor([0.0, 0.0, 1e4]))[:51]
        'column 2 of the features (counted from 0) has numbe'
        >>> warning_of(drawn)
        ''
    """
    if not (odd := odd_columns(features)):
        return ""
    worst = features[:SAMPLE, odd[0]].double()
    more = f", and {len(odd) - 1} more are as odd" if len(odd) > 1 else ""
    return (
        f"column {odd[0]} of the features (counted from 0) has numbers from {float(worst.min()):.4g} "
        f"to {float(worst.max()):.4g}, unlike the others{more}; this run holds all columns on one "
        "scale, so rounding, clip or noise leaves little of the smaller ones. Give columns of a like "
        "size: let the run shift and divide them by public ranges, with features.ranges = 'low,high; "
        "low,high; ...' (plausible values of each column, in their order, not taken from the data), "
        "or, where the method has no use for these, do so at all sites alike"
    )
