"""Probabilities of a head of noisy sums that mean what they say: a slope in closed form.

All scores are multiplied by it, so no decision changes. Shares of classes, of which noisy counts and
other hospitals may say little, then count for as little as they did.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.surrogates.shared_covariances import LowRank
from fedsurrogate.strategies.closed_form.score_slope import Scores
from fedsurrogate.strategies.pooling.class_means import Components

# What a covariance does not hold of how features vary together: records vary along the differences
# of class means as if that variance were one of so many dimensions, if it holds nothing, and if it
# holds the directions that stand out. Exact statistics have 17 to 63, and 20 to 106 (features of
# CIFAR-10 and PACS, pixels of X-rays and digits). With joint noise, a cleaned covariance holds all
# directions; chosen on CIFAR-10.
DIMENSIONS, OTHER_DIMENSIONS, JOINT_DIMENSIONS = 22.0, 66.0, 120.0


def of_classes(scores: Scores, components: Components) -> Scores:
    """The same by class, with the differences between a class's components in the spread.

    Args:
        scores: by component.
        components: of the classes.
    """
    shares = components.records / components.records.sum()
    belongs = one_hot(components.labels, len(components.classes)).to(shares)
    means = (scores.means * shares) @ belongs / (shares @ belongs)
    apart = scores.means - means[:, components.labels]
    return Scores(means, scores.spread + (apart * shares) @ apart.T)


def spread_of(
    directions: Tensor,
    covariance: LowRank,
    noise: Tensor,
    observed: Tensor | None = None,
    joint: bool = False,
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
        joint: whether the covariance was released with one joint noise.

    Returns:
        The covariance (J, J).
    """
    factor, (count, d) = directions @ covariance.factor, directions.shape
    known = covariance.factor.shape[1]
    unknown = OTHER_DIMENSIONS if known else DIMENSIONS
    along = max(1.0, d / (JOINT_DIMENSIONS if joint else unknown))
    rest = (directions * covariance.variances) @ directions.T - noise
    usual = factor @ factor.T + along * rest + noise
    if observed is None or count < 2:
        return usual
    seen = directions @ observed @ directions.T
    return max(usual, seen, key=_between)


def _between(spread: Tensor) -> float:
    """The sum of the variances of all differences."""
    return float(len(spread) * spread.trace() - spread.sum())
