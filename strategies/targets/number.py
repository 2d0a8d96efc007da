"""Heads for numbers, a ridge with intervals, and for labels, one discriminant a label from the
records that are annotated for it.

The strength of a ridge from sums alone: generalised cross-validation without noise, means
over priors with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.surrogates.covariances import eigen

from ..closed_form.solvers import cleaned
from ..closed_form.statistics import Statistics
from .sums import CodedSums

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
        values, vectors = eigen(covariance)
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
        values, vectors = eigen(matrix)
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
    strengths, fits, spread, freedom, allowed = _compared(directions, outcomes, largest, caution)
    residual = variance - 2 * fits + spread
    freedom = freedom / outcomes.records[:, None]
    errors = _errors(residual, freedom)
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
    strengths, fits, spread, freedom, allowed = _compared(directions, outcomes)
    spread = spread / (1 - freedom / records).clamp_min(1 - MOST_FREEDOM)
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


def _compared(
    directions: Directions, outcomes: Outcomes, largest: float = 1.0, caution: float = 1.0
) -> tuple[Tensor, ...]:
    """The ridges among which a strength is chosen.

    Returns:
        Strengths (k,); by outcome and strength the covariance of outcome and prediction and the
        variance of predictions, (m, k); the degrees of freedom, (k,); and where a strength is
        allowed, (m, k).
    """
    values = directions.values
    strengths = STRENGTHS * max(float(values.mean()), 1e-300)
    squares = (outcomes.cross @ directions.vectors).square()
    inverse = 1 / (values + strengths[:, None])
    spread = (squares * values) @ inverse.square().T
    fits, freedom = squares @ inverse.T, 1 + (values * inverse).sum(1)
    few = caution * (freedom / outcomes.records[:, None]) < MOST_FREEDOM
    allowed = few & (fits < largest * outcomes.variance[:, None])
    allowed &= strengths >= directions.least
    allowed[:, -1] |= ~allowed.any(1)
    return strengths, fits, spread, freedom, allowed


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


# With noise, fewer positives or negatives than this many deviations of it are none.
PRESENT = 2.0
# Share of the noise's largest eigenvalue that is added to every variance of the features. Without it
# log odds came out too large, by a third to one half; with more, too small where there is much noise.
ADDED_TO_LABELS = 0.1
# Above this share, the records that are annotated for a label are all records.
ALL = 0.999


@dataclass(frozen=True)
class Annotated:
    """Sums over the records that are annotated for each of L labels.

    Attributes:
        positive: number of positive records, (L,).
        annotated: number of annotated records, (L,).
        positive_sums: sum of the features of positive records, (L, d).
        annotated_sums: of annotated ones, (L, d).
        positive_noise: standard deviations of the noise in both of the positive records' sums: of
            the numbers, and of the features, (2, L).
        annotated_noise: of the annotated records', (2, L).
        shared_noise: covariance of the noise in an entry of both sums of features, (L,).
    """

    positive: Tensor
    annotated: Tensor
    positive_sums: Tensor
    annotated_sums: Tensor
    positive_noise: Tensor
    annotated_noise: Tensor
    shared_noise: Tensor

    @classmethod
    def exact(cls, sums: CodedSums, labels: int) -> Annotated:
        """From the exact code.

        Args:
            sums: the last 2 L rows of the code are, label by label, "annotated and positive" and
                "annotated and negative". Rows before them, such as `all`, are not read.
            labels: L.
        """
        code, table = sums.code[-2 * labels :], sums.sums[-2 * labels :]
        positive, negative = code[0::2], code[1::2]
        noise = torch.zeros(2, 2 * labels, dtype=torch.float64)
        if sums.noise is not None:
            noise = torch.stack([sums.noise.code[-2 * labels :], sums.noise.sums[-2 * labels :]])
        both = (noise[:, 0::2].square() + noise[:, 1::2].square()).sqrt()
        return cls(
            positive,
            positive + negative,
            table[0::2],
            table[0::2] + table[1::2],
            noise[:, 0::2],
            both,
            noise[1, 0::2].square(),
        )

    @classmethod
    def capped(cls, sums: CodedSums, members: Tensor, set_entry: float = 1.0) -> Annotated:
        """From the capped code, whose positives are counted low where a record has many.

        Args:
            sums: the last L + S rows of the code are the positive labels of a record, scaled, and
                then the label set of its site.
            members: which labels each set has, (S, L), bool.
            set_entry: what a record adds to the row of its set.
        """
        sets, labels = members.shape
        code, table = sums.code[-labels - sets :], sums.sums[-labels - sets :]
        within = members.double().T / set_entry
        noise = torch.zeros(2, labels + sets, dtype=torch.float64)
        if sums.noise is not None:
            noise = torch.stack([each[-labels - sets :] for each in _rows(sums)])
        return cls(
            code[:labels],
            within @ code[labels:],
            table[:labels],
            within @ table[labels:],
            noise[:, :labels],
            (noise[:, labels:].square() @ within.square().T).sqrt(),
            torch.zeros(labels, dtype=torch.float64),
        )

    @property
    def prevalence(self) -> Tensor:
        """p, the share of positive ones of the annotated records, (L,)."""
        return self.positive / self.annotated.clamp_min(1e-9)


@dataclass(frozen=True)
class LabelHeads:
    """Log odds z W^T + b of labels.

    Attributes:
        labels: names of the L labels that could be learned.
        weight: W, (L, d), float64.
        bias: b, (L,), float64. It has the log odds of `prevalence` in it.
        prevalence: share of positive records that the head assumes, (L,).
        strength: of the ridge, (L,); NaN with noise.
        left_out: names of labels without a head, and why.
    """

    labels: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    prevalence: Tensor
    strength: Tensor
    left_out: dict[str, str]


def label_heads(
    sums: CodedSums,
    annotated: Annotated,
    labels: Sequence[str],
    moments: Sequence[Statistics] | None = None,
    fewest: float = 1.0,
    calibrated: bool = False,
) -> LabelHeads:
    """One linear discriminant for each label.

    Args:
        sums: of all records. Their covariance serves every label.
        annotated: the same records by label.
        labels: names of L labels.
        moments: of the records that are annotated for each label, L of them, each as one class,
            in place of the shared covariance; None shares it.
        fewest: positives, and negatives, that a label needs. With noise, at least PRESENT
            deviations of it as well.
        calibrated: whether the log odds are corrected for what the ridge fits of its own records;
            not with noise.

    Returns:
        The heads. Labels with too few positives or negatives are left out, and named.

    Raises:
        RunError: if no label can be learned.
        ValueError: for another number of labels or moments.
    """
    if len(labels) != len(annotated.positive) or len(moments or labels) != len(labels):
        raise ValueError(
            f"{len(labels)} labels, sums of {len(annotated.positive)}, and "
            f"{len(moments or labels)} moments: their numbers must be the same"
        )
    left_out = {}
    for index, name in enumerate(labels):
        why = _too_few(annotated, index, fewest)
        if why:
            left_out[name] = why
    kept = [index for index, name in enumerate(labels) if name not in left_out]
    if not kept:
        raise RunError("no label can be learned: " + "; ".join(map(_named, left_out.items())))
    parts, found = [], dict[int, Directions]()
    for index in kept:
        moment = sums.moment if moments is None else moments[index]
        # One decomposition serves all labels of the same records.
        if id(moment) not in found:
            found[id(moment)] = _directions(sums, moment)
        fit: Callable[[Directions, Outcomes], Fitted]
        fit = partial(cross_validated, largest=1.0, caution=CAUTION)
        if sums.noise is not None:
            fit = expected
        elif moments is None and annotated.annotated[index] < ALL * sums.records:
            fit = partial(of_least_error, records=sums.records)
        parts.append(
            _one(annotated, index, found[id(moment)], fit, sums.noise is not None, calibrated)
        )
    weight, bias, strength = (torch.stack(list(each)) for each in zip(*parts, strict=True))
    names = tuple(labels[index] for index in kept)
    return LabelHeads(names, weight, bias, annotated.prevalence[kept], strength, left_out)


def discriminant(
    cross: Tensor, weight: Tensor, prevalence: float, mean: Tensor, difference: Tensor
) -> tuple[Tensor, Tensor]:
    """The linear discriminant of two classes from the ridge of their difference, without another
    system to solve.

    The covariance within classes is T - p (1 - p) d d^T, so its inverse times d follows from
    w = T^-1 p (1 - p) d (Sherman & Morrison 1950).

    Args:
        cross: c = p (1 - p) d as the ridge expects it, (d,).
        weight: w, (d,).
        prevalence: p.
        mean: of the features of both classes, (d,).
        difference: of the means of the classes, (d,).

    Returns:
        Weight (d,) and bias () of the log odds.

    Raises:
        RunError: where the ridge explains all there is, so that no variance is left within.
    """
    spread = prevalence * (1 - prevalence)
    share = float(weight @ cross) / spread
    if not share < 1:
        raise RunError(
            f"the features explain {share:.3g} of a label's variance, which must be below 1: "
            "a stronger ridge, or the own moment of the label, is needed"
        )
    scale = spread * (1 - share)
    between = 2 * mean + (1 - 2 * prevalence) * difference
    log_odds = torch.logit(torch.tensor(prevalence, dtype=torch.float64))
    return weight / scale, log_odds - weight @ between / (2 * scale)


def _rows(sums: CodedSums) -> tuple[Tensor, Tensor]:
    if sums.noise is None:
        raise ValueError("these sums have no noise")
    return sums.noise.code, sums.noise.sums


def _named(item: tuple[str, str]) -> str:
    return f"{item[0]!r} has {item[1]}"


def _too_few(annotated: Annotated, index: int, fewest: float) -> str:
    """Why a label cannot be learned; empty if it can."""
    positive, all_ = float(annotated.positive[index]), float(annotated.annotated[index])
    noise = (float(annotated.positive_noise[0, index]), float(annotated.annotated_noise[0, index]))
    counts = {"positive": (positive, noise[0]), "negative": (all_ - positive, max(noise))}
    for word, (count, deviation) in counts.items():
        least = max(fewest, PRESENT * deviation)
        if count < least:
            return f"{count:.4g} {word} records, fewer than the {least:.4g} that are needed"
    return ""


def _outcome(annotated: Annotated, index: int) -> tuple[Outcomes, Tensor, Tensor]:
    """What the ridge of a label predicts; the mean of the annotated records; the difference of the
    means of positive and negative ones.
    """
    records, p = annotated.annotated[index], annotated.prevalence[index]
    mean = annotated.annotated_sums[index] / records
    cross = annotated.positive_sums[index] / records - p * mean
    noise = annotated.positive_noise[1, index].square()
    noise = noise + (p * annotated.annotated_noise[1, index]).square()
    noise = (noise - 2 * p * annotated.shared_noise[index]).clamp_min(0).sqrt() / records
    spread = p * (1 - p)
    outcome = Outcomes(cross[None], spread[None], records[None], noise[None])
    return outcome, mean, cross / spread


def _directions(sums: CodedSums, moment: Statistics) -> Directions:
    if sums.noise is None:
        # Of fewer records, rounding changed a larger share.
        rounding = sums.rounding * sums.records / max(moment.records, 1.0)
        return Directions.of(moment.matrix, rounding)
    noise = sums.noise.squares / max(moment.records, 1.0)
    return Directions.of_noisy(moment.matrix, noise, ADDED_TO_LABELS)


def _one(
    annotated: Annotated,
    index: int,
    directions: Directions,
    fit: Callable[[Directions, Outcomes], Fitted],
    noisy: bool,
    calibrated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight (d,), bias () and strength () of one label."""
    outcome, mean, difference = _outcome(annotated, index)
    prevalence = float(annotated.prevalence[index])
    fitted = fit(directions, outcome)
    # As the fit expects it: with noise, less long than the sums say. Where noise makes the features
    # explain all there is, both are shorter, which leaves the ranks of records as they are.
    spread = prevalence * (1 - prevalence)
    share = float(fitted.weight[0] @ fitted.cross[0]) / spread
    most = 1 - LEAST_RESIDUAL if noisy else math.inf
    shorter = min(1.0, math.sqrt(most / max(share, 1e-300)))
    ridge, cross = shorter * fitted.weight[0], shorter * fitted.cross[0]
    difference = cross / spread
    weight, bias = discriminant(cross, ridge, prevalence, mean, difference)
    records = float(annotated.annotated[index])
    if calibrated and not noisy:
        counts = (float(annotated.positive[index]), records)
        weight, bias = _calibrated(weight, bias, counts, directions, fitted, difference)
    if calibrated and noisy:
        scale = float(ridge.norm() / weight.norm().clamp_min(1e-300))
        middle = float(annotated.annotated_noise[1, index]) / records
        doubt = float(fitted.doubt[0]) * (shorter / max(scale, 1e-300)) ** 2
        doubt += float(weight.square().sum()) * middle**2
        weight, bias = moderated(weight, bias, prevalence, doubt)
    if calibrated:
        weight, bias = _limited(weight, bias, prevalence, float(weight @ difference), records)
    return weight, bias, fitted.strength[0]


