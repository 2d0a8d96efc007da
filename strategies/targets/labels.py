"""Heads for labels of which each record has some: one discriminant a label, from the records that
are annotated for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.targets.number import (
    CAUTION,
    LEAST_RESIDUAL,
    Directions,
    Fitted,
    Outcomes,
    cross_validated,
    expected,
    of_least_error,
)
from fedsurrogate.strategies.targets.sums import CodedSums

# With noise, fewer positives or negatives than this many deviations of it are none.
PRESENT = 2.0
# Share of the noise's largest eigenvalue that is added to every variance of the features. Without it
# log odds came out too large, by a third to one half; with more, too small where there is much noise.
ADDED = 0.1
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
    return Directions.of_noisy(moment.matrix, noise, ADDED)


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
