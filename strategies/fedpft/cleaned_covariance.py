"""A covariance and class means that were released with one joint noise, cleaned for use in a
discriminant.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from common.surrogates.shared_covariances import LowRank
from strategies.pooling.class_means import Components

# Part of the noise's largest eigenvalue that is added to all variances: directions below the noise
# get small weights. Chosen on the features of benchmarks/secure_sums_head.py, which are in no
# table.
RIDGE = 0.15
# Lower bound of a variance, as a part of the mean variance.
SMALLEST = 0.2
# Powers of the eigenvalues, and ratios of signal to noise, among which the spread of class means is
# chosen.
POWERS = torch.arange(0, 3.5, 0.5, dtype=torch.float64)
RATIOS = torch.linspace(-6, 20, 105, dtype=torch.float64).exp()
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
    values, vectors = torch.linalg.eigh(matrix)
    apart = values[:, None] - values
    width = WIDTH * radius / math.sqrt(d)
    pushed = (apart / (apart.square() + max(width, 1e-12) ** 2)).mean(1)
    back = torch.cummax(values - radius**2 / 2 * pushed, 0).values
    least = max(SMALLEST * float(values.sum()) / d, 1e-9)
    kept = back.clamp_min(least) + RIDGE * radius
    base = float(kept.min())
    return LowRank(vectors * (kept - base).sqrt(), torch.full((d,), base, dtype=torch.float64))


def expected(components: Components, covariance: LowRank) -> tuple[Components, LowRank]:
    """The class means as they are expected given the noise, and the covariance of a new record
    around them.

    The true means are taken as normal around their pooled mean, with a variance in the direction of
    each eigenvector of the covariance that is a multiple of a power of its eigenvalue. Both are
    those of the largest likelihood under the known noise (empirical Bayes). What stays uncertain
    about the means adds to the covariance, so their noise needs no other correction and becomes
    zero.

    Args:
        components: noisy class means, one per class.
        covariance: within classes.

    Returns:
        Both as they are expected. With fewer than two classes nothing is changed.
    """
    if len(components.means) < 2:
        return components, covariance
    matrix = covariance.factor @ covariance.factor.T + covariance.variances.diag()
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(1e-12)
    shares = components.records / components.records.sum()
    centre = shares @ components.means
    apart, noise = (components.means - centre) @ vectors, components.noise.diagonal()
    spread = _spread(apart.square().sum(0) / (len(apart) - 1), values, float(shares @ noise))
    kept = spread / (spread + noise[:, None])
    means = centre + (kept * apart) @ vectors.T
    total = values + shares @ (kept * noise[:, None])
    base = float(total.min())
    uncertain = LowRank(vectors * (total - base).clamp_min(0).sqrt(), torch.full_like(values, base))
    return replace(components, means=means, noise=torch.zeros_like(components.noise)), uncertain


def _spread(noisy: Tensor, values: Tensor, noise: float) -> Tensor:
    """Variance (d,) of the true means by direction, from `noisy`, that of the noisy ones (d,), by
    largest likelihood.
    """
    shapes = (values / values.mean()) ** POWERS[:, None]
    shapes = shapes / shapes.mean(1, keepdim=True)
    whole = noise * (1 + RATIOS[:, None, None] * shapes)
    best = int((whole.log() + noisy / whole).sum(2).argmin())
    return whole.flatten(0, 1)[best] - noise
