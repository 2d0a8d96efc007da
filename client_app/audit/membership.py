"""Membership inference: the likelihood-ratio attack (LiRA) and RMIA, their success, the scores that
they compare, and whether a claim of epsilon holds against them. And attacks on a model by the losses and
gradients of records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.class_metrics import bootstrap_weights, ranking_samples
from fedsurrogate.common.models.classifiers import Classifier, Head, Network, class_indices
from fedsurrogate.common.models.networks import build, split_input
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import weight_of
from fedsurrogate.common.surrogates.class_sums import fold, unfold
from fedsurrogate.common.surrogates.surrogates import (
    Header,
    SumsSurrogate,
    Surrogate,
    in_class_order,
)
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)

# Largest epsilon that a bound can have.
LARGEST = 50.0


@dataclass(frozen=True)
class Guesses:
    """The answers of an attacker.

    Attributes:
        canaries: number of all canaries that were tossed for.
        guessed: number of answers given.
        right: number of answers that are true.
    """

    canaries: int
    guessed: int
    right: int


def guess(scores: Tensor, included: Tensor, count: int) -> Guesses:
    """Guess "in" for the count / 2 canaries with the highest scores, and "out" for as many
    with the lowest.

    There is no guess for the scores between: a wrong guess costs more than a right one gains.

    Args:
        scores: of the canaries, (m,).
        included: whether each canary was in the data, (m,), bool.
        count: number of answers.

    Returns:
        The answers, counted.

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.9, 0.1, 0.5, 0.8])
        >>> guess(scores, torch.tensor([True, False, True, False]), count=2)
        Guesses(canaries=4, guessed=2, right=2)
    """
    order = scores.argsort()
    half = max(1, min(count, len(scores)) // 2)
    right = included[order[-half:]].sum() + (~included[order[:half]]).sum()
    return Guesses(len(scores), 2 * half, int(right))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of so many right answers or more under (epsilon, delta).

    Args:
        guesses: the answers of the attacker.
        epsilon: of the claim, for adding or removing one record.
        delta: of the claim.

    Returns:
        The bound, at most one.

    Source:
        Steinke, Nasr & Jagielski 2023, theorem 5.2.
    """
    from scipy.stats import binom

    rate = 1 / (1 + math.exp(-epsilon))
    tail, alpha, summed = float(binom.sf(guesses.right - 1, guesses.guessed, rate)), 0.0, 0.0
    if delta > 0:
        masses = binom.pmf(range(guesses.right), guesses.guessed, rate)
        for i in range(1, guesses.right + 1):
            summed += float(masses[guesses.right - i])
            alpha = max(alpha, summed / i)
    return min(1.0, tail + 2 * guesses.canaries * alpha * delta)


