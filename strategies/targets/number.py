"""Heads for numbers: a ridge from the sums of records, with intervals.

The strength of a ridge from sums alone: generalised cross-validation without noise, means
over priors with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.closed_form.solvers import cleaned
from fedsurrogate.strategies.targets.sums import CodedSums

# Share of the noise's largest eigenvalue that is added to every variance of the features. Of five
# values the best for logarithms of sizes and for seven columns of features of images, by records
# that were hidden from the fit but not from this choice.
ADDED = 0.2


@dataclass(frozen=True)
class NumberHead:
    """Predictions z W^T + b in the unit of the numbers.

    Attributes:
        weight: W, (r, d), float64.
        bias: b, (r,), float64.
        deviation: standard deviation of a new record's error, (r,): 1.96 of it make a prediction
            interval of 95 %.
        explained: expected share of the variance that a new record's prediction explains, (r,).
        strength: of the ridge, (r,); NaN with noise, where each direction has its own.
    """

    weight: Tensor
    bias: Tensor
    deviation: Tensor
    explained: Tensor
    strength: Tensor


def number_head(sums: CodedSums, low: Sequence[float], high: Sequence[float]) -> NumberHead:
    """The ridge of numbers on features, T + kappa I, whose strength kappa follows from the sums.

    Args:
        sums: of the code (1, u), u the numbers scaled from [low, high] to [-1, 1]; with products.
        low: lower end of the range of each number, (r,).
        high: upper end of each, (r,).

    Returns:
        The head.

    Raises:
        RunError: for a number that does not vary, or for sums in which noise leaves no variance.
    """
    middle, half = _range(low, high)
    cross, variance = _moments(sums)
    fitted = _fitted(sums, cross, variance)
    means = sums.code[1:] / _records(sums)
    weight = half[:, None] * fitted.weight
    bias = middle + half * (means - fitted.weight @ sums.mean)
    # The variance is itself known with noise only, and too short an interval is worse.
    deviation = half * (fitted.error + _noise_of_variance(sums)).sqrt()
    return NumberHead(weight, bias, deviation, 1 - fitted.error / variance, fitted.strength)


def _range(low: Sequence[float], high: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Middle and half width of each range, (r,)."""
    lower, upper = (torch.tensor(list(each), dtype=torch.float64) for each in (low, high))
    if not bool((lower < upper).all()):
        raise ValueError(f"ranges from {list(low)} to {list(high)}: low must lie below high")
    return (lower + upper) / 2, (upper - lower) / 2


def _records(sums: CodedSums) -> float:
    """The number of records by the code's first row, at least one."""
    return max(float(sums.code[0]), 1.0)


def _moments(sums: CodedSums) -> tuple[Tensor, Tensor]:
    """Covariances of the numbers with the features (r, d), and variances of the numbers (r,)."""
    if sums.products is None or len(sums.products) != len(sums.code) - 1:
        raise ValueError("numbers need the products of all their pairs")
    records = _records(sums)
    means = sums.code[1:] / records
    variance = sums.products.diagonal() / records - means.square()
    noises = _noise_of_variance(sums).tolist()
    for index, (each, noise) in enumerate(zip(variance.tolist(), noises, strict=True)):
        if not each > max(noise, 1e-12):
            why = f"which is within the noise of {noise:.2g}" if noise else "so it does not vary"
            raise RunError(
                f"number {index + 1} has the variance {each:.2g} in its range of [-1, 1], {why}: "
                "nothing can be learned"
            )
    cross = sums.sums[1:] / records - torch.outer(means, sums.mean)
    return cross, variance


def _noise_of_variance(sums: CodedSums) -> Tensor:
    """Standard deviation of the noise in the variance of each number, (r,)."""
    means = sums.code[1:] / _records(sums)
    if sums.noise is None or sums.products is None:
        return torch.zeros_like(means)
    squares = sums.products.diagonal() / _records(sums)
    of_mean = 2 * means * sums.noise.code[1:]
    of_count = (squares - 2 * means.square()) * sums.noise.code[0]
    total = sums.noise.products**2 + of_mean.square() + of_count.square()
    return total.sqrt() / _records(sums)


def _fitted(sums: CodedSums, cross: Tensor, variance: Tensor) -> Fitted:
    records = _records(sums)
    each = torch.full_like(variance, records)
    if sums.noise is None:
        directions = Directions.of(sums.covariance, sums.rounding)
        return cross_validated(
            directions, Outcomes(cross, variance, each, torch.zeros_like(variance))
        )
    directions = Directions.of_noisy(sums.covariance, sums.noise.squares / records, ADDED)
    means = sums.code[1:] / records
    noise = (sums.noise.sums[1:].square() + (means * sums.noise.sums[0]).square()).sqrt() / records
    return expected(directions, Outcomes(cross, variance, each, noise))


