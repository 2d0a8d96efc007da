"""Probabilities of a head of noisy sums that mean what they say: a slope in closed form.

All scores are multiplied by it, so no decision changes. Shares of classes, of which noisy counts and
other hospitals may say little, then count for as little as they did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.surrogates.shared_covariances import LowRank
from fedsurrogate.strategies.pooling.class_means import Components

# What a covariance does not hold of how features vary together: records vary along the differences
# of class means as if that variance were one of so many dimensions, if it holds nothing, and if it
# holds the directions that stand out. Exact statistics have 17 to 63, and 20 to 106 (features of
# CIFAR-10 and PACS, pixels of X-rays and digits).
DIMENSIONS, OTHER_DIMENSIONS = 22.0, 66.0
# Least standard deviation of calibrated scores, where class means do not stand out from noise.
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

    def of_classes(self, components: Components) -> Scores:
        """The same by class, with the differences between a class's components in the spread."""
        shares = components.records / components.records.sum()
        belongs = one_hot(components.labels, len(components.classes)).to(shares)
        means = (self.means * shares) @ belongs / (shares @ belongs)
        apart = self.means - means[:, components.labels]
        return Scores(means, self.spread + (apart * shares) @ apart.T)


def slope_of(scores: Scores, priors: Tensor) -> float:
    """The factor that makes scores log odds: their expected difference between two classes over the
    variance of that difference, over all pairs of classes.

    Normal scores of one variance have log odds with exactly this slope. It is one for discriminant
    analysis with the true covariance and means.

    Args:
        scores: of C classes.
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


def spread_of(
    directions: Tensor, covariance: LowRank, noise: Tensor, observed: Tensor | None
) -> Tensor:
    """The covariance of the products of new records with directions.

    The covariance of a discriminant is too small along the directions that it gives weight to: it
    takes what does not stand out as alike in all directions, and directions were chosen by it. The
    larger one is taken of the observed covariance along them, and of a usual one.

    Args:
        directions: (J, d).
        covariance: from which they were made, around class means.
        noise: the part of their products with each other, in the metric of that covariance, that is
            noise, along which records vary as along any direction, (J, J).
        observed: the covariance with all its noise, (d, d); None if there is none.

    Returns:
        The covariance (J, J).
    """
    factor, (count, d) = directions @ covariance.factor, directions.shape
    known = covariance.factor.shape[1]
    along = max(1.0, d / (OTHER_DIMENSIONS if known else DIMENSIONS))
    rest = (directions * covariance.variances) @ directions.T - noise
    usual = factor @ factor.T + along * rest + noise
    if observed is None or count < 2:
        return usual
    seen = directions @ observed @ directions.T
    return max(usual, seen, key=_between)


def _between(spread: Tensor) -> float:
    """The sum of the variances of all differences."""
    return float(len(spread) * spread.trace() - spread.sum())
