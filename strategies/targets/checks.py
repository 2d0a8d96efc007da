"""What coded sums of a site, or of all sites, cannot be. Honest noise passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedsurrogate.common.errors import FedSurrogateError, SurrogateError
from fedsurrogate.common.surrogates.class_sums import FALSE_ALARM, unfold
from fedsurrogate.common.surrogates.class_sums import TABLE_TOLERANCE as TOLERANCE
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)
from fedsurrogate.strategies.closed_form.statistics import EIGENVALUE_ROUNDING
from fedsurrogate.strategies.targets.sums import CodedSums

Tables = Mapping[str, Tensor]
Sigmas = Mapping[str, float]
Fault = Callable[[str], FedSurrogateError]
# What rounding leaves of a deviation that is none, as a share of what it is the rest of.
CONSTANT = 1e-7


def check_finite(sums: CodedSums) -> None:
    """Raise SurrogateError for a number that is not finite."""
    tables = {"code": sums.code, "sums": sums.sums, "moment": sums.covariance, "mean": sums.mean}
    check_finite_tensors(tables if sums.products is None else {**tables, "products": sums.products})


def check_finite_tensors(tensors: Tables) -> None:
    """Raise SurrogateError for a number that is not finite, by the name of its tensor."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise SurrogateError(f"the sums hold a number in {name!r} that is not finite")


def check_numbers(sums: CodedSums, largest: float = math.inf) -> None:
    """Raise SurrogateError for sums that no records with numbers in [-1, 1] have.

    Args:
        sums: of the code (1, u), with products.
        largest: norm of a record's features; 1 for clipped ones.
    """
    check_finite(sums)
    if sums.products is None:
        raise SurrogateError("sums of numbers lack their products")
    records, slack = float(sums.code[0]), _slack(sums)
    _check_most("records below zero", max(0.0, -records), slack.code)
    for index, total in enumerate(sums.code[1:].tolist()):
        _check_most(f"sum of number {index + 1}", abs(total), records + 2 * slack.code)
        square = float(sums.products[index, index])
        _check_most(f"squares of number {index + 1}", square, records + slack.products)
        _check_most(f"squares below zero of number {index + 1}", -square, slack.products)
    rows = sums.sums.norm(dim=1).tolist()
    for row, length in enumerate(rows):
        most = largest * (records + slack.code) + slack.sums
        _check_most(f"sums of row {row + 1}", length, most)
    _check_definite(_joint(sums, records, products=True), _joint_noise(sums))


def check_labels(sums: CodedSums, labels: int, largest: float = math.inf) -> None:
    """Raise SurrogateError for sums that no records with labels have.

    Args:
        sums: of the exact code, whose last 2 L rows are two for each label.
        labels: L.
        largest: norm of a record's features; 1 for clipped ones.
    """
    check_finite(sums)
    slack = _slack(sums)
    code = sums.code[-2 * labels :]
    _check_most("labels below zero", float((-code).max()), slack.code)
    annotated = float((code[0::2] + code[1::2]).max())
    if sums.noise is None:
        # With noise, the number of records is not among the sums.
        _check_most("annotated records of a label", annotated, sums.records)
    _check_rows(code, sums.sums[-2 * labels :], largest, slack)
    for moment in sums.groups.values() if len(sums.groups) > 1 else ():
        _check_definite(moment.matrix, 0.0)
    _check_definite(_joint(sums, sums.records, products=False), _joint_noise(sums))


def check_capped(
    sums: CodedSums, members: Tensor, set_entry: float, largest: float = math.inf
) -> None:
    """Raise SurrogateError for sums that no records with labels have.

    Args:
        sums: of the capped code: L rows of labels, and S of label sets.
        members: which labels each set has, (S, L), bool.
        set_entry: what a record adds to the row of its set.
        largest: norm of a record's features; 1 for clipped ones.
    """
    check_finite(sums)
    slack, labels = _slack(sums), members.shape[1]
    _check_most("records of a row below zero", float((-sums.code).max()), slack.code)
    within = members.double().T @ sums.code[labels:] / set_entry
    sets = members.sum(0).double().sqrt() / set_entry
    # A record adds one at most to the row of a label, and only with its set.
    beyond = sums.code[:labels] - within - (1 + sets) * slack.code
    _check_most("present labels beyond the annotated records", float(beyond.max()), 0.0)
    _check_rows(sums.code, sums.sums, largest, slack)
    _check_definite(_joint(sums, sums.records, products=False), _joint_noise(sums))


def check_cells(sums: CodedSums, largest: float = math.inf) -> None:
    """Raise SurrogateError for sums that no records in cells have.

    Args:
        sums: of cells.
        largest: norm of a record's features; 1 for clipped ones.
    """
    check_finite(sums)
    slack = _slack(sums)
    _check_most("records of a cell below zero", float((-sums.code).max()), slack.code)
    _check_rows(sums.code, sums.sums, largest, slack, "cell")
    _check_definite(_joint(sums, sums.records, products=False), _joint_noise(sums))