def epsilon_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Largest epsilon that these answers refute: a lower bound of the true one.

    Args:
        guesses: the answers of the attacker.
        delta: at which epsilon is bounded.
        confidence: of the bound.

    Returns:
        The bound, at most `LARGEST`; 0 if there is none.

    Example:
        >>> round(epsilon_bound(Guesses(canaries=1000, guessed=100, right=95), delta=1e-5), 2)
        2.17
    """
    low, high = 0.0, LARGEST
    if p_value(guesses, low, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        refuted = p_value(guesses, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


# A mean is a copy of a record if it is nearer than this share of the usual distance between any two
# records.
COPY = 0.1
Near = tuple[str, float, float]


@dataclass(frozen=True)
class NearestRecords:
    """Means of the release and the records next to them.

    Attributes:
        ratio: median over the means of (distance to the nearest record used) / (distance to the
            nearest record of the class that was not used); one where the release is no nearer to
            its own records than to others.
        smallest: the smallest ratio.
        copies: share of the means that are nearly a record.
        classes: those with such a mean.
    """

    ratio: float
    smallest: float
    copies: float
    classes: tuple[str, ...]


def usual_distance(features: Tensor) -> float:
    """The median distance of two records; features (n, d)."""
    some = features[
        torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:500]
    ].double()
    return float(torch.pdist(some).median())


def means_of(sent: object) -> tuple[Tensor, Tensor] | None:
    """Means in a release.

    They are the means of a mixture's components, or of the classes in sums.

    Args:
        sent: the release.

    Returns:
        Means (m, d), and the class (m,) of each, an index into its header's classes; None if it has
        no means.
    """
    match sent:
        case Surrogate():
            return sent.mixtures.means.double(), sent.mixtures.labels
        case Parameters() if {"counts", "sums"} <= sent.tensors.keys():
            counts, sums = sent.tensors["counts"], sent.tensors["sums"].double()
            there = counts > 0
            return (sums / counts.clamp_min(1)[:, None])[there], torch.arange(len(counts))[there]
    return None


def nearest(
    sent: object, classes: tuple[str, ...], features: Tensor, labels: Tensor, inside: Tensor
) -> list[Near]:
    """For each mean of a release, distances to the records next to it.

    Args:
        sent: the release.
        classes: names of classes.
        features: of the records, (n, d).
        labels: indices into `classes`, (n,).
        inside: whether a record was used, (n,) bool.

    Returns:
        For each mean: its class, and distances to the nearest record used and the nearest one not
        used. The latter is of the same class, or of any class where the release used all records of
        this one.
    """
    near: list[Near] = []
    if (read := means_of(sent)) is None:
        return near
    header: Header = getattr(sent, "header")  # noqa: B009
    means, kinds = read
    for mean, kind in zip(means, kinds.tolist(), strict=True):
        name = header.classes[kind]
        own = labels == classes.index(name)
        used, others = features[own & inside].double(), features[own & ~inside].double()
        if not len(others):
            others = features[~inside].double()
        if len(used) and len(others):
            distances = [torch.cdist(mean[None], rows)[0] for rows in (used, others)]
            near.append((name, float(distances[0].min()), float(distances[1].min())))
    return near


def summary(near: list[Near], usual: float) -> NearestRecords | None:
    """All means together.

    Args:
        near: of each mean, see `nearest`.
        usual: distance of two records, see `usual_distance`.

    Returns:
        The summary; None if there are no means.

    Example:
        >>> summary([("cat", 1.0, 2.0), ("dog", 3.0, 3.0)], usual=2.0)
        NearestRecords(ratio=0.75, smallest=0.5, copies=0.0, classes=())
    """
    if not near:
        return None
    ratios = [used / max(other, 1e-12) for _, used, other in near]
    copies = [name for name, used, _ in near if used < COPY * usual]
    return NearestRecords(
        float(np.median(ratios)), min(ratios), len(copies) / len(near), in_class_order(set(copies))
    )


# Records of the prior for a record's own variance: with few trials, the variance of all records
# counts more.
PRIOR = 4.0
# A score that is not finite lies this many ranges of the finite ones below them.
BEYOND = 2.0
RESAMPLES = 100
# RMIA: a record counts as more likely a member than another one if its ratio is so many times larger.
GAMMA = 2.0
SMALLEST = 1e-12
Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Trials:
    """K releases, four or more, each from its own half of n records.

    Attributes:
        scores: (K, n), of each record under each release, larger for members.
        members: (K, n), whether the release was made with the record.
    """

    scores: Matrix
    members: Mask


@dataclass(frozen=True)
class AttackResult:
    """Success of an attack.

    Attributes:
        auc: area under the ROC curve.
        low: lower end of its 95 % interval.
        high: upper end of its 95 % interval.
        rate_at_one_percent: true positive rate at a false one of 1 %.
        rate_at_one_in_thousand: true positive rate at a false one of 0.1 %.
        curve: pairs of false and true positive rates.
    """

    auc: float
    low: float
    high: float
    rate_at_one_percent: float
    rate_at_one_in_thousand: float
    curve: tuple[tuple[float, float], ...]


def lira(trials: Trials) -> Matrix:
    """Log likelihood ratios of "member" against "not", for every record and release.

    The releases of all other pairs are the attacker's shadow models: it knows all records and the
    settings, and guesses only which half was used. The complement of a release has the same coin
    tosses, so as a shadow model it would tell the attacker the answer.

    Args:
        trials: pairs of complementary halves.

    Returns:
        Ratios (K, n).

    Source: Carlini et al. 2022, "Membership inference attacks from first principles", algorithm 1
    (online); differs as `_ratios`.
    """
    pairs = np.arange(len(trials.scores)) // 2
    scores, ratios = _finite(trials.scores), np.empty(trials.scores.shape)
    for pair in np.unique(pairs):
        own = pairs == pair
        ratios[own] = _ratios(scores[own], scores[~own], trials.members[~own])
    return ratios


def _ratios(attacked: Matrix, scores: Matrix, members: Mask) -> Matrix:
    """Log likelihood ratios (r, n) of attacked releases with scores (r, n), from shadow models:
    scores, members (s, n).

    Source: Carlini et al. 2022, "Membership inference attacks from first principles", algorithm 1
    (online). Differs: with few shadow models, the difference between a record's two means and its
    variances are shrunk to those of all records, which makes the attack stronger.
    """
    deviation = _deviation(scores, members)
    scores, attacked = scores / deviation, attacked / deviation
    sides = _sides(scores, members)
    means, counts = ([side[at] for side in sides] for at in (0, 2))
    variances = [
        (count * spread + PRIOR * spread.mean()) / (count - 1 + PRIOR) + SMALLEST
        for _, spread, count in sides
    ]
    error = variances[0] / counts[0] + variances[1] / counts[1]
    apart = means[0] - means[1]
    true = max(apart.var() - error.mean(), 0.0)
    apart = (true * apart + error * apart.mean()) / (true + error)
    share = counts[0] / (counts[0] + counts[1])
    middle = share * means[0] + (1 - share) * means[1]
    expected = middle + (1 - share) * apart, middle - share * apart
    logs = [
        -0.5 * np.log(variance) - (attacked - mean) ** 2 / (2 * variance)
        for variance, mean in zip(variances, expected, strict=True)
    ]
    return np.asarray(logs[0] - logs[1])


def _deviation(scores: Matrix, members: Mask) -> Matrix:
    """Standard deviations (n,) of the records' finite scores around their two means, shrunk to that
    of all records.
    """
    (inside, *_), (outside, *_) = _sides(scores, members)
    rest = scores - np.where(members, inside, outside)
    variance = (len(scores) * rest.var(0) + PRIOR * rest.var(0).mean()) / (len(scores) - 2 + PRIOR)
    return np.asarray(np.sqrt(np.maximum(variance, SMALLEST * (1 + scores.std() ** 2))))


def answers(trials: Trials, share: float = 0.2) -> Guesses:
    """Answers of the attack about releases whose members it does not know.

    The first half of the pairs are the attacker's shadow models. Of each later pair one release is
    attacked alone: its complement has the same coin tosses. So the answers depend on the tosses
    through the attacked releases only, as the theorem behind `fedsurrogate.common.privacy.accounting` asks.

    Args:
        trials: pairs of complementary halves.
        share: of the tosses that are answered.

    Returns:
        Tosses, answers given, and right ones.
    """
    pairs = len(trials.scores) // 2
    shadows, attacked = np.arange(2 * (pairs // 2)), np.arange(2 * (pairs // 2), 2 * pairs, 2)
    scores = _finite(trials.scores[np.concatenate([shadows, attacked])])
    attack_ratios = _ratios(scores[len(shadows) :], scores[: len(shadows)], trials.members[shadows])
    ratios, tosses = (
        torch.from_numpy(each.ravel()) for each in (attack_ratios, trials.members[attacked])
    )
    return guess(ratios, tosses, max(2, round(share * len(ratios))))


def success(ratios: Matrix, members: Mask) -> AttackResult:
    """How well scores separate members from others.

    The intervals draw records, and pairs of complementary releases, with replacement: records of a
    release share its noise. Of a single release they draw records alone.

    Args:
        ratios: scores (K, n).
        members: (K, n), whether a release was made with a record.
    """
    from sklearn.metrics import roc_auc_score

    k = min(2, len(ratios))
    pairs, count = len(ratios) // k, members.shape[1]
    truth, scores = members[: k * pairs].ravel(), ratios[: k * pairs].ravel()
    # How often each pair, and each record, is drawn.
    times, records = (
        bootstrap_weights(most, None, RESAMPLES, seed) for seed, most in enumerate((pairs, count))
    )
    areas = [
        ranking_samples(truth, scores, np.outer(np.repeat(each, k), own).reshape(1, -1))[0].item()
        for each, own in zip(times, records, strict=True)
    ]
    low, high = np.percentile(areas, [2.5, 97.5])
    false = np.logspace(-4, 0, 60)
    fixed = _rates(ratios, members, np.array([0.01, 0.001]))
    return AttackResult(
        auc=float(roc_auc_score(members.ravel(), ratios.ravel())),
        low=float(low),
        high=float(high),
        rate_at_one_percent=fixed[0],
        rate_at_one_in_thousand=fixed[1],
        curve=tuple(zip(false.tolist(), _rates(ratios, members, false), strict=True)),
    )


def _rates(ratios: Matrix, members: Mask, false: Matrix) -> list[float]:
    """True positive rates at these false positive rates."""
    others = np.sort(ratios[~members])[::-1]
    thresholds = others[np.minimum(np.floor(false * len(others)).astype(int), len(others) - 1)]
    return [
        float((ratios[members] > threshold).mean()) if rate < 1 else 1.0
        for threshold, rate in zip(thresholds, false, strict=True)
    ]


def distinct(trials: Trials) -> Matrix:
    """How far a record's own scores (n,) with and without it lie apart, in standard deviations."""
    scores = _finite(trials.scores)
    (inside, *_), (outside, *_) = _sides(scores, trials.members)
    return np.asarray((inside - outside) / _deviation(scores, trials.members))


