"""Coded sums of the sites' records, from what the coordinator receives: those of each site, or a
secure sum; and the check that some records can have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.surrogates.class_sums import FALSE_ALARM, TABLE_TOLERANCE
from fedsurrogate.common.surrogates.coded_sums import unfolded
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
# Half precision moves eigenvalues by about this share of the sum of all of them.
ROUNDING = 1e-3
# Largest error of a number in half precision, as a share of it. A symmetric matrix of independent
# errors has eigenvalues up to about twice the largest norm of a row (Bandeira & van Handel 2016).
HALF = 2.0**-11
Fault = Callable[[str], FedSurrogateError]


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
    squares = unfolded(tensors[SQUARES].double(), len(mean)) / records
    products = None
    if PRODUCTS in tensors:
        products = (
            unfolded(tensors[PRODUCTS].double(), len(code)) + torch.outer(code, code) / records
        )
    moment = Statistics(records, mean[None], squares)
    table = sums + torch.outer(code, mean)
    entry = HALF / math.sqrt(3) * float(squares.norm(dim=1).max())
    known = target.known(code)
    groups = {known: moment} if known else {}
    whole = CodedSums(code, table, moment, products, rounding=2 * entry, groups=groups)
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
    squares = unfolded(tensors[SQUARES].double(), sums.shape[1])
    if RECORDS in tensors:
        records, totals = float(tensors[RECORDS]), tensors[TOTALS].double()
    elif target.divides:
        records, totals = float(code.sum()), sums.sum(0)
    else:
        # The public centre stands for the mean, where a record may be in no row.
        totals = torch.zeros(sums.shape[1], dtype=torch.float64)
        records = float(squares.trace()) if unit_norm else target.counted(code)
    records = max(records, 1.0) if sigmas else records
    mean = totals / records
    covariance = squares / records - torch.outer(mean, mean)
    products = unfolded(tensors[PRODUCTS].double(), len(code)) if PRODUCTS in tensors else None
    counts = torch.tensor([records], dtype=torch.float64)
    moment = Statistics(counts, mean[None], (covariance + covariance.T) / 2)
    changed = 2 * rounding * math.sqrt(sums.shape[1]) / records
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
        squares = unfolded(own[SQUARES].double(), len(mean))
        covariance = squares / records - torch.outer(mean, mean)
        counts = torch.tensor([records], dtype=torch.float64)
        groups[known] = Statistics(counts, mean[None], (covariance + covariance.T) / 2)
    if not groups:
        raise ValueError("coded sums without records")
    moment = sum_of(list(groups.values()))
    code, sums = tensors[CODE].double(), tensors[SUMS].double()
    changed = 2 * rounding * math.sqrt(len(groups) * sums.shape[1]) / moment.records
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


def check_exact(tensors: Tables, target: Target, fault: Fault) -> None:
    """Check that some records have these exact sums of one site, around their mean.

    Args:
        tensors: as in `of_site`.
        target: of the run.
        fault: makes the error from what is wrong.

    Raises:
        FedSurrogateError: as `fault` makes it.
    """
    code, sums = tensors[CODE].double(), tensors[SUMS].double()
    dimension = sums.shape[1]
    records = float(tensors[RECORDS]) if RECORDS in tensors else float(code.sum())
    if not records >= 1:
        raise fault(f"sums over {records:g} records")
    room = records * (1 + TABLE_TOLERANCE)
    if target.counts and float(code.min()) < 0:
        raise fault(f"a row of {float(code.min()):g} records")
    if float(code.abs().max()) > room:
        raise fault(f"a code with the sum {float(code.abs().max()):g} of {records:g} records")
    squares = unfolded(tensors[SQUARES].double(), dimension)
    trace = _trace(squares, fault)
    spread = code.abs()
    if PRODUCTS in tensors:
        products = unfolded(tensors[PRODUCTS].double(), len(code))
        _trace(products, fault)
        spread = products.diagonal()
        if float(spread.max()) > room:
            raise fault(f"squares of numbers with the sum {float(spread.max()):g}")
    # Cauchy and Schwarz.
    longest = (spread.clamp_min(0) * trace * (1 + 2 * TABLE_TOLERANCE)).sqrt()
    rounding = ROUNDING * float(sums.norm(dim=1).max())
    if bool((sums.norm(dim=1) > longest + rounding + 1e-12).any()):
        raise fault("a sum of features that is longer than their second moment allows")


def check_noisy(tensors: Tables, target: Target, sigmas: Sigmas, fault: Fault) -> None:
    """Check that some records of features of norm at most one, and honest noise, have these sums.

    Honest noise exceeds the bounds with a probability of at most FALSE_ALARM; see
    `fedsurrogate.common.surrogates.class_sums.lengths`.

    Args:
        tensors: around zero, by statistic.
        target: of the run.
        sigmas: standard deviation of the noise in an entry.
        fault: makes the error from what is wrong.

    Raises:
        FedSurrogateError: as `fault` makes it.
    """
    for what, beyond, most in _limits(tensors, target, sigmas):
        if beyond > most * (1 + TABLE_TOLERANCE) + TABLE_TOLERANCE:
            raise fault(f"{what} ({beyond:.4g}; records and noise give {most:.4g} at most)")


def _limits(tensors: Tables, target: Target, sigmas: Sigmas) -> Iterator[tuple[str, float, float]]:
    """What could be wrong, a number that shows it, and the most that it can be."""
    double = {name: tensor.double() for name, tensor in tensors.items()}
    code, sums = double[CODE], double[SUMS]
    rows = len(sums)
    tail = math.sqrt(2 * math.log(8 * (rows + 4) / FALSE_ALARM))

    def least(name: str) -> Tensor:
        """The length of each row without noise is at least this, (q,)."""
        table = double[name]
        lengths: Tensor = torch.linalg.vector_norm(table, dim=-1)
        return lengths - sigmas[name] * (math.sqrt(table.shape[-1]) + tail)

    most_of_row = code.abs() + tail * sigmas[CODE]
    if RECORDS in double:
        most = max(float(double[RECORDS]), 0.0) + tail * sigmas[RECORDS]
        most_of_row = torch.full_like(code, most)
        yield "a number of records below zero", -float(double[RECORDS]), tail * sigmas[RECORDS]
        yield "a code beyond its records", float(code.abs().max()) - tail * sigmas[CODE], most
        yield "a sum of features beyond its records", float(least(TOTALS)), most
        yield "second moments beyond their records", float(least(SQUARES)), most
        if PRODUCTS in double:
            yield "products beyond their records", float(least(PRODUCTS)), rows * most
    if target.counts:
        yield "a row of records below zero", -float(code.min()), tail * sigmas[CODE]
    yield "a row of features beyond its records", float((least(SUMS) - most_of_row).max()), 0.0


def _trace(matrix: Tensor, fault: Fault) -> float:
    """The trace of a matrix that is positive semidefinite up to rounding."""
    trace = matrix.trace()
    matrix = matrix.clone()
    matrix.diagonal().add_(ROUNDING * trace + 1e-30)
    if trace < 0 or torch.linalg.cholesky_ex(matrix)[1]:
        raise fault("second moments that no records have: the matrix has a negative eigenvalue")
    return float(trace)
