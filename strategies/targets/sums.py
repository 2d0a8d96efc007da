"""Sums over coded records: all that a head for numbers, labels or times is made of. They come from each
site, whose sums add up to those of all records, or from secure aggregation; honest noise passes the checks of
what no records can have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import FedSurrogateError, SurrogateError
from fedsurrogate.common.surrogates.class_sums import FALSE_ALARM, unfold
from fedsurrogate.common.surrogates.class_sums import TABLE_TOLERANCE as TOLERANCE
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)

from ..closed_form.statistics import EIGENVALUE_ROUNDING, Statistics, check_tables, sum_of


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the noise in coded sums, by statistic. Rows of a code may differ.

    Attributes:
        code: of each entry of the code's sum, (q,), float64.
        sums: of every entry in each row of the sums, (q,), float64.
        squares: of a diagonal entry of the second moment, times the number of records; other
            entries have 1 / sqrt(2) of it.
        products: of a diagonal entry of the products.
    """

    code: Tensor
    sums: Tensor
    squares: float
    products: float = 0.0

    def __add__(self, other: Noise) -> Noise:
        """The noise in the sum of two sites, which is independent."""
        return Noise(
            (self.code.square() + other.code.square()).sqrt(),
            (self.sums.square() + other.sums.square()).sqrt(),
            math.hypot(self.squares, other.squares),
            math.hypot(self.products, other.products),
        )

    def scaled(self, share: float) -> Noise:
        """The noise in a share of the sums."""
        return Noise(
            self.code * share, self.sums * share, self.squares * share, self.products * share
        )