def _sides(scores: Matrix, members: Mask) -> list[tuple[Matrix, Matrix, Matrix]]:
    """Means, variances and numbers (n,) of each record's scores (K, n) under releases with it, and
    under those without; of none the mean is zero, and the number one.
    """
    both = (np.ma.array(scores, mask=mask) for mask in (~members, members))
    return [
        (side.mean(0).filled(0), side.var(0).filled(0), np.maximum(side.count(0), 1))
        for side in both
    ]


def rmia(trials: Trials) -> Matrix:
    """The attack on heads that needs few reference models: the share of other records that a record
    beats in the ratio of the probability of its own class to the usual.

    The other releases are the references. The population are all records of the site: the attacker
    knows them, but not which half is in the attacked release.

    Args:
        trials: their scores are log-odds of the right class.

    Returns:
        Scores (K, n) in [0, 1].

    Source: Zarifzadeh, Liu & Shokri 2024, "Low-Cost High-Power Membership Inference Attacks",
    equations 5 and 9.
    """
    probabilities: Matrix = torch.from_numpy(trials.scores).sigmoid().numpy()
    pairs, scores = np.arange(len(probabilities)) // 2, []
    for pair, own in zip(pairs, probabilities, strict=True):
        # A release and its complement have the same coin tosses, so the complement is no reference.
        rest = pairs != pair
        (inside, *_), (outside, *_) = _sides(probabilities[rest], trials.members[rest])
        usual = np.maximum((inside + outside) / 2, SMALLEST)
        ratio = own / usual
        beaten = np.searchsorted(np.sort(ratio), ratio / GAMMA, side="right") / max(1, len(ratio))
        # The share is a step function of the ratio; the ratio itself decides between equal shares.
        scores.append(beaten * (1 - 1e-6) + 1e-6 * ratio / (1 + ratio))
    return np.stack(scores)