def moderated(
    weight: Tensor, bias: Tensor, prevalence: float, doubt: float
) -> tuple[Tensor, Tensor]:
    """Log odds whose probabilities are about the mean over what the noise may have been.

    Args:
        weight: (d,).
        bias: (), with the log odds of `prevalence` in it, which stay.
        prevalence: of the label.
        doubt: variance of a record's log odds that the noise leaves.

    Returns:
        Weight (d,) and bias (), shrunk by sqrt(1 + pi doubt / 8). Ranks stay.

    Source: MacKay 1992, The evidence framework applied to classification networks, equation 13.
        Differs from it: one doubt for all records, their mean, so that the head stays linear.

    Example:
        >>> at = torch.tensor(0.0, dtype=torch.float64)
        >>> weight, bias = moderated(torch.tensor([3.0]).double(), at, 0.5, 24 / math.pi)
        >>> weight.tolist(), bias.tolist()
        ([1.5], 0.0)
    """
    slope, log_odds = (
        1 / math.sqrt(1 + math.pi * doubt / 8),
        math.log(prevalence / (1 - prevalence)),
    )
    return slope * weight, slope * (bias - log_odds) + log_odds


def _limited(
    weight: Tensor, bias: Tensor, prevalence: float, distance: float, records: float
) -> tuple[Tensor, Tensor]:
    """Log odds that claim no more than the records can show.

    Where features separate the records that were seen, the normal tails of a discriminant give odds
    that no number of records supports. Without an error among n, odds of n + 1 are the largest that
    are expected of the next (Laplace's rule of succession); so the means of both classes have these
    at most, and all others in proportion. Ranks stay.

    Args:
        weight: (d,).
        bias: ().
        prevalence: whose log odds the bias has.
        distance: between the scores of the classes' means.
        records: n.
    """
    most = math.log(max(records, 0.0) + 1)
    if not distance > 2 * most:
        return weight, bias
    slope, log_odds = 2 * most / distance, math.log(prevalence / (1 - prevalence))
    return slope * weight, slope * (bias - log_odds) + log_odds


def _calibrated(
    weight: Tensor,
    bias: Tensor,
    counts: tuple[float, float],
    directions: Directions,
    fitted: Fitted,
    difference: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log odds with the slope and midpoint that are expected on new records.

    A ridge fits its own records better than new ones: with h the degrees of freedom by record, the
    distance of the classes' scores is too long and their variance too small.
    """
    positive, all_ = counts
    negative, p = all_ - positive, positive / all_
    values = directions.values
    share = float((values / (values + fitted.strength[0])).sum()) / all_
    if not share < 1:
        return weight, bias
    optimism = share / (1 - share)
    inside = weight @ directions.vectors
    within = float((values * inside.square()).sum()) - p * (1 - p) * float(weight @ difference) ** 2
    distance = float(weight @ difference) - optimism * all_ * (1 / positive + 1 / negative)
    if not (distance > 0 and within > 0):
        return weight, bias
    slope = distance / ((1 + optimism) ** 2 * within)
    log_odds = torch.logit(torch.tensor(p, dtype=torch.float64))
    shift = optimism * all_ * (1 / negative - 1 / positive) / 2
    return slope * weight, slope * (bias - log_odds - shift) + log_odds
