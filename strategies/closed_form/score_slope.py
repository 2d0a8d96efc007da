"""The slope that makes scores log odds, from what is expected of the scores of new records."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.factored import Factored
from fedsurrogate.strategies.closed_form.solvers import Solution
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.closed_form.tridiagonal import Tridiagonal

# Least standard deviation of calibrated scores, where class means do not stand out.
LEAST = 0.1


@dataclass(frozen=True)
class Scores:
    """What is known of the scores of new records.

    Attributes:
        means: expected score of each class for a record of each component, (C, J).
        spread: covariance of the scores of records around them, (C, C).
    """

    means: Tensor
    spread: Tensor


def slope_of(scores: Scores, priors: Tensor) -> float:
    """The factor that makes scores log odds: their expected difference between two classes over the
    variance of that difference, over all pairs of classes.

    Normal scores of one variance have log odds with exactly this slope. It is one for discriminant
    analysis with the true covariance and means.

    Args:
        scores: of C classes, with one component each.
        priors: of the classes, (C,).

    Example:
        >>> scores = Scores(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.diag(torch.ones(2)))
        >>> slope_of(scores, torch.tensor([0.5, 0.5]))
        3.0
    """
    pairs = torch.outer(priors, priors).fill_diagonal_(0)
    own = scores.means.diagonal()
    apart = own[:, None] + own - scores.means - scores.means.T
    spread = scores.spread.diagonal()
    variances = spread[:, None] + spread - scores.spread - scores.spread.T
    variance, total = float((pairs * variances).sum()), max(float(pairs.sum()), 1e-12)
    if variance <= 0:
        return 1.0
    return max(float((pairs * apart).sum()) / variance, LEAST / math.sqrt(variance / total))


def calibrated(solution: Solution, statistics: Statistics, of_all: bool) -> Solution:
    """A solution whose probabilities mean what they say on new records: all scores are multiplied by
    one number, so no decision changes.

    The records of which a solution was made fit it better than new ones. With N records, H the
    inverse of the shrunk covariance k S + shift I, p = k tr(S H) / N and t = p / (1 - p), a new
    record's scores have the covariance (1 + t)^2 W S W^T, and the score of its own class is lower by
    t / k N / N_c, in units of log odds. Scores of least squares, between 0 and 1, get these units by
    their own slope first.

    Args:
        solution: made of these statistics.
        statistics: of all records.
        of_all: whether its covariance is that of all records, as in least squares, and not within
            classes.

    Returns:
        The solution; unchanged where the covariance is not one of records, such as that of mixtures
        with a variance alone.

    Source: generalised consistent estimators (Zollanvari & Dougherty 2015), as in
        `chosen_with_accuracy`.
    """
    if not statistics.sampled or solution.added >= 1 or len(statistics.counts) < 2:
        return solution
    weight, within = solution.weight, _times(statistics.covariance, solution.weight)
    plain = Scores(weight @ statistics.means.T + solution.bias[:, None], within @ weight.T)
    unit = slope_of(plain, statistics.priors) if of_all else 1.0
    matrix = statistics.total() if of_all else statistics.covariance
    reduced = Tridiagonal.of(matrix, statistics.means.T, projected=not of_all)
    kept = 1.0 if of_all else 1 - solution.shrinkage
    own = kept * reduced.values
    shift = solution.shrinkage * float(matrix.diagonal().mean())
    share = float(reduced.sum_of(own / (own + shift).clamp_min(1e-300))) / statistics.records
    optimism = share / (1 - share) if share < 1 else math.inf
    if not kept or not math.isfinite(optimism):
        return solution
    lower = optimism / kept * statistics.records / statistics.counts.clamp_min(1e-9) / unit
    scores = Scores(plain.means - lower.diag(), plain.spread * (1 + optimism) ** 2)
    slope = slope_of(scores, statistics.priors)
    return replace(solution, weight=slope * weight, bias=slope * solution.bias)


def _times(covariance: Tensor | Factored, rows: Tensor) -> Tensor:
    """Rows (C, d) times a covariance."""
    if isinstance(covariance, Factored):
        return (rows @ covariance.factor) @ covariance.factor.T + rows * covariance.variances
    return rows @ covariance
