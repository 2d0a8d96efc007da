"""Heads in closed form from pooled statistics: linear and quadratic discriminant analysis, least squares. No training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import RunError
from common.models.classifiers import Quadratic
from common.surrogates.surrogates import Header
from strategies.fedpft.shrinkage import chosen, cross_validated, oracle_approximating
from strategies.fedpft.statistics import Statistics
from strategies.pooling.factored import Factored, dense, sum_of_squares
from strategies.pooling.solving import factor_of, solved

# For a diagonal or a single variance, which few numbers determine.
RESTRICTED = 0.01
# Smallest mean variance, as a share of the median class's mean square: below the rounding of features in single
# precision. Without it, records that are all alike give weights that are not finite.
LEAST_VARIANCE = 1e-15


@dataclass(frozen=True)
class Solution:
    """A linear head: weight (C, d), bias (C,); and the shrinkage of the covariance that gave it."""

    weight: Tensor
    bias: Tensor
    shrinkage: float


def lda(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """Linear discriminant analysis with the covariance (1 - s) S + s tr(S)/d I, as scikit-learn's solver "lsqr".

    shrinkage: s from 0 to 1; None chooses it from the statistics alone (`chosen`).
    """
    means, covariance = statistics.means, statistics.covariance
    mean_variance, least = float(covariance.diagonal().mean()), LEAST_VARIANCE * float(means.square().mean(1).median())
    if mean_variance < least:
        covariance, mean_variance = least * torch.eye(means.shape[1], dtype=torch.float64), least
        statistics = replace(statistics, covariance=covariance, sampled=False)
    if mean_variance <= 0:
        return Solution(torch.zeros_like(means), statistics.priors.clamp_min(1e-300).log(), 1.0)
    if shrinkage is None:
        shrinkage = chosen(statistics) if statistics.sampled else RESTRICTED
    weight = _shrunk_solved(covariance, shrinkage, mean_variance, means.T).T
    return Solution(weight, statistics.priors.clamp_min(1e-300).log() - (weight * means).sum(1) / 2, shrinkage)


def _shrunk_solved(covariance: Tensor | Factored, shrinkage: float, mean_variance: float, right: Tensor) -> Tensor:
    if isinstance(covariance, Factored):
        found = covariance.solved(1 - shrinkage, shrinkage * mean_variance, right)
        if found is not None:
            return found
    shrunk = (1 - shrinkage) * dense(covariance)
    shrunk.diagonal().add_(shrinkage * mean_variance)
    return solved(shrunk, right)


def naive_bayes(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """Naive Bayes with one variance a dimension for all classes: `lda` with a diagonal covariance, and so a linear head.

    Differs from NB-diag of GH-OFL (Turazza et al. 2026), which has a diagonal for each class: its scores are quadratic.
    """
    diagonal = statistics.covariance.diagonal().diag()
    return lda(replace(statistics, covariance=diagonal, sampled=False), shrinkage)


def ridge(statistics: Statistics, shrinkage: float | None = None) -> Solution:
    """Least squares on one-hot targets with an intercept: (T + s tr(T)/d I) w = cov(x, y), T the covariance of all records.

    Source: AFL (He et al. 2025, equation 9); Fed3R (Fanì et al. 2024). shrinkage: s; None takes the one with the smallest
    generalised cross-validation error (Golub, Heath & Wahba 1979), which follows from the statistics. Raises RunError for
    one class.
    """
    priors, means = statistics.priors, statistics.means
    if len(priors) < 2:
        raise RunError("head.solver = 'ridge' needs two classes, and the sites have one; use head.solver = 'lda'")
    mean = priors @ means
    apart = means - mean
    total = statistics.matrix + (apart * priors[:, None]).T @ apart
    cross = (apart * priors[:, None]).T
    mean_variance = float(total.diagonal().mean()) or 1.0
    if shrinkage is None:
        shrinkage = cross_validated(total, cross, statistics, mean_variance)
    total.diagonal().add_(max(shrinkage, 1e-12) * mean_variance)
    weight = solved(total, cross).T
    return Solution(weight, priors - weight @ mean, shrinkage)


def qda(statistics: Iterable[Statistics], header: Header, shrinkage: float | None = None) -> tuple[Quadratic, float]:
    """Quadratic discriminant analysis from the statistics of each class, and the largest shrinkage.

    A class's covariance is (1 - s) S + s tr(S)/d I. shrinkage: s; None takes the oracle approximating shrinkage of each
    class (Chen et al. 2010), or RESTRICTED for diagonals. Raises RunError for a class with too few records.
    """
    means, whiteners, bias, used = [], [], [], []
    for name, each in zip(header.classes, statistics, strict=True):
        records, d = float(each.counts.sum()), each.means.shape[1]
        fewest = fewest_records(d, each.sampled)
        if records < fewest:
            raise RunError(
                f"head.solver = 'qda': class {name!r} has {records:.0f} records at all sites, and its covariance in {d} "
                f"dimensions needs {fewest}; use head.solver = 'lda', or leave the class out with classes"
            )
        used.append(_given_or_oracle(each, records, shrinkage))
        shrunk = (1 - used[-1]) * each.matrix
        shrunk.diagonal().add_(used[-1] * float(each.covariance.diagonal().mean()) + 1e-30)
        if each.sampled:
            factor = factor_of(shrunk)
            whitener = torch.linalg.solve_triangular(factor, torch.eye(d, dtype=factor.dtype), upper=False)
            logarithm = 2 * factor.diagonal().log().sum()
        else:
            whitener, logarithm = shrunk.diagonal().rsqrt(), shrunk.diagonal().log().sum()
        means.append(each.means[0].float())
        whiteners.append(whitener.float())
        bias.append(math.log(records) - float(logarithm) / 2)
    highest = max(bias)
    biases = torch.tensor([each - highest for each in bias], dtype=torch.float32)
    return Quadratic(header, torch.stack(means), torch.stack(whiteners), biases), max(used)


def fewest_records(d: int, sampled: bool) -> int:
    """Fewest records of a class whose covariance in d dimensions can be used."""
    return d + 1 if sampled else 2


def _given_or_oracle(statistics: Statistics, records: float, shrinkage: float | None) -> float:
    if shrinkage is not None:
        return shrinkage
    if not statistics.sampled:
        return RESTRICTED
    trace, squares = float(statistics.covariance.diagonal().sum()), sum_of_squares(statistics.covariance)
    return oracle_approximating(trace, squares, records, statistics.means.shape[1])
