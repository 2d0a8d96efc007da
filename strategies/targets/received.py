"""Coded sums of the sites' records, from what the coordinator receives: those of each site, or a
secure sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)
from fedsurrogate.strategies.closed_form.statistics import Statistics, sum_of
from fedsurrogate.strategies.targets.sums import CodedSums, Noise

Tables = Mapping[str, Tensor]
Sigmas = Mapping[str, float]
# Largest error of a number in half precision, as a share of it. A symmetric matrix of independent
# errors has eigenvalues up to about twice the largest norm of a row (Bandeira & van Handel 2016).
HALF = 2.0**-11


def message_rounding(squares: Tensor) -> float:
    """Largest eigenvalue, about, of what rounding to 16 bits has changed in a second moment.

    Args:
        squares: (d, d).
    """
    return 2 * HALF / math.sqrt(3) * float(squares.norm(dim=1).max())


def sum_rounding(usual: float, dimension: int) -> float:
    """The same for whole steps of a secure sum.

    Args:
        usual: standard deviation of the change in an entry.
        dimension: d.
    """
    return 2 * usual * math.sqrt(dimension)


def of_site(tensors: Tables, target: Target) -> CodedSums:
    """The exact sums of one site.

    Args:
        tensors: records, totals, code, and sums, squares and products around the site's mean; those
            that the target has.
        target: of the run.
    """
    code, sums = tensors[CODE].double(), tensors[SUMS].double()
    records = tensors[RECORDS].double()
    mean = tensors[TOTALS].double() / records
    squares = unfold(tensors[SQUARES].double(), len(mean)) / records
    products = None
    if PRODUCTS in tensors:
        products = unfold(tensors[PRODUCTS].double(), len(code)) + torch.outer(code, code) / records
    moment = Statistics(records, mean[None], squares)
    table = sums + torch.outer(code, mean)
    known = target.known(code)
    groups = {known: moment} if known else {}
    whole = CodedSums(
        code, table, moment, products, rounding=message_rounding(squares), groups=groups
    )
    return whole if target.divides else _with_all(whole)


def around_zero(
    tensors: Tables, sigmas: Sigmas, target: Target, unit_norm: bool, rounding: float = 0.0
) -> CodedSums:
    """The sums of all sites around zero: of a secure sum, or with noise.

    Args:
        tensors: by statistic, float64.
        sigmas: standard deviation of the noise in an entry, by statistic; empty without noise.
        target: of the run.
        unit_norm: whether all features have norm one, so that their number is the trace of the
            second moment.
        rounding: standard deviation of what whole steps have changed in an entry of the second
            moment.

    Raises:
        ValueError: without records.
    """
    if target.blocks:
        return _of_blocks(tensors, target, rounding)
    code, sums = tensors[CODE].double(), tensors[SUMS].double()
    squares = unfold(tensors[SQUARES].double(), sums.shape[1])
    if RECORDS in tensors:
        records, totals = float(tensors[RECORDS]), tensors[TOTALS].double()
    elif target.divides:
        records, totals = float(code.sum()), sums.sum(0)
    else:
        # The public centre stands for the mean, where a record may be in no row.
        totals = torch.zeros(sums.shape[1], dtype=torch.float64)
        records = float(squares.trace()) if unit_norm else target.counted(code)
    records = max(records, 1.0) if sigmas else records
    if not records > 0:
        raise ValueError("coded sums without records")
    mean = totals / records
    covariance = squares / records - torch.outer(mean, mean)
    products = unfold(tensors[PRODUCTS].double(), len(code)) if PRODUCTS in tensors else None
    counts = torch.tensor([records], dtype=torch.float64)
    moment = Statistics(counts, mean[None], (covariance + covariance.T) / 2)
    changed = sum_rounding(rounding, sums.shape[1]) / records
    whole = CodedSums(code, sums, moment, products, rounding=changed)
    if RECORDS in tensors and not target.divides:
        whole = _with_all(whole)
    return replace(whole, noise=_noise(sigmas, len(code))) if sigmas else whole


def _of_blocks(tensors: Tables, target: Target, rounding: float) -> CodedSums:
    """The exact sums of all sites, whose moments are apart by block."""
    groups = {}
    for at, known in enumerate(target.known_in_blocks()):
        own = {name: tensors[name][at] for name in (TOTALS, SQUARES)}
        if not (records := float(tensors[RECORDS][at])) > 0:
            continue
        mean = own[TOTALS].double() / records
        squares = unfold(own[SQUARES].double(), len(mean))
        covariance = squares / records - torch.outer(mean, mean)
        counts = torch.tensor([records], dtype=torch.float64)
        groups[known] = Statistics(counts, mean[None], (covariance + covariance.T) / 2)
    if not groups:
        raise ValueError("coded sums without records")
    moment = sum_of(list(groups.values()))
    code, sums = tensors[CODE].double(), tensors[SUMS].double()
    changed = sum_rounding(rounding, len(groups) * sums.shape[1]) / moment.records
    return _with_all(CodedSums(code, sums, moment, rounding=changed, groups=groups))


def _with_all(sums: CodedSums) -> CodedSums:
    """With the code 1 of all records as the first row."""
    records = sums.moment.counts
    return replace(
        sums,
        code=torch.cat([records, sums.code]),
        sums=torch.cat([records * sums.moment.means, sums.sums]),
    )


def _noise(sigmas: Sigmas, rows: int) -> Noise:
    """The noise in each row; where it is sent, the code 1 of all records comes first."""
    code, sums = (
        torch.tensor(
            [*([sigmas[first]] if first in sigmas else []), *[sigmas[others]] * rows],
            dtype=torch.float64,
        )
        for first, others in ((RECORDS, CODE), (TOTALS, SUMS))
    )
    return Noise(code, sums, sigmas[SQUARES], sigmas.get(PRODUCTS, 0.0))