def scores_of(sent: object, classes: Sequence[str], features: Tensor, labels: Tensor) -> Tensor:
    """Scores of records under what was released, from that alone.

    Mixtures: log-density under the record's own class. Noisy sums: the product with the sum of the
    record's class. Statistics of least squares: distance from the class mean. Heads: log-odds of
    the right class.

    Args:
        sent: the release.
        classes: names of classes.
        features: of the records, (n, d).
        labels: indices into `classes`, (n,).

    Returns:
        Scores (n,), float64; minus infinity where the release has not a record's class.

    Raises:
        ConfigError: for other releases.

    Source: for heads, Carlini et al. 2022, section IV-A.
    """
    read = _reader(sent)
    header: Header = getattr(sent, "header")  # noqa: B009
    places = class_indices(header.classes, tuple(classes))[labels]
    scores = torch.full((len(labels),), -torch.inf, dtype=torch.float64)
    known = places >= 0
    if known.any():
        scores[known] = read(features[known].double(), places[known]).double()
    return scores


def _reader(sent: object) -> Callable[[Tensor, Tensor], Tensor]:
    match sent:
        case Surrogate():
            return lambda x, y: _log_density(sent, x, y)
        case SumsSurrogate():
            weight = weight_of(sent.claim.centre)
            return lambda x, y: (
                clip(weigh_mean_over_columns(x, weight), 0.0)[0] * sent.sums.sums.double()[y]
            ).sum(1)
        case Parameters() if {"weight", "bias"} <= sent.tensors.keys():
            return lambda x, y: _log_odds(
                x @ sent.tensors["weight"].double().T + sent.tensors["bias"].double(), y
            )
    if (read := means_of(sent)) is not None:
        # Minus the squared distance from the nearest mean of a record's class.
        means, kinds = read
        return lambda x, y: (
            -(
                torch.cdist(x, means)
                .square()
                .masked_fill(y[:, None] != kinds[None], torch.inf)
                .amin(1)
            )
        )
    raise ConfigError(f"no membership attack reads a release of type {type(sent).__name__}")


