"""Sums over records: by class, or over a public code, of which the one-hot code of a class is a special
case. A site adds noise to them; a coordinator pools them and learns from them in closed form.

Differs from FedPFT (theorem 4.1, noise on the mean and covariance of each class). Sums contain no
1/n, so one record changes them by at most its own norm, for any class size. Counts are protected
too. All classes of the run are released, so the noise also hides which classes a site has. All
classes share one second moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..privacy.exact_sums import ExactSum, IntegerSum
from ..privacy.gaussian_mechanism import BoundedSum, Noisy
from ..targets.target import CODE, PRODUCTS, RECORDS, SQUARES, SUMS, TOTALS
from .covariances import Spherical
from .mixtures import Mixtures

# A noisy count within this many standard deviations of zero may belong to a class that the site
# does not have.
PRESENT = 2.0
# Probability of refusing honest noise; relative tolerance for rounding of tables.
FALSE_ALARM, TABLE_TOLERANCE = 1e-7, 1e-2
# Other names for those of `lengths`.
OWN_NAMES: Mapping[str, str] = {}
# Records whose contributions are in memory at a time. Sums are exact, so that this number changes
# no bit of them.
ROWS = 16 * 511


@dataclass(frozen=True)
class Sums:
    """Noisy sums over a site's records x of norm at most one, each with a weight of at most one.

    Attributes:
        counts: of records by class, (C,).
        sums: of x by class, (C, d).
        squares: over all classes: none for spherical, (d,) of x * x for diag, (d (d + 1) / 2,) of
            the upper triangle of x x^T for full and lowrank, with off-diagonal entries times
            sqrt(2).
        sigmas: standard deviation of the noise in every entry, by statistic.
    """

    counts: Tensor
    sums: Tensor
    squares: Tensor | None
    sigmas: Mapping[str, float]

    @classmethod
    def of(cls, released: list[Noisy]) -> Sums:
        """The sums made of the mechanism's released statistics."""
        values = {noisy.name: noisy.value.float() for noisy in released}
        sigmas = {noisy.name: noisy.sigma for noisy in released}
        return cls(values["counts"], values["sums"], values.get("squares"), sigmas)


def statistics(
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    num_classes: int,
    family: str,
    done: Callable[[Tensor], None] = lambda rows: None,
) -> list[BoundedSum]:
    """The sums of records, without noise.

    A unit whose record weights sum to one changes each sum by at most one, see `ExactSum`. Features of
    norm at most one are not shortened: the norms of x, of x * x (its squared entries sum to at most
    |x|^4) and of x x^T are at most one, and so is the norm of a convex combination of these.

    Args:
        features: (n, d), of norm at most one.
        labels: (n,), in [0, num_classes).
        weights: of the records, (n,).
        num_classes: of the run, with or without records here.
        family: of covariances, which decides the second moments; or "distributed" for secure aggregation.
        done: called with rows of the features that have been added to a sum.

    Returns:
        Counts, sums and, unless the family is spherical, second moments, as in `Sums`.

    Example:
        >>> features = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
        >>> weights = torch.ones(2)
        >>> sums = statistics(features, torch.tensor([0, 1]), weights, 3, "diag")
        >>> [(each.name, tuple(each.value.shape), each.bound) for each in sums]
        [('counts', (3,), 1.0), ('sums', (3, 2), 1.0), ('squares', (2,), 1.0)]
    """
    counts, sums = class_sums(features, labels, weights, num_classes, done)
    bounded = [BoundedSum("counts", counts, 1.0), BoundedSum("sums", sums, 1.0)]
    d, parts = (
        features.shape[1],
        list(zip(torch.split(features, ROWS), torch.split(weights.double(), ROWS), strict=True)),
    )
    if family == "diag":
        sum_ = ExactSum((d,), 1.0)
        for rows, own in parts:
            sum_.add(rows.double().square() * own[:, None], own)
            done(rows)
        bounded.append(BoundedSum("squares", sum_.total, 1.0))
    elif family in ("full", "lowrank", "gram", "distributed"):
        upper, twice = second_moment_sum(features, weights, done)
        bounded.append(BoundedSum("squares", upper, 1.0, twice))
    return bounded


def second_moment_sum(
    features: Tensor, weights: Tensor, done: Callable[[Tensor], None] = lambda rows: None
) -> tuple[IntegerSum, Tensor]:
    """The weighted second moment of records around zero, without noise.

    Args:
        features: (n, d), of norm at most one.
        weights: of the records, (n,).
        done: as for `statistics`.

    Returns:
        Its upper triangle, and which of these entries stand for two equal ones.
    """
    d = features.shape[1]
    total = ExactSum((d, d), 1.0)
    for rows, own in zip(
        torch.split(features, ROWS), torch.split(weights.double(), ROWS), strict=True
    ):
        halves = rows.double() * own.sqrt()[:, None]
        total.add_products(halves, halves, weights=own)
        done(rows)
    at, columns = torch.triu_indices(d, d)
    return total.total.map(lambda matrix: matrix[at, columns]), at != columns


