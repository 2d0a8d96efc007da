"""What coded sums of a site, or of all sites, cannot be. Honest noise passes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogates.class_sums import FALSE_ALARM
from fedsurrogate.common.surrogates.class_sums import TABLE_TOLERANCE as TOLERANCE
from fedsurrogate.strategies.targets.sums import CodedSums


def check_finite(sums: CodedSums) -> None:
    """Raise SurrogateError for a number that is not finite."""
    tables = {"code": sums.code, "sums": sums.sums, "moment": sums.covariance, "mean": sums.mean}
    if sums.products is not None:
        tables["products"] = sums.products
    for name, table in tables.items():
        if not bool(table.isfinite().all()):
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
