"""Heads in closed form from pooled statistics, without training and settings: discriminant analysis and
least squares; the shrinkage of the covariance, the slope that makes scores log odds, and which head fits.

A covariance is singular where records are fewer than dimensions, where a dimension is the sum of
others or never varies, or after rounding. Every solver then adds the smallest ridge that makes it
positive definite, and its solution says how much that was. Nothing is added in silence: a method
states it among the facts about the learning, or refuses to learn. The shrinkage, and how far the class
means of sites differ significantly, follow from the statistics alone: no record is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head, Quadratic
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.surrogates.covariances import LowRank, eigen
from fedsurrogate.common.surrogates.surrogates import Header

from .statistics import Factored, Statistics, Tridiagonal, dense, sum_of_squares

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


def qda(
    by_class: Iterable[Statistics], header: Header, shrinkage: float | None = None
) -> tuple[Quadratic, float, float]:
    """Quadratic discriminant analysis. A class's covariance is (1 - s) S + s tr(S)/d I.

    Args:
        by_class: the statistics of each class alone, with C = 1, one at a time. Each has
            `fewest_records` or more.
        header: of the head, which is in single precision.
        shrinkage: s; None takes the oracle approximating shrinkage of each class (Chen et al.
            2010), or RESTRICTED for diagonals.

    Returns:
        The head, the largest shrinkage of the classes, and the largest ridge, as in `Solution`.
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
    head = Quadratic(header, torch.stack(means).float(), torch.stack(whiteners), biases.float())
    return head, max(used), max(added)


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


# The first ridge that is tried, as a share of the mean variance. Each further one is ten times
# larger.
FIRST_RIDGE = 1e-12
# Smallest variance of a dimension given the previous ones, as a share of its own variance, that is
# more than rounding.
LEAST_PIVOT = 1e-14


def solved(matrix: Tensor, rows: Tensor) -> tuple[Tensor, float]:
    """Rows times the inverse of a symmetric matrix.

    Args:
        matrix: (d, d), float64. It is changed if a ridge is needed.
        rows: (C, d), float64.

    Returns:
        The product (C, d); and the ridge, as in `factor_of`.

    Raises:
        RunError: as in `factor_of`.

    Example:
        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> product, added = solved(matrix, torch.ones(1, 2, dtype=torch.float64))
        >>> product.round(decimals=9).tolist(), added
        ([[0.5, 0.25]], 0.0)
    """
    factor, added = factor_of(matrix)
    return torch.cholesky_solve(rows.T, factor).T, added


def factor_of(matrix: Tensor) -> tuple[Tensor, float]:
    """The Cholesky factor of a symmetric matrix, after a ridge if it needs one.

    Args:
        matrix: (d, d), float64. It is changed if a ridge is needed.

    Returns:
        The lower factor (d, d), and the ridge that was added to the diagonal, as a share of its
        mean; zero if none was. One for a matrix of zeros.

    Raises:
        RunError: if the matrix is not finite, since no ridge would end the search.
    """
    mean = float(matrix.diagonal().abs().mean())
    step, added = FIRST_RIDGE * mean + 1e-300, 0.0
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal()
        # A number that is not finite reaches the factor's diagonal, or stops the factorisation.
        if not failed and pivots.isfinite().all():
            if added or bool((pivots.square() > LEAST_PIVOT * matrix.diagonal()).all()):
                return factor, added / mean if mean else float(added > 0)
        elif not matrix.isfinite().all():
            raise RunError(
                "the pooled covariance holds a number that is not finite; leave out sites with "
                "--without"
            )
        matrix.diagonal().add_(step)
        added += step
        step *= 10


def repair_facts(added: float) -> dict[str, float]:
    """What a run's result states of a ridge that a solver had to add: its share of the mean
    variance; nothing if none.
    """
    return {"added-ridge": added} if added else {}


# Least standard deviation of calibrated scores, where class means do not stand out.
LEAST = 0.1


# What is known of the scores of new records: the expected score of each class for a record of each component,
# (C, J), and the covariance of the scores of records around them, (C, C).
Scores = tuple[Tensor, Tensor]


def slope_of(scores: Scores, priors: Tensor) -> float:
    """The factor that makes scores log odds: their expected difference between two classes over the
    variance of that difference, over all pairs of classes.

    Normal scores of one variance have log odds with exactly this slope. It is one for discriminant
    analysis with the true covariance and means.

    Args:
        scores: of C classes, with one component each.
        priors: of the classes, (C,).

    Example:
        >>> scores = torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.diag(torch.ones(2))
        >>> slope_of(scores, torch.tensor([0.5, 0.5]))
        3.0
    """
    pairs = torch.outer(priors, priors).fill_diagonal_(0)
    means, spread = scores
    own, each = means.diagonal(), spread.diagonal()
    apart = own[:, None] + own - means - means.T
    variances = each[:, None] + each - spread - spread.T
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
    means, spread = weight @ statistics.means.T + solution.bias[:, None], within @ weight.T
    unit = slope_of((means, spread), statistics.priors) if of_all else 1.0
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
    scores = means - lower.diag(), spread * (1 + optimism) ** 2
    slope = slope_of(scores, statistics.priors)
    return replace(solution, weight=slope * weight, bias=slope * solution.bias)


def _times(covariance: Tensor | Factored, rows: Tensor) -> Tensor:
    """Rows (C, d) times a covariance."""
    if isinstance(covariance, Factored):
        return (rows @ covariance.factor) @ covariance.factor.T + rows * covariance.variances
    return rows @ covariance