class _Slack(NamedTuple):
    """How far honest noise moves an entry of the code, the length of a row, and a product."""

    code: float
    sums: float
    products: float


def _slack(sums: CodedSums) -> _Slack:
    if sums.noise is None:
        return _Slack(0.0, 0.0, 0.0)
    rows, d = sums.sums.shape
    tail = math.sqrt(2 * math.log(8 * rows / FALSE_ALARM))
    of_code, of_sums = float(sums.noise.code.max()), float(sums.noise.sums.max())
    # The length of d normals exceeds sqrt(d) + t with probability at most exp(-t^2 / 2).
    return _Slack(tail * of_code, (math.sqrt(d) + tail) * of_sums, tail * sums.noise.products)


def _check_rows(
    code: Tensor, sums: Tensor, largest: float, slack: _Slack, word: str = "row"
) -> None:
    """No row of features is longer than its records."""
    for row, (count, length) in enumerate(
        zip(code.tolist(), sums.norm(dim=1).tolist(), strict=True)
    ):
        most = largest * (max(count, 0.0) + slack.code) + slack.sums
        _check_most(f"sums of {word} {row + 1}", length, most)


def _check_most(name: str, value: float, most: float) -> None:
    if value > most * (1 + TOLERANCE) + TOLERANCE:
        raise SurrogateError(f"{name}: {value:.6g}, more than the {most:.6g} that records can have")


def _joint(sums: CodedSums, records: float, products: bool) -> Tensor:
    """The second moment of (1, z), and of (1, z, u) with products, of all records."""
    mean = sums.mean
    moment = sums.covariance + torch.outer(mean, mean)
    # Twice what rounding is likely to have changed.
    moment.diagonal().add_(2 * sums.rounding)
    one = torch.ones(1, 1, dtype=torch.float64)
    parts = [[one, mean[None]], [mean[:, None], moment]]
    if products and sums.products is not None and records > 0:
        numbers = sums.code[1:] / records
        table = sums.sums[1:] / records
        parts[0].append(numbers[None])
        parts[1].append(table.T)
        parts.append([numbers[:, None], table, sums.products / records])
    return torch.cat([torch.cat(row, 1) for row in parts])


def _joint_noise(sums: CodedSums) -> float:
    """Largest eigenvalue that honest noise gives the joint moment, nearly surely."""
    if sums.noise is None or not sums.records > 0:
        return 0.0
    side = len(sums.mean) + len(sums.code)
    largest = max(
        sums.noise.squares,
        sums.noise.products,
        math.sqrt(2) * float(sums.noise.sums.max()),
        math.sqrt(2) * float(sums.noise.code.max()),
    )
    tail = math.sqrt(2 * math.log(8 / FALSE_ALARM))
    return largest * (math.sqrt(2 * side) + tail) / sums.records


def _check_definite(moment: Tensor, noise: float) -> None:
    """Raise SurrogateError for a second moment with an eigenvalue below zero."""
    # In units of their own: a column of huge values would hide the others.
    scale = moment.diagonal().clamp_min(0).sqrt().clamp_min(1e-12)
    if noise:
        scale = torch.ones_like(scale)
    least = float(torch.linalg.eigvalsh(moment / scale[:, None] / scale)[0])
    allowed = noise + TOLERANCE
    if least < -allowed:
        raise SurrogateError(
            f"the second moment has the eigenvalue {least:.3g}, below -{allowed:.3g}: no records "
            "have such sums"
        )


def check_exact(tensors: Tables, target: Target, fault: Fault) -> None:
    """Check that some records have these exact sums of one site, around their mean.

    Args:
        tensors: as in `received.of_site`.
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
    room = records * (1 + TOLERANCE)
    if target.counts and float(code.min()) < 0:
        raise fault(f"a row of {float(code.min()):g} records")
    if float(code.abs().max()) > room:
        raise fault(f"a code with the sum {float(code.abs().max()):g} of {records:g} records")
    squares = unfold(tensors[SQUARES].double(), dimension)
    trace = _trace(squares, fault)
    spread = code.abs()
    if PRODUCTS in tensors:
        products = unfold(tensors[PRODUCTS].double(), len(code))
        _trace(products, fault)
        spread = products.diagonal()
        if float(spread.max()) > room:
            raise fault(f"squares of numbers with the sum {float(spread.max()):g}")
    # Cauchy and Schwarz.
    longest = (spread.clamp_min(0) * trace * (1 + 2 * TOLERANCE)).sqrt()
    # A number that is the same in all records leaves only rounding.
    constant = CONSTANT * math.sqrt(records * trace)
    rounding = EIGENVALUE_ROUNDING * float(sums.norm(dim=1).max()) + constant
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
        if beyond > most * (1 + TOLERANCE) + TOLERANCE:
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
    matrix.diagonal().add_(EIGENVALUE_ROUNDING * trace + 1e-30)
    if trace < 0 or torch.linalg.cholesky_ex(matrix)[1]:
        raise fault("second moments that no records have: the matrix has a negative eigenvalue")
    return float(trace)