@dataclass(frozen=True)
class CodedSums:
    """Sums over records with features z (d,), public codes t (q,) and numbers u (r,).

    Attributes:
        code: sum of t, (q,), float64.
        sums: sum of t z^T, (q, d), float64, around zero.
        moment: of all records as one class: their number, mean, and covariance.
        products: sum of u u^T, (r, r), float64; None where no number is predicted.
        noise: of released sums; None for exact ones.
        rounding: largest eigenvalue, about, of what rounding has changed in the covariance.
        groups: moments of the sites that know the same outputs of their records, by which outputs
            these are; empty where outputs share one moment.

    Raises:
        ValueError: for shapes that do not agree, or another type than float64.

    Example:
        Two records of one feature, with the code "annotated, positive".

        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> moment = Statistics(table(2), table([1]), table([4]))
        >>> both = CodedSums(table(2, 1), table([2], [3]), moment)
        >>> (both + both).code.tolist(), (both + both).sums.tolist()
        ([4.0, 2.0], [[4.0], [6.0]])
    """

    code: Tensor
    sums: Tensor
    moment: Statistics
    products: Tensor | None = None
    noise: Noise | None = None
    rounding: float = 0.0
    groups: Mapping[tuple[bool, ...], Statistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, dimension = len(self.code), self.moment.means.shape[1]
        side = 0 if self.products is None else len(self.products)
        tables = [
            ("code", self.code, (rows,)),
            ("sums", self.sums, (rows, dimension)),
            ("counts of the moment", self.moment.counts, (1,)),
        ]
        if self.products is not None:
            tables.append(("products", self.products, (side, side)))
        if self.noise is not None:
            tables.append(("noise of the code", self.noise.code, (rows,)))
            tables.append(("noise of the sums", self.noise.sums, (rows,)))
        check_tables("coded sums", tables)

    def __add__(self, other: CodedSums) -> CodedSums:
        """The sums of the records of both, in the same code."""
        if self.sums.shape != other.sums.shape:
            shapes = f"{tuple(self.sums.shape)} and {tuple(other.sums.shape)}"
            raise ValueError(f"coded sums of other codes or dimensions: {shapes}")
        products, noise = self.products, self.noise
        if products is not None and other.products is not None:
            products = products + other.products
        if noise is not None and other.noise is not None:
            noise = noise + other.noise
        changed = math.hypot(self.records * self.rounding, other.records * other.rounding)
        moment = self.moment + other.moment
        groups = dict(self.groups)
        for known, part in other.groups.items():
            groups[known] = groups[known] + part if known in groups else part
        return CodedSums(
            self.code + other.code,
            self.sums + other.sums,
            moment,
            products,
            noise if noise is not None else other.noise,
            changed / max(moment.records, 1e-300),
            groups,
        )

    def scaled(self, share: float) -> CodedSums:
        """The same records with a share of their weight."""
        return replace(
            self,
            code=self.code * share,
            sums=self.sums * share,
            moment=self.moment.scaled(share),
            products=None if self.products is None else self.products * share,
            noise=None if self.noise is None else self.noise.scaled(share),
            groups={known: moment.scaled(share) for known, moment in self.groups.items()},
        )

    def rescaled(self, factor: Tensor) -> CodedSums:
        """Exact sums of features whose columns are multiplied.

        Args:
            factor: of each column, (d,), above zero.
        """

        def moved(moment: Statistics) -> Statistics:
            matrix = moment.matrix * factor * factor[:, None]
            return Statistics(moment.counts, moment.means * factor, matrix)

        # Of a matrix of independent errors, the norm of the longest row says how large it is.
        errors = float(factor.max()) * float(factor.square().mean().sqrt())
        return replace(
            self,
            sums=self.sums * factor,
            moment=moved(self.moment),
            rounding=self.rounding * errors,
            groups={known: moved(moment) for known, moment in self.groups.items()},
        )

    @property
    def records(self) -> float:
        """N, the number of records."""
        return self.moment.records

    @property
    def mean(self) -> Tensor:
        """The mean of all features (d,)."""
        return self.moment.means[0]

    @property
    def covariance(self) -> Tensor:
        """T, the covariance of all features (d, d)."""
        return self.moment.matrix

    def moments(self) -> list[Statistics]:
        """For each output, the moment of the sites that know it of their records; where none does,
        that of all. Outputs that the same sites know have the same object.
        """
        found: dict[tuple[int, ...], Statistics] = {(): self.moment}
        each = []
        for output in range(len(next(iter(self.groups)))):
            own = [at for at, known in enumerate(self.groups) if known[output]]
            parts = list(self.groups.values())
            if tuple(own) not in found:
                found[tuple(own)] = sum_of([parts[at] for at in own])
            each.append(found[tuple(own)])
        return each


def moment_of(records: float, totals: Tensor, squares: Tensor) -> Statistics:
    """The moment of all records as one class, from sums around zero.

    Args:
        records: their number.
        totals: sum of z, (d,): zeros where the public mean serves as the mean.
        squares: sum of z z^T, folded.

    Raises:
        ValueError: without records.
    """
    if not records > 0:
        raise ValueError("coded sums without records")
    mean = totals / records
    covariance = unfold(squares, len(mean)) / records - torch.outer(mean, mean)
    counts = torch.tensor([records], dtype=torch.float64)
    return Statistics(counts, mean[None], (covariance + covariance.T) / 2)


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
    """The same for whole steps of secure aggregation.

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
    """The sums of all sites around zero: of secure aggregation, or with noise.

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
    code, sums, squares = (tensors[name].double() for name in (CODE, SUMS, SQUARES))
    if RECORDS in tensors:
        records, totals = float(tensors[RECORDS]), tensors[TOTALS].double()
    elif target.divides:
        records, totals = float(code.sum()), sums.sum(0)
    else:
        # The public mean stands for the mean, where a record may be in no row.
        totals = torch.zeros(sums.shape[1], dtype=torch.float64)
        whole_squares = unfold(squares, sums.shape[1])
        records = float(whole_squares.trace()) if unit_norm else target.counted(code)
    records = max(records, 1.0) if sigmas else records
    moment = moment_of(records, totals, squares)
    products = unfold(tensors[PRODUCTS].double(), len(code)) if PRODUCTS in tensors else None
    changed = sum_rounding(rounding, sums.shape[1]) / records
    whole = CodedSums(code, sums, moment, products, rounding=changed)
    if RECORDS in tensors and not target.divides:
        whole = _with_all(whole)
    return replace(whole, noise=_noise(sigmas, len(code))) if sigmas else whole


def _of_blocks(tensors: Tables, target: Target, rounding: float) -> CodedSums:
    """The exact sums of all sites, whose moments are apart by block."""
    groups = {}
    for at, known in enumerate(target.known_in_blocks()):
        totals, squares = (tensors[name][at].double() for name in (TOTALS, SQUARES))
        if (records := float(tensors[RECORDS][at])) > 0:
            groups[known] = moment_of(records, totals, squares)
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


Fault = Callable[[str], FedSurrogateError]
# What rounding leaves of a deviation that is none, as a share of what it is the rest of.
CONSTANT = 1e-7


def check_sums(sums: CodedSums, target: Target) -> None:
    """Check that some records of the target can have these finite sums, all statistics together.

    Args:
        sums: of a site, or of all; with noise, `check_noisy` has checked each tensor.
        target: of the run.

    Raises:
        SurrogateError: if none can.
    """
    rows, noise = len(sums.code), sums.noise
    tail = math.sqrt(2 * math.log(8 * rows / FALSE_ALARM))
    of_code = 0.0 if noise is None else tail * float(noise.code.max())
    if target.counts:
        _check_most("records of a row below zero", float((-sums.code).max()), of_code)
    if sums.products is not None:
        most = sums.records + (0.0 if noise is None else tail * noise.products)
        for index, square in enumerate(sums.products.diagonal().tolist()):
            _check_most(f"squares of number {index + 1}", square, most)
    if isinstance(target, Labels) and target.capped:
        # A record adds one at most to the row of a label, and only with its set.
        members, labels = target.members.double(), len(target.columns)
        within = members.T @ sums.code[labels:] / target.set_entry
        sets = members.sum(0).sqrt() / target.set_entry
        beyond = sums.code[:labels] - within - (1 + sets) * of_code
        _check_most("present labels beyond the annotated records", float(beyond.max()), 0.0)
    elif isinstance(target, Labels) and noise is None:
        # With noise, the number of records is not among the sums.
        code = sums.code[-2 * len(target.columns) :]
        annotated = float((code[0::2] + code[1::2]).max())
        _check_most("annotated records of a label", annotated, sums.records)
    for moment in sums.groups.values() if len(sums.groups) > 1 else ():
        _check_definite(moment.matrix, 0.0)
    _check_definite(_joint(sums), _distributed_noise(sums))


def _check_most(name: str, value: float, most: float) -> None:
    if value > most * (1 + TOLERANCE) + TOLERANCE:
        raise SurrogateError(f"{name}: {value:.6g}, more than the {most:.6g} that records can have")


def _joint(sums: CodedSums) -> Tensor:
    """The second moment of (1, z), and of (1, z, u) with products, of all records."""
    mean = sums.mean
    moment = sums.covariance + torch.outer(mean, mean)
    # Twice what rounding is likely to have changed.
    moment.diagonal().add_(2 * sums.rounding)
    one = torch.ones(1, 1, dtype=torch.float64)
    parts = [[one, mean[None]], [mean[:, None], moment]]
    if sums.products is not None:
        numbers, table = sums.code[1:] / sums.records, sums.sums[1:] / sums.records
        parts[0].append(numbers[None])
        parts[1].append(table.T)
        parts.append([numbers[:, None], table, sums.products / sums.records])
    return torch.cat([torch.cat(row, 1) for row in parts])


def _distributed_noise(sums: CodedSums) -> float:
    """Largest eigenvalue that honest noise gives the joint moment, nearly surely."""
    if sums.noise is None:
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