# Part of the noise's largest eigenvalue that is added to all variances: directions below the noise
# get small weights. Chosen on the features of benchmarks/secure_aggregation_head.py, which are in no
# table.
RIDGE = 0.15
# Lower bound of a variance, as a part of the mean variance.
SMALLEST = 0.2
# Width of the average over eigenvalues, in parts of radius / sqrt(d).
WIDTH = 2.0


def cleaned(matrix: Tensor, noise: float) -> LowRank:
    """The covariance in a noisy symmetric matrix.

    Eigenvalues of such noise fill a half circle of radius R = noise sqrt(2 d). It pushes the
    eigenvalues of a matrix apart, so each is moved back by R^2 / 2 times the mean of 1 / (its
    distance to the others), which is optimal among all estimates with these eigenvectors. Then a
    ridge that follows from the noise alone is added.

    Args:
        matrix: (d, d).
        noise: standard deviation of its noise on the diagonal; off the diagonal it is noise /
            sqrt(2).

    Returns:
        The covariance as factor (d, d) and variances (d,).

    Source: Bun, Allez, Bouchaud & Potters 2016, "Rotational Invariant Estimator for General Noisy
        Matrices", additive noise.
    """
    d = len(matrix)
    radius = noise * math.sqrt(2 * d)
    values, vectors = eigen(matrix)
    apart = values[:, None] - values
    width = WIDTH * radius / math.sqrt(d)
    pushed = (apart / (apart.square() + max(width, 1e-12) ** 2)).mean(1)
    back = torch.cummax(values - radius**2 / 2 * pushed, 0).values
    least = max(SMALLEST * float(values.sum()) / d, 1e-9)
    kept = back.clamp_min(least) + RIDGE * radius
    base = float(kept.min())
    return LowRank(vectors * (kept - base).sqrt(), torch.full((d,), base, dtype=torch.float64))


# Shrinkages that are compared. The smallest one whose estimate is within TOLERANCE of the best
# one's is taken.
SHRINKAGES = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.17, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9),
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


# Sites differ if the ratio F is above the first and the excess above the second. F alone would find
# any difference, however small, with enough records; the excess alone would find chance in few.
LEAST_RATIO, LEAST_EXCESS = 2.0, 0.02
# Columns from which least squares is taken where sites differ, with privacy and without. In
# simulated tables of three sites with 3 to 48 columns, and 3 or 6 classes, it was up to 15 points
# below discriminant analysis.
ENOUGH_COLUMNS = 64


class SiteDifferences:
    """The scatter of sites' class means around the pooled ones, next to that of records within.

    It watches the statistics of the sites while they are added up, so memory is that of one site.

    Example:
        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> def site(offset):
        ...     means = table([0, 0], [4, 0]) + offset
        ...     return Statistics(table(50, 50), means, torch.eye(2).double())
        >>> same, other = SiteDifferences(), SiteDifferences()
        >>> _ = list(same.watched([site(0.0), site(0.2)]))
        >>> _ = list(other.watched([site(0.0), site(1.0)]))
        >>> (same.found, round(same.ratio, 1)), (other.found, round(other.ratio, 1))
        ((False, 1.0), (True, 24.5))
    """

    def __init__(self) -> None:
        self._between = self._within = 0.0
        self._groups = 0
        self._counts = self._means = torch.zeros(0, dtype=torch.float64)

    def watched(self, parts: Iterable[Statistics]) -> Iterator[Statistics]:
        """The same statistics, one site at a time.

        Args:
            parts: of the sites, for the same classes in the same order.
        """
        for part in parts:
            if not len(self._means):
                self._counts = torch.zeros_like(part.counts)
                self._means = torch.zeros_like(part.means)
            counts = self._counts + part.counts
            share, apart = part.counts / counts.clamp_min(1e-300), part.means - self._means
            # n m / (n + m) of Chan, Golub & LeVeque 1983, as in `sum_of`.
            weights = self._counts * share
            self._between += float(weights @ apart.square().sum(1))
            self._within += part.records * float(part.covariance.diagonal().sum())
            self._groups += int((part.counts > 0).sum())
            self._counts, self._means = counts, self._means + apart * share[:, None]
            yield part

    @property
    def freedom(self) -> int:
        """Class means of sites beyond one for each class: the sum of (J_c - 1), for J_c sites with
        class c.
        """
        return self._groups - int((self._counts > 0).sum())

    @property
    def ratio(self) -> float:
        """F: scatter between the sites' means of a class, over that expected by chance, which is
        the variance within classes; 1 on average where sites do not differ, 0 for one site.
        """
        freedom, variance = self.freedom, self._variance
        return self._between / freedom / variance if freedom and variance > 0 else 0.0

    @property
    def excess(self) -> float:
        """Variance between the sites' means of a class above that of chance, as a share of that within."""
        records = float(self._counts.sum())
        return max(0.0, self.ratio - 1) * self.freedom / records if records else 0.0

    @property
    def found(self) -> bool:
        """Whether the sites' class means differ by more than chance, and by enough to matter."""
        return self.ratio > LEAST_RATIO and self.excess > LEAST_EXCESS

    @property
    def in_words(self) -> str:
        """What was found, as a sentence without its end."""
        if not self.freedom:
            return "no class is at two sites, so nothing can be said of how sites differ"
        differ = "differ" if self.found else "hardly differ"
        return (
            f"class means of the sites {differ}: F = {self.ratio:.3g}, {self.excess:.2g} of the "
            "variance within classes above that of chance"
        )

    @property
    def _variance(self) -> float:
        """Variance of a record within the classes of a site, over all dimensions."""
        freedom = float(self._counts.sum()) - self._groups
        return self._within / freedom if freedom > 0 else 0.0
