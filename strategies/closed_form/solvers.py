"""Heads in closed form from pooled statistics: discriminant analysis and least squares. No
training, and no settings.

Each solver takes statistics and a shrinkage. A covariance that is singular all the same gets a
ridge, and the solution says so (strategies/closed_form/solving.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head, Quadratic
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.factored import Factored, dense, sum_of_squares
from fedsurrogate.strategies.closed_form.shrinkage import (
    chosen_with_accuracy,
    cross_validated,
    oracle_approximating,
)
from fedsurrogate.strategies.closed_form.solving import factor_of, solved
from fedsurrogate.strategies.closed_form.statistics import Statistics

# For a diagonal or a single variance, which few numbers determine.
RESTRICTED = 0.01
# Smallest mean variance, as a share of the median class's mean square: below the rounding of
# features in single precision. Without it, records that are all alike give weights that are not
# finite.
LEAST_VARIANCE = 1e-15
# The median variance of the columns, over the smallest, from which shrinkage towards the diagonal is
# tried; and the gain in expected accuracy from which it is taken.
UNEQUAL, LEAST_GAIN = 25.0, 0.005
# A class without records has no prior; its logarithm must be finite.
LEAST_PRIOR = 1e-300
# Added to every variance: a dimension that never varies then gets no weight, and makes no matrix
# singular.
TINY_VARIANCE = 1e-30


@dataclass(frozen=True)
class Solution:
    """Scores x W^T + b of records x: a linear head.

    Attributes:
        weight: (C, d), float64.
        bias: (C,), float64.
        shrinkage: of the covariance that gave it.
        added: ridge that was added because the shrunk covariance was singular, as a share of its
            mean variance; mostly zero.
    """

    weight: Tensor
    bias: Tensor
    shrinkage: float
    added: float = 0.0

    def head(self, header: Header) -> Head:
        """The head for the classes of a header, in single precision."""
        return Head(header, self.weight.float(), self.bias.float())


@dataclass(frozen=True)
class QuadraticSolution:
    """Scores b_c - |W_c (x - m_c)|^2 / 2 of records x.

    Attributes:
        means: (C, d), float64.
        whiteners: W, (C, d, d), or (C, d) for diagonal ones, float32.
        bias: (C,), float64.
        shrinkage: the largest of the classes.
        added: the largest ridge, as in `Solution`.
    """

    means: Tensor
    whiteners: Tensor
    bias: Tensor
    shrinkage: float = 0.0
    added: float = 0.0

    def head(self, header: Header) -> Quadratic:
        """The head for the classes of a header, in single precision."""
        return Quadratic(header, self.means.float(), self.whiteners.float(), self.bias.float())


def lda(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """Linear discriminant analysis with the covariance (1 - s) S + s tr(S)/d I, as scikit-learn's
    solver "lsqr".

    Args:
        statistics: of all records; S is their covariance within classes.
        shrinkage: s from 0 to 1; None chooses it from the statistics alone
            (`chosen_with_accuracy`). It then
            shrinks towards the diagonal of S, with (1 - s) S + s diag(S), if some columns are much
            smaller than others and this is expected to be more accurate: towards the mean variance,
            a small column would get no weight, whatever it tells.

    Example:
        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> statistics = Statistics(table(5, 5), table([0, 0], [2, 0]), table([1, 0], [0, 1]))
        >>> solution = lda(statistics, 0.0)
        >>> solution.weight.tolist()
        [[0.0, 0.0], [2.0, 0.0]]
        >>> (table([0.9, 5], [1.1, -5]) @ solution.weight.T + solution.bias).argmax(1).tolist()
        [0, 1]
    """
    means, covariance = statistics.means, statistics.covariance
    mean_variance, least = (
        float(covariance.diagonal().mean()),
        LEAST_VARIANCE * float(means.square().mean(1).median()),
    )
    alike = mean_variance < least
    if alike:
        covariance, mean_variance = torch.full_like(means[0], least).diag(), least
        statistics = replace(statistics, covariance=covariance, sampled=False)
    log_priors = statistics.priors.clamp_min(LEAST_PRIOR).log()
    if mean_variance <= 0:
        return Solution(torch.zeros_like(means), log_priors, 1.0)
    if shrinkage is None and statistics.sampled:
        shrinkage, accuracy = chosen_with_accuracy(statistics)
        scales = _unequal_scales(covariance.diagonal())
        if scales is not None:
            alike_columns = statistics.divided(scales)
            other, expected = chosen_with_accuracy(alike_columns)
            if expected > accuracy + LEAST_GAIN:
                made = lda(alike_columns, other)
                return replace(made, weight=made.weight / scales)
    elif shrinkage is None:
        shrinkage = RESTRICTED
    weight, added = _shrunk_solved(covariance, shrinkage, mean_variance, means)
    return Solution(
        weight, log_priors - (weight * means).sum(1) / 2, shrinkage, 1.0 if alike else added
    )


def _unequal_scales(variances: Tensor) -> Tensor | None:
    """The deviation of each column (d,), one where it does not vary; None where no column is much
    smaller than the others.
    """
    varies = variances > LEAST_VARIANCE * float(variances.mean())
    usual = float(variances[varies].median())
    if usual <= UNEQUAL * float(variances[varies].min()):
        return None
    return torch.where(varies, variances, 1.0).sqrt()


def _shrunk_solved(
    covariance: Tensor | Factored, shrinkage: float, mean_variance: float, rows: Tensor
) -> tuple[Tensor, float]:
    """Rows (C, d) times the inverse of the shrunk covariance, and the ridge that this took."""
    if isinstance(covariance, Factored):
        columns = covariance.solved(1 - shrinkage, shrinkage * mean_variance, rows.T)
        if columns is not None:
            return columns.T, 0.0
    shrunk = (1 - shrinkage) * dense(covariance)
    shrunk.diagonal().add_(shrinkage * mean_variance)
    return solved(shrunk, rows)


def naive_bayes(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """Naive Bayes with one variance a dimension for all classes: `lda` with a diagonal covariance,
    and so a linear head.

    Args:
        statistics: of all records; the diagonal of their covariance is used.
        shrinkage: as in `lda`; None takes RESTRICTED.
    """
    diagonal = statistics.covariance.diagonal().diag()
    return lda(replace(statistics, covariance=diagonal, sampled=False), shrinkage)


def ridge(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """Least squares on one-hot targets with an intercept: (T + s tr(T)/d I) w = cov(x, y), T the
    covariance of all records.

    Args:
        statistics: of all records.
        shrinkage: s, zero or more. None takes the one with the smallest generalised
            cross-validation error (Golub, Heath & Wahba 1979), which follows from the statistics.

    Source: He et al. 2025, equation 9, with the ridge kept; Fanì et al. 2024.

    Example:
        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> statistics = Statistics(table(5, 5), table([0, 0], [2, 0]), table([1, 0], [0, 1]))
        >>> solution = ridge(statistics, 0.0)
        >>> solution.weight.round(decimals=9).tolist(), solution.bias.round(decimals=9).tolist()
        ([[-0.25, 0.0], [0.25, 0.0]], [0.75, 0.25])
    """
    priors, means, mean = statistics.priors, statistics.means, statistics.mean
    total, cross = statistics.total(), ((means - mean) * priors[:, None]).T
    mean_variance = float(total.diagonal().mean()) or 1.0
    if shrinkage is None:
        shrinkage = cross_validated(total, cross, statistics, mean_variance)
    total.diagonal().add_(shrinkage * mean_variance + TINY_VARIANCE)
    weight, added = solved(total, cross.T)
    return Solution(weight, priors - weight @ mean, shrinkage, added)


def balanced_ridge(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """`ridge` with the same weight for every class that has records.

    Args:
        statistics: of all records; their numbers by class are not used.
        shrinkage: as in `ridge`.

    Example:
        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> means, identity = table([0, 0], [2, 0]), table([1, 0], [0, 1])
        >>> solution = balanced_ridge(Statistics(table(90, 10), means, identity), 0.0)
        >>> solution.bias.round(decimals=9).tolist()
        [0.75, 0.25]
    """
    there = (statistics.counts > 0).double()
    alike = there * statistics.records / there.sum().clamp_min(1)
    return ridge(replace(statistics, counts=alike), shrinkage)


def qda(by_class: Iterable[Statistics], shrinkage: float | None = None) -> QuadraticSolution:
    """Quadratic discriminant analysis. A class's covariance is (1 - s) S + s tr(S)/d I.

    Args:
        by_class: the statistics of each class alone, with C = 1, one at a time. Each has
            `fewest_records` or more.
        shrinkage: s; None takes the oracle approximating shrinkage of each class (Chen et al.
            2010), or RESTRICTED for diagonals.
    """
    means, whiteners, bias, used, added = [], [], [], [], [0.0]
    for each in by_class:
        records, d = each.records, each.means.shape[1]
        used.append(_given_or_oracle(each, records, shrinkage))
        shrunk = (1 - used[-1]) * each.matrix
        shrunk.diagonal().add_(used[-1] * float(each.covariance.diagonal().mean()) + TINY_VARIANCE)
        if each.sampled:
            factor, lift = factor_of(shrunk)
            whitener = torch.linalg.solve_triangular(factor, torch.eye(d).to(factor), upper=False)
            logarithm = 2 * factor.diagonal().log().sum()
            added.append(lift)
        else:
            whitener, logarithm = shrunk.diagonal().rsqrt(), shrunk.diagonal().log().sum()
        means.append(each.means[0])
        whiteners.append(whitener.float())
        bias.append(math.log(records) - float(logarithm) / 2)
    highest = max(bias)
    biases = means[0].new_tensor([each - highest for each in bias])
    return QuadraticSolution(
        torch.stack(means), torch.stack(whiteners), biases, max(used), max(added)
    )


def fewest_records(d: int, sampled: bool) -> int:
    """Fewest records of a class whose covariance can be used.

    Args:
        d: number of dimensions.
        sampled: whether the covariance is an empirical one, as in `Statistics`.
    """
    return d + 1 if sampled else 2


def _given_or_oracle(statistics: Statistics, records: float, shrinkage: float | None) -> float:
    if shrinkage is not None:
        return shrinkage
    if not statistics.sampled:
        return RESTRICTED
    trace, squares = (
        float(statistics.covariance.diagonal().sum()),
        sum_of_squares(statistics.covariance),
    )
    return oracle_approximating(trace, squares, records, statistics.means.shape[1])