def _log_density(sent: Surrogate, features: Tensor, labels: Tensor) -> Tensor:
    table = sent.mixtures
    joint = (
        table.covariance.log_density(features.float(), table.means.float())
        + table.weights.double().log()
    )
    return joint.masked_fill(labels[:, None] != table.labels[None], -torch.inf).logsumexp(1)


def _log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    return right - others


def _finite(scores: Matrix) -> Matrix:
    """Scores with minus infinity replaced: a class that is missing says more than any density."""
    known = np.isfinite(scores)
    if known.all():
        return scores
    low, high = (scores[known].min(), scores[known].max()) if known.any() else (0.0, 1.0)
    return np.where(known, scores, low - BEYOND * max(high - low, 1.0))


# Shares of all scores that the attacker names: the highest ones, and the lowest ones.
SHARES = (0.001, 0.01, 0.1, 0.5)
# Probability that the interval of an excess does not hold it.
INTERVAL_ERROR = 0.01
# Probability that `proven_epsilon` exceeds a true claim. Theorem 5.2 refutes nothing at an error
# below ten times delta.
FALSE_ALARM = 1e-3


@dataclass(frozen=True)
class Excess:
    """By how much an attack finds more than a claim allows; negative where it finds less.

    The attacker names records as members, or as others. The interval is that of the threshold with
    the largest `low`; the claim is broken if this is above 0.

    Attributes:
        excess: true_rate minus what the claim allows at this false_rate.
        low: lower end of its interval.
        high: upper end of its interval.
        true_rate: of the records that are what the attacker names, the share that it names.
        false_rate: of the records that are not, the share that it names.
    """

    excess: float
    low: float
    high: float
    true_rate: float
    false_rate: float