# Ridges that are compared, in parts of the mean variance.
STRENGTHS = torch.logspace(-8, 2, 61, dtype=torch.float64)
# A ridge that leaves more degrees of freedom than this share of the records is not compared.
MOST_FREEDOM = 0.99
# Powers of the eigenvalues, and shares of the outcome's variance that the features explain, among
# which the spread of true weights is chosen. With a smaller share than a 400th noise can hide signal
# so well that all weights are taken for none, while they still rank records.
POWERS = torch.arange(-1, 2.5, 0.5, dtype=torch.float64)
EXPLAINED = torch.linspace(-6, 2, 81, dtype=torch.float64).exp()
# Smallest share of the outcome's variance that features are taken to leave unexplained.
LEAST_RESIDUAL = 0.05
# Of Kim & Gu 2004. With few records plain cross-validation chooses ridges that are too weak: 150
# records of 128 features gave labels an AUROC of .75 in place of .82.
CAUTION = 1.4
# All of the variance that there is, and what 64 bits round.
ALL_OF_IT = 1 + 1e-9
# Estimates of the residual variance, each from the weights of the one before.
PASSES = 3
# Of the ridge that was added against noise, the part with which a prediction's own variance is
# judged. Without it, errors came out too small, with all of it too large; measured in
# benchmarks/targets_heads.py.
JUDGED = 0.5


@dataclass(frozen=True)
class Directions:
    """A covariance by its eigenvectors: one decomposition serves all outputs and strengths.

    Attributes:
        values: eigenvalues, (d,), zero or more, ascending, that the ridge uses.
        vectors: V, (d, d), one column each.
        measured: eigenvalues without the part that was added against noise, (d,).
        least: smallest ridge that is allowed: eigenvalues below it are those of rounding.
    """

    values: Tensor
    vectors: Tensor
    measured: Tensor
    least: float = 0.0

    @classmethod
    def of(cls, covariance: Tensor, rounding: float = 0.0) -> Directions:
        """The directions of a covariance without noise.

        Args:
            covariance: (d, d).
            rounding: largest eigenvalue, about, of what rounding has changed in it.
        """
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp_min(0)
        return cls(values, vectors, values, rounding)

    @classmethod
    def of_noisy(cls, covariance: Tensor, noise: float, added: float) -> Directions:
        """The directions of a covariance with noise, cleaned.

        Args:
            covariance: (d, d).
            noise: standard deviation of the noise on its diagonal.
            added: to every eigenvalue, as a share of the noise's largest eigenvalue.
        """
        clean = cleaned(covariance, noise)
        matrix = clean.factor @ clean.factor.T + clean.variances.diag()
        values, vectors = torch.linalg.eigh(matrix)
        radius = noise * math.sqrt(2 * len(matrix))
        return cls(values + added * radius, vectors, values)

    def weights(self, cross: Tensor, strength: Tensor) -> Tensor:
        """(T + kappa I)^-1 c.

        Args:
            cross: c, (m, d).
            strength: kappa of each row, (m,), above zero where T is singular.

        Returns:
            (m, d).
        """
        inside = (cross @ self.vectors) / (self.values + strength[:, None])
        return inside @ self.vectors.T


@dataclass(frozen=True)
class Outcomes:
    """What m ridges on the same features predict.

    Attributes:
        cross: covariance of each outcome with the features, (m, d), float64.
        variance: of each outcome, (m,).
        records: that each outcome was seen on, (m,).
        noise: standard deviation of the noise in an entry of `cross`, (m,); zero without.
    """

    cross: Tensor
    variance: Tensor
    records: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Fitted:
    """Weights of m ridges, and how well they are expected to predict new records.

    Attributes:
        weight: (m, d).
        cross: covariance of outcomes and features as the fit expects it, (m, d): as it was given,
            without noise.
        strength: kappa of each ridge, (m,); NaN where each direction has its own.
        error: expected mean squared error on a new record, (m,).
        doubt: variance of a prediction for a new record that noise in the cross-covariance leaves,
            (m,); zero without noise.
    """

    weight: Tensor
    cross: Tensor
    strength: Tensor
    error: Tensor
    doubt: Tensor


def cross_validated(
    directions: Directions, outcomes: Outcomes, largest: float = ALL_OF_IT, caution: float = 1.0
) -> Fitted:
    """Ridges with the strength of smallest generalised cross-validation error.

    Args:
        directions: of the covariance of the features.
        outcomes: without noise.
        largest: strengths that explain this share of the variance or more are left out: where an
            outcome was seen on other records than the covariance, or rounding has changed that, a
            weak ridge may explain more than there is.
        caution: by which degrees of freedom are multiplied where strengths are compared; more than
            one prevents ridges that are too weak, which few records make likely.

    Returns:
        The ridges. Where no strength is allowed, the strongest one.

    Source: Golub, Heath & Wahba 1979, with one degree of freedom for the intercept; caution: Kim &
        Gu 2004, section 4.
    """
    variance = outcomes.variance[:, None]
    strengths, fits, spread, freedom = _compared(directions, outcomes)
    residual = variance - 2 * fits + spread
    freedom = freedom / outcomes.records[:, None]
    errors = _errors(residual, freedom)
    allowed = (caution * freedom < MOST_FREEDOM) & (fits < largest * variance)
    allowed &= strengths >= directions.least
    allowed[:, -1] |= ~allowed.any(1)
    compared = _errors(residual, caution * freedom)
    best = torch.where(allowed, compared, torch.inf).argmin(1)
    strength = strengths[best]
    weight = directions.weights(outcomes.cross, strength)
    error = errors.gather(1, best[:, None]).squeeze(1)
    return Fitted(weight, outcomes.cross, strength, error, torch.zeros_like(error))


