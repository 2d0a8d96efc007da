"""Class means that were released with one joint noise, as they are expected given the noise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.shared_covariances import LowRank
from fedsurrogate.strategies.pooling.class_means import Components

# Powers of the eigenvalues, and ratios of signal to noise, among which the spread of class means is
# chosen.
POWERS = torch.arange(0, 3.5, 0.5, dtype=torch.float64)
RATIOS = torch.linspace(-6, 20, 105, dtype=torch.float64).exp()


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