def allowed_auc(epsilon: float, delta: float) -> float:
    """Largest AUC of any attack on an (epsilon, delta)-DP release of one record.

    It is the area under the release's trade-off curve. No attack has less than one minus this,
    either: turned round, it would have more.

    Args:
        epsilon: of the claim; 0 for no claim.
        delta: of the claim.

    Example:
        >>> round(allowed_auc(1.0, 0.0), 3), allowed_auc(0.0, 0.0)
        (0.731, 1.0)
    """
    if not epsilon:
        return 1.0
    corner = (1 - delta) / (1 + math.exp(epsilon))
    false = np.array([0.0, corner, 1 - delta, 1.0])
    true = np.array([delta, 1 - corner, 1.0, 1.0])
    return float(np.trapezoid(true, false))


def largest_excess(ratios: Matrix, members: Mask, epsilon: float, delta: float) -> Excess | None:
    """The largest excess of TPR over e^epsilon FPR + delta, over thresholds, in both directions.

    The attacker names the records with the highest or the lowest scores, as members or as others:
    an attack that is far worse than a guess is a strong one turned round. The interval is Student's
    over the pairs, whose noise is independent, and no narrower than that of independent records. It
    holds for all thresholds and directions together (Bonferroni).

    Args:
        ratios: scores (K, n), of pairs of complementary releases, in which each record is a member
            once.
        members: (K, n), whether a release was made with a record.
        epsilon: of the claim.
        delta: of the claim.

    Returns:
        The excess; None if the claim allows everything at all these thresholds.
    """
    from scipy.stats import t as student

    order = np.sort(ratios, axis=None)
    counts = [max(1, round(share * order.size)) for share in SHARES]
    named = [ratios >= order[-number] for number in counts] + [
        ratios <= order[number - 1] for number in counts
    ]
    pairs, count = len(ratios) // 2, members.shape[1]
    width = student.ppf(1 - INTERVAL_ERROR / (4 * len(named)), pairs - 1)
    excesses = []
    for chosen in named:
        rates = [
            (chosen & mask)[: 2 * pairs].reshape(pairs, -1).sum(1) / count
            for mask in (members, ~members)
        ]
        for true, false in (rates, rates[::-1]):
            if math.exp(epsilon) * float(false.mean()) + delta >= 1:
                continue
            each = true - math.exp(epsilon) * false - delta
            spread = [rate.mean() * (1 - rate.mean()) for rate in (true, false)]
            least = (spread[0] + math.exp(2 * epsilon) * spread[1]) / (pairs * count)
            error = width * math.sqrt(max(each.var(ddof=1) / pairs, least))
            middle = float(each.mean())
            found = float(true.mean()), float(false.mean())
            excesses.append(Excess(middle, middle - error, middle + error, *found))
    return max(excesses, key=lambda each: each.low, default=None)


def proven_epsilon(trials: Trials, delta: float) -> float:
    """Epsilon that an attack refutes, with a probability of error of FALSE_ALARM at most.

    It holds for every mechanism.

    Args:
        trials: of the attack.
        delta: at which epsilon is refuted.

    Returns:
        Epsilon; 0 for none.

    Source: Steinke, Nasr & Jagielski 2023, theorem 5.2.
    """
    return epsilon_bound(answers(trials), delta, 1 - FALSE_ALARM)


# Of exact sums: the records' own code, and their place in the second moment.
CODED, MOMENT = "LiRA on the sums of the code", "LiRA on the second moment"
# Added to the eigenvalues of a second moment, as a share of their mean.
RIDGE = 1e-3
ROWS = 512