def of_least_error(directions: Directions, outcomes: Outcomes, records: float) -> Fitted:
    """Ridges with the strength of the smallest expected error, for outcomes that were seen on other
    records than the covariance.

    There the residuals of a weak ridge say nothing: it fits noise of the outcome that the covariance
    does not have. In place of them stand twice the covariance of outcome and prediction that chance
    gives (Mallows 1973), and the variance of a prediction on new records, which is larger than on
    those of the covariance by 1 / (1 - degrees of freedom / records).

    Args:
        directions: of the covariance of the features.
        outcomes: without noise.
        records: that the covariance was seen on.

    Returns:
        The ridges. Where no strength is allowed, the strongest one.
    """
    variance = outcomes.variance[:, None]
    strengths, fits, spread, freedom = _compared(directions, outcomes)
    spread = spread / (1 - freedom / records).clamp_min(1 - MOST_FREEDOM)
    allowed = (freedom < MOST_FREEDOM * outcomes.records[:, None]) & (fits < variance)
    allowed &= strengths >= directions.least
    allowed[:, -1] |= ~allowed.any(1)
    residual = variance
    for _ in range(PASSES):
        chance = residual * freedom / outcomes.records[:, None]
        errors = torch.where(allowed, variance - 2 * (fits - chance) + spread, torch.inf)
        error, best = errors.min(1)
        residual = error[:, None].clamp_min(LEAST_RESIDUAL * variance).minimum(variance)
    strength = strengths[best]
    weight = directions.weights(outcomes.cross, strength)
    error = residual.squeeze(1)
    return Fitted(weight, outcomes.cross, strength, error, torch.zeros_like(error))


def _compared(directions: Directions, outcomes: Outcomes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ridges among which a strength is chosen.

    Returns:
        Strengths (k,); by outcome and strength the covariance of outcome and prediction and the
        variance of predictions, (m, k); and the degrees of freedom, (k,).
    """
    values = directions.values
    strengths = STRENGTHS * max(float(values.mean()), 1e-300)
    squares = (outcomes.cross @ directions.vectors).square()
    inverse = 1 / (values + strengths[:, None])
    spread = (squares * values) @ inverse.square().T
    return strengths, squares @ inverse.T, spread, 1 + (values * inverse).sum(1)


def _errors(residual: Tensor, freedom: Tensor) -> Tensor:
    """The error on new records of ridges with this residual variance and degrees of freedom a
    record.
    """
    kept: Tensor = (1 - freedom).clamp_min(1 - MOST_FREEDOM)
    return residual.clamp_min(0) / kept.square()


def expected(directions: Directions, outcomes: Outcomes) -> Fitted:
    """Weights as they are expected given the noise (hierarchical Bayes).

    In the direction of an eigenvalue l, the weight of the true covariance is taken as normal with
    variance t l^a, so the released one has t l^(a + 2) + l v / N + noise^2, v the residual
    variance. Weights are means over powers a and scales t by their likelihood. The likeliest pair
    alone leaves nothing of a weak signal as soon as noise hides it, or takes noise for signal.

    Args:
        directions: of a cleaned covariance, all eigenvalues above zero.
        outcomes: with noise.

    Returns:
        The weights. Their error is that of the mean under this prior.
    """
    values = directions.values
    judged = directions.measured + JUDGED * (values - directions.measured)
    rotated = outcomes.cross @ directions.vectors
    shapes = values ** (POWERS[:, None] + 2)
    scales = EXPLAINED[:, None] / (shapes / values).sum(1)
    weight, cross = torch.zeros_like(rotated), torch.zeros_like(rotated)
    error, doubt = [], []
    for row, (own, variance) in enumerate(zip(rotated, outcomes.variance.tolist(), strict=True)):
        residual, noise = variance, outcomes.noise[row].square()
        for _ in range(PASSES):
            chance = values * residual / float(outcomes.records[row]) + noise
            whole = ((variance * scales)[:, :, None] * shapes + chance).flatten(0, 1)
            likely = ((whole.log() + own.square() / whole).sum(1) / -2).softmax(0)
            shares = 1 - chance / whole
            kept = likely @ shares
            cross[row] = kept * own
            weight[row] = cross[row] / values
            explained = 2 * weight[row] * cross[row] - judged * weight[row].square()
            residual = max(variance - float(explained.sum()), LEAST_RESIDUAL * variance)
        error.append(residual)
        # What noise leaves open for known powers and scales, and what these leave open.
        apart = likely @ (shares - kept).square() * own.square()
        doubt.append(float(((kept * noise + apart) / values).sum()))
    vectors = directions.vectors.T
    return Fitted(
        weight @ vectors,
        cross @ vectors,
        torch.full_like(outcomes.variance, torch.nan),
        torch.tensor(error, dtype=torch.float64),
        torch.tensor(doubt, dtype=torch.float64),
    )