def class_sums(
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    num_classes: int,
    done: Callable[[Tensor], None] = lambda rows: None,
) -> tuple[IntegerSum, IntegerSum]:
    """Weighted counts and sums of the records of each class, without noise.

    Args:
        features: (n, d), of norm at most one.
        labels: (n,), in [0, num_classes).
        weights: of the records, (n,).
        num_classes: of the run, C.
        done: as for `statistics`.

    Returns:
        Counts (C,) and sums (C, d).
    """
    counts, sums = ExactSum((num_classes,), 1.0), ExactSum((num_classes, features.shape[1]), 1.0)
    counts.add_at(labels, weights.double(), weights)
    for rows, at, own in zip(
        *(torch.split(each, ROWS) for each in (features, labels, weights.double())), strict=True
    ):
        sums.add_at(at, rows.double() * own[:, None], own)
        done(rows)
    return counts.total, sums.total


def lengths(sums: Sums) -> list[tuple[str, Tensor, Tensor]]:
    """Lengths of noisy tables, and upper bounds that honest noise keeps.

    Records have at most norm one, so no sum and no second moment is longer than its count, and no
    count is negative. Honest noise exceeds these bounds with a probability of at most FALSE_ALARM:
    the length of D normals exceeds sqrt(D) + t with probability at most exp(-t^2 / 2), because it
    is a 1-Lipschitz function of them.

    Args:
        sums: of one site.

    Returns:
        For each table its name, its lengths and their upper bounds: counts below zero (C,), excess
        of sums over their counts by class (C,) and together (1,), and the second moments (1,).
    """
    classes, d = sums.sums.shape
    tail = math.sqrt(2 * math.log(4 * classes / FALSE_ALARM))
    count_noise = sums.sigmas["counts"]
    counts = sums.counts.double()
    # The errors of a count and of a length are independent; `both` bounds the standard deviation of
    # their sum.
    both, room = math.hypot(count_noise, sums.sigmas["sums"]), sums.sigmas["sums"] * math.sqrt(d)
    # Tables are sent in half precision.
    excess = (
        sums.sums.double().norm(dim=1) - counts.clamp_min(0) * (1 + TABLE_TOLERANCE) - room
    ).clamp_min(0)
    # A tighter bound for all classes together: the sum of the squared excesses is at most a
    # chi-square.
    together = torch.full_like(counts[:1], both * (math.sqrt(classes) + tail))
    tables = [
        (
            "the count below zero",
            (-counts).clamp_min(0),
            torch.full_like(counts, tail * count_noise),
        ),
        ("a class sum beyond its count", excess, torch.full_like(counts, both * tail)),
        ("the excess of all class sums over their counts", excess.norm()[None], together),
    ]
    if sums.squares is not None:
        total = counts.sum().clamp_min(0) + tail * count_noise * math.sqrt(classes)
        longest = total + sums.sigmas["squares"] * (math.sqrt(len(sums.squares)) + tail)
        tables.append(("second moments", sums.squares.double().norm()[None], longest[None]))
    return [
        (name, length, most * (1 + TABLE_TOLERANCE) + TABLE_TOLERANCE)
        for name, length, most in tables
    ]


def beyond(sums: Sums, names: Mapping[str, str] = OWN_NAMES) -> str:
    """What noisy sums have that no records can have, in words; empty for nothing.

    Args:
        sums: over records of norm one, with the deviations of their noise.
        names: what to say for a name of `lengths`.
    """
    for name, length, most in lengths(sums):
        if bool((length > most).any()):
            worst = int(torch.argmax(length - most))
            return (
                f"{names.get(name, name)} (length {float(length[worst]):.4g}; at most "
                f"{float(most[worst]):.4g} is possible for this number of records and the noise)"
            )
    return ""


