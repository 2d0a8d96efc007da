"""The shrinkage of a pooled covariance, chosen from the statistics alone: no record is used."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.randomness import stream
from fedsurrogate.strategies.closed_form.factored import sum_of_squares
from fedsurrogate.strategies.closed_form.solving import factor_of
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.closed_form.tridiagonal import Tridiagonal

# Shrinkages that are compared. The smallest one whose estimate is within TOLERANCE of the best
# one's is taken.
SHRINKAGES = (
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.07,
    0.1,
    0.13,
    0.17,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
)
TOLERANCE = 0.001
# Number of simulated scores, over all classes.
DRAWS, FEWEST_DRAWS = 20_000, 20
# Numbers in memory at a time, which is a few megabytes.
NUMBERS = 2**18
# Number of classes whose expected accuracy is computed, the most frequent ones.
MOST_JUDGED = 1000


def chosen_with_accuracy(statistics: Statistics) -> tuple[float, float]:
    """The shrinkage for which discriminant analysis is expected to be most accurate on new records,
    and that accuracy. Uses no records.

    The covariance S of N records in d dimensions fits these records better than new ones. With H
    the inverse of (1 - s) S + s tr(S)/d I, p = (1 - s) tr(S H) / N and t = p / (1 - p), a new
    record's scores have the covariance (1 + t)^2 W S W^T, and the score of its own class c is lower
    by t / (1 - s) N / N_c. The accuracy follows from normal scores with these moments.

    Args:
        statistics: of all records; S is their covariance within classes.

    Returns:
        One of SHRINKAGES, but never less than the oracle approximating shrinkage (Chen et al.
        2010), which limits the error of S itself; and the best expected accuracy.

    Source: generalised consistent estimators (Zollanvari & Dougherty 2015).
    """
    counts, records, d = (
        statistics.counts.clamp_min(1e-9),
        float(statistics.counts.sum()),
        statistics.means.shape[1],
    )
    priors, classes = statistics.priors, len(counts)
    draws = max(FEWEST_DRAWS, DRAWS // classes)
    # With more classes than dimensions, the scores' covariance has rank d, and a site that names
    # many classes would cost the cube of their number.
    wide, judged = classes > d, counts.topk(min(classes, MOST_JUDGED)).indices.sort().values
    # In single precision, which halves the time: errors are far below the smallest shrinkage that
    # is compared.
    trace = float(statistics.covariance.diagonal().sum())
    reduced = Tridiagonal.of(statistics.covariance, statistics.means.T, whole=wide, projected=True)
    values, means = reduced.values, reduced.columns.T
    mean_variance = trace / d
    normals = (
        torch.randn(
            draws, min(classes, d), generator=stream(0, "", "shrinkage"), dtype=torch.float64
        )
        .to(means)
        .T
    )
    accuracies = []
    for shrinkage in SHRINKAGES:
        own = (1 - shrinkage) * values
        share = reduced.sum_of(own / (own + shrinkage * mean_variance)) / records
        if share >= 1:
            accuracies.append(0.0)
            continue
        optimism = share / (1 - share)
        solution = reduced.solved(1 - shrinkage, shrinkage * mean_variance)
        bias = priors.clamp_min(1e-300).log() - (means * solution.T).sum(1) / 2
        if wide:
            noise = (solution * values.sqrt()[:, None]).T @ normals * (1 + optimism)
        else:
            spread = solution.T @ reduced.times(solution) * (1 + optimism) ** 2
            spread.diagonal().add_(1e-9 * float(spread.diagonal().mean()) + 1e-300)
            noise = factor_of(spread)[0] @ normals
        scores = means[judged] @ solution + bias
        lower = optimism / (1 - shrinkage) * records / counts[judged]
        scores[torch.arange(len(judged)), judged] -= lower
        accuracies.append(float(priors[judged] @ _right(noise.float(), scores.float(), judged)))
    enough = next(
        s
        for s, accuracy in zip(SHRINKAGES, accuracies, strict=True)
        if accuracy >= max(accuracies) - TOLERANCE
    )
    # The sum of the squares of the values is at most that of all eigenvalues, and may settle which
    # is larger.
    if oracle_approximating(trace, float(values.square().sum()), records, d) <= enough:
        return enough, max(accuracies)
    oracle = oracle_approximating(trace, sum_of_squares(statistics.covariance), records, d)
    return max(enough, oracle), max(accuracies)


def _right(noise: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
    """Share of draws (J,) in which noise (C, draws) + scores (J, C) are largest at each of the
    classes (J,).
    """
    # The longer of both dimensions is contiguous in memory, which makes the maximum fast.
    noise = noise.T.contiguous().T if len(noise) > noise.shape[1] else noise
    at_once, shares = max(1, NUMBERS // noise.numel()), []
    for rows, own in zip(torch.split(scores, at_once), torch.split(classes, at_once), strict=True):
        sums = noise + rows[:, :, None]
        shares.append((sums[torch.arange(len(own)), own] >= sums.amax(1)).double().mean(1))
    return torch.cat(shares)


def oracle_approximating(trace: float, squares: float, records: float, d: int) -> float:
    """The oracle approximating shrinkage of a covariance S.

    Args:
        trace: of S.
        squares: the sum of the squared eigenvalues of S.
        records: number of records that S was computed from.
        d: number of dimensions.

    Returns:
        The shrinkage, at most 1.

    Source: Chen et al. 2010, equation 23.

    Example:
        >>> oracle_approximating(trace=3.0, squares=5.0, records=8, d=2)
        1.0
        >>> round(oracle_approximating(trace=3.0, squares=5.0, records=98, d=2), 6)
        0.183673
    """
    square = trace**2
    below = (records + 1 - 2 / d) * (squares - square / d)
    return 1.0 if below <= 0 else min(1.0, ((1 - 2 / d) * squares + square) / below)


def cross_validated(
    total: Tensor, cross: Tensor, statistics: Statistics, mean_variance: float
) -> float:
    """The shrinkage of least squares with the smallest generalised cross-validation error.

    Args:
        total: covariance of all records, (d, d), float64.
        cross: their covariance with the targets, (d, C), float64.
        statistics: of all records.
        mean_variance: of `total`.

    Returns:
        One of SHRINKAGES.
    """
    reduced = Tridiagonal.of(total, cross)
    values = reduced.values
    variance = float(1 - statistics.priors.square().sum())
    records = float(statistics.counts.sum())
    errors = []
    for shrinkage in SHRINKAGES:
        solution = reduced.solved(1.0, shrinkage * mean_variance)
        explained = (
            2 * (reduced.columns * solution).sum() - (solution * reduced.times(solution)).sum()
        )
        residual = variance - float(explained)
        freedom = (1 + reduced.sum_of(values / (values + shrinkage * mean_variance))) / records
        errors.append(residual / (1 - freedom) ** 2 if freedom < 1 else float("inf"))
    return SHRINKAGES[errors.index(min(errors))]
