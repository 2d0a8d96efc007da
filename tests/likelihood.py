"""The likelihood of features under mixtures, which tests and benchmarks compare."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.mixtures import Mixtures


def log_likelihood(mixtures: Mixtures, features: Tensor, labels: Tensor) -> float:
    """Mean log-density of features (n, d) under the mixture of their own class (n,), in nats."""
    joint = mixtures.covariance.log_density(features, mixtures.means) + mixtures.weights.log()
    own = labels[:, None] == mixtures.labels
    return float(joint.masked_fill(~own, -torch.inf).logsumexp(1).mean())