def as_mixtures(sums: Sums) -> tuple[Mixtures, list[int]] | None:
    """One spherical Gaussian for each class that stands out from the noise.

    For features of unit norm, variance is one minus the mean's squared length. The noise in this
    length is subtracted.

    Args:
        sums: of one site.

    Returns:
        The Gaussians, and the indices of their classes; None if no class stands out.
    """
    kept = sums.counts > PRESENT * sums.sigmas["counts"]
    if not kept.any():
        return None
    counts = sums.counts[kept].clamp_min(1)
    means, d = sums.sums[kept] / counts[:, None], sums.sums.shape[1]
    energy = (means.square().sum(1) - d * (sums.sigmas["sums"] / counts).square()).clamp(
        0, 1 - 1e-3
    )
    labels = torch.arange(len(counts))
    mixtures = Mixtures(
        counts.round().long(), labels, torch.ones(len(counts)), means, Spherical((1 - energy) / d)
    )
    return mixtures, kept.nonzero().squeeze(1).tolist()


def fold(matrix: Tensor) -> Tensor:
    """Upper triangle of a symmetric matrix, as a vector of the same Euclidean norm.

    Args:
        matrix: (d, d), symmetric.

    Returns:
        The vector (d (d + 1) / 2,), with off-diagonal entries times sqrt(2).

    Example:
        >>> vector = fold(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        >>> [round(entry, 3) for entry in vector.tolist()]
        [1.0, 2.828, 3.0]
    """
    rows, columns = torch.triu_indices(len(matrix), len(matrix))
    return _factors(rows == columns, math.sqrt(2), matrix.dtype) * matrix[rows, columns]


def unfold(vector: Tensor, dimension: int) -> Tensor:
    """The inverse of `fold`.

    Args:
        vector: (d (d + 1) / 2,).
        dimension: d.

    Returns:
        The symmetric matrix (d, d).
    """
    rows, columns = torch.triu_indices(dimension, dimension)
    matrix = vector.new_zeros(dimension, dimension)
    matrix[rows, columns] = _factors(rows == columns, math.sqrt(0.5), vector.dtype) * vector
    return matrix + matrix.triu(1).T


def _factors(diagonal: Tensor, others: float, dtype: torch.dtype) -> Tensor:
    # In the precision of what they multiply: those of single precision would show in double.
    return torch.full(diagonal.shape, others, dtype=dtype).masked_fill(diagonal, 1.0)


def coded_statistics(
    features: Tensor,
    code: Tensor,
    weights: Tensor,
    bounds: Mapping[str, float],
    done: Callable[[Tensor], None] = lambda rows: None,
) -> list[BoundedSum]:
    """The sums of records, without noise.

    A unit whose record weights sum to one changes each sum by at most its bound, see `ExactSum`.
    Codes and features within their own bounds are not shortened: t z' has the norm |t| |z|.

    Args:
        features: z of each record, (n, d), of norm at most one.
        code: t of each record, (n, q), float64, of norm at most the bound of the code.
        weights: of the records, (n,).
        bounds: by statistic that is sent: the norm of what a record adds.
        done: called with rows of the features that have been added to a sum.

    Returns:
        The statistics that `bounds` names, in its order; the second moments folded.
    """
    ones = torch.ones(len(code), 1, dtype=torch.float64)
    made: dict[str, Callable[[float], tuple[IntegerSum, Tensor | None]]] = {
        RECORDS: lambda bound: (_added(ones, weights, bound), None),
        CODE: lambda bound: (_added(code, weights, bound), None),
        TOTALS: lambda bound: (
            _products(ones, features, weights, bound, done).map(lambda table: table[0]),
            None,
        ),
        SUMS: lambda bound: (_products(code, features, weights, bound, done), None),
        SQUARES: lambda bound: second_moment_sum(features, weights, done),
        PRODUCTS: lambda bound: _folded(_products(code, code, weights, bound, lambda rows: None)),
    }
    found = []
    for name, bound in bounds.items():
        total, twice = made[name](bound)
        found.append(BoundedSum(name, total, bound, twice=twice))
    return found


def _added(values: Tensor, weights: Tensor, bound: float) -> IntegerSum:
    """The weighted sum of values (n, q)."""
    total = ExactSum((values.shape[1],), bound)
    total.add(values * weights[:, None], weights)
    return total.total


def _products(
    left: Tensor, right: Tensor, weights: Tensor, bound: float, done: Callable[[Tensor], None]
) -> IntegerSum:
    """The weighted sum of the products of rows, (n, a) and (n, b)."""
    total = ExactSum((left.shape[1], right.shape[1]), bound)
    parts = (torch.split(each, ROWS) for each in (left, right, weights))
    for code, rows, own in zip(*parts, strict=True):
        total.add_products(code * own[:, None], rows.double(), weights=own)
        done(rows)
    return total.total


def _folded(total: IntegerSum) -> tuple[IntegerSum, Tensor]:
    """The upper triangle, and which of its entries stand for two."""
    side = len(total.fine)
    rows, columns = torch.triu_indices(side, side)
    return total.map(lambda matrix: matrix[rows, columns]), rows != columns