def coded_scores(
    sent: Parameters, target: Target, features: Tensor, values: Tensor
) -> dict[str, Tensor]:
    """Scores of records, larger for those that are in the sums; from what was released alone.

    With noise, what a record would add to each statistic times the statistic, over the variance of
    its noise: apart from a constant, the logarithm of the likelihood ratio of sums with and
    without it. Exact sums are around the mean of the site's features, so a record's distance from
    that mean is measured in the second moment: times the sums of its rows, and minus its square.

    Args:
        sent: the release.
        target: of the run.
        features: of the records, (n, d).
        values: of the target, (n, k), float64.

    Returns:
        By name of the attack, (n,) float64.
    """
    code, tensors = target.code(values), {k: v.double() for k, v in sent.tensors.items()}
    if sent.claim is not None:
        clipped = clip(features.double(), sent.claim.clip)[0]
        noise = {name: sigma for name, (sigma, _) in sent.claim.noise.items()}
        return {CODED: _likelihood(tensors, noise, code, clipped)}
    records = float(tensors[RECORDS])
    apart = features.double() - tensors[TOTALS] / records
    moment = unfold(tensors[SQUARES], apart.shape[1]) / records
    moment.diagonal().add_(RIDGE * moment.trace() / len(moment))
    scaled = torch.linalg.solve(moment, apart.T).T
    sizes = (code.square().sum(0) if not target.counts else tensors[CODE]).clamp_min(1.0)
    means = tensors[SUMS] / sizes[:, None]
    return {CODED: (code @ means * scaled).sum(1), MOMENT: -(scaled * apart).sum(1)}


def _likelihood(
    tensors: Mapping[str, Tensor], noise: Mapping[str, float], code: Tensor, features: Tensor
) -> Tensor:
    parts = []
    for t, z in zip(torch.split(code, ROWS), torch.split(features, ROWS), strict=True):
        found = torch.zeros(len(z), dtype=torch.float64)
        for name, sigma in noise.items():
            found += _added(name, t, z).flatten(1) @ tensors[name].flatten() / sigma**2
        parts.append(found)
    return torch.cat(parts)


def _added(name: str, code: Tensor, features: Tensor) -> Tensor:
    """What each record adds to a statistic: codes (n, q), features (n, d)."""
    if name == RECORDS:
        return torch.ones(len(code), 1, dtype=torch.float64)
    if name in (CODE, TOTALS):
        return code if name == CODE else features
    if name == SUMS:
        return code[:, :, None] * features[:, None]
    rows = {SQUARES: features, PRODUCTS: code}[name]
    return torch.stack([fold(torch.outer(row, row)) for row in rows])


# Records whose gradients are computed at a time.
TOGETHER = 250


def model_scores(model: Classifier, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Scores of records under a model: minus the loss of each and, for a linear head or a network,
    minus the norm of its gradient.

    Args:
        model: of classes.
        features: of the records, (n, d).
        labels: indices of its classes, (n,).

    Returns:
        Scores (n,), float64, by name of the attack, larger for members.

    Source: FedLAP-DP (Wang et al. 2024), section 6.6. Differs: no network is trained on the scores.
    """
    logits = model.scores(features).double()
    scores = {"loss (black box)": -cross_entropy(logits, labels, reduction="none")}
    if isinstance(model, Head):
        wrong = (logits.softmax(1) - one_hot(labels, logits.shape[1])).norm(dim=1)
        norms = wrong * (model.prepare(features).double().square().sum(1) + 1).sqrt()
    elif isinstance(model, Network):
        module = build(model.kind, model.inputs, logits.shape[1], model.tensors)
        body, values = split_input(module, model.framed(features).float())

        def loss(at: dict[str, Tensor], value: Tensor, label: Tensor) -> Tensor:
            return cross_entropy(torch.func.functional_call(body, at, value[None])[0], label)

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), chunk_size=TOGETHER)
        slopes = each(dict(model.tensors), values, labels).values()
        norms = torch.cat([slope.flatten(1) for slope in slopes], 1).norm(dim=1).double()
    else:
        return scores
    return scores | {"norm of the gradient (white box)": -norms}


def attack_model(
    model: Classifier, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]
) -> dict[str, AttackResult]:
    """Attack a model by the loss and the gradient of each record.

    Args:
        model: of classes.
        members: features (n, d) and labels (n,) of records that it has learned from.
        others: the same of records that it has not, of the same kind.

    Returns:
        The success by name of the attack.
    """
    scores = model_scores(model, *(torch.cat(both) for both in zip(members, others, strict=True)))
    inside = np.arange(len(members[1]) + len(others[1]))[None] < len(members[1])
    return {name: success(each.numpy()[None], inside) for name, each in scores.items()}
