"""A covariance that was released with noise, cleaned for use in a linear system."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.shared_covariances import LowRank

# Part of the noise's largest eigenvalue that is added to all variances: directions below the noise
# get small weights. Chosen on the features of benchmarks/secure_sums_head.py, which are in no
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
    values, vectors = torch.linalg.eigh(matrix)
    apart = values[:, None] - values
    width = WIDTH * radius / math.sqrt(d)
    pushed = (apart / (apart.square() + max(width, 1e-12) ** 2)).mean(1)
    back = torch.cummax(values - radius**2 / 2 * pushed, 0).values
    least = max(SMALLEST * float(values.sum()) / d, 1e-9)
    kept = back.clamp_min(least) + RIDGE * radius
    base = float(kept.min())
    return LowRank(vectors * (kept - base).sqrt(), torch.full((d,), base, dtype=torch.float64))
