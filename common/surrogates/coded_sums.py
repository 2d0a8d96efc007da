"""Sums over a public code of records, of which the one-hot code of a class is a special case: a site
adds noise to them; a coordinator pools them and learns from them in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedsurrogate.common.privacy.exact_sums import ExactSum, IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum
from fedsurrogate.common.surrogates.class_sums import ROWS, second_moment_sum
from fedsurrogate.common.targets.target import CODE, PRODUCTS, RECORDS, SQUARES, SUMS, TOTALS


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
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    bound: float,
    done: Callable[[Tensor], None],
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
