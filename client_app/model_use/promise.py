"""Whether a model is as good for this site as the sites' shared surrogate promises.

FedPFT's theorem 6.1 (Beitollahi et al. 2024) bounds a site's loss l by the loss l' of the model on
the shared surrogate plus the distance of the two distributions: l <= l' + TV. As published, the
distance is computed from the entropy of the features and the likelihood of the surrogate, through
Pinsker's inequality: with hundreds of dimensions it exceeds one, and the bound says nothing. Here
it is computed where the loss is decided:

- over the C decisions, by class: l = sum over classes of the share of the class times (l' of the
  class + the rise in error), and the rise is at most TV of the decisions. Shares of classes are the
  site's own, so another mix of classes is no harm;
- over the C - 1 differences of the logits, with Bretagnolle and Huber's inequality TV <= sqrt(1 -
  exp(-KL)), which never exceeds one, in place of Pinsker's. KL of two normal distributions: own
  logits are taken as normal.

Both are for the 0-1 loss. The first is a statement on these records, the second on the distribution
that they come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.signed_models.gaussians import Gaussians

SAMPLES = 20_000
# Records of a class, for each number of a logit's covariance, below which its normal distribution
# is not estimated.
RECORDS_A_NUMBER = 3


@dataclass(frozen=True)
class Promise:
    """The error (share of wrong decisions) of a model on the surrogate, with this site's shares of
    classes, and here.

    Attributes:
        promised: on the surrogate.
        error: here.
        low: lower limit of `error`, Clopper and Pearson's at 95 %.
        high: upper limit of `error`.
        distance: TV of the decisions.
        bound: promised + distance, at least `error`.
        theorem: the bound of theorem 6.1 over the logits; None with too few records.
        kept: whether the error may be as low as promised, by its limits.
        classes: (name, promised, error) of each class with records.
    """

    promised: float
    error: float
    low: float
    high: float
    distance: float
    bound: float
    theorem: float | None
    kept: bool
    classes: tuple[tuple[str, float, float], ...]


def check_promise(
    classifier: Classifier, gaussians: Gaussians | None, features: Tensor, labels: Tensor
) -> Promise | None:
    """Compare the error of a linear head on the surrogate's Gaussians with its error on own
    records.

    Args:
        classifier: the shared model.
        gaussians: of the surrogate; None for a model without.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        The comparison; None without Gaussians of every class, for other models, or without records.

    Source: FedPFT, theorem 6.1 (Beitollahi et al. 2024), see the text of this module.
    """
    from scipy.stats import binomtest

    names = classifier.header.classes
    if (
        not isinstance(classifier, Head)
        or gaussians is None
        or len(gaussians.means) != len(names)
        or not len(labels)
    ):
        return None
    with torch.no_grad():
        own = classifier.scores(features).double()
    means, covariance = _logits(classifier, gaussians)
    promised = torch.stack([_decisions(mean, covariance) for mean in means])
    sizes = torch.bincount(labels, minlength=len(names)).double()
    decisions = torch.zeros_like(promised)
    decisions.index_put_(
        (labels, own.argmax(1)), torch.ones(len(labels), dtype=torch.float64), accumulate=True
    )
    kept = (sizes > 0).nonzero().flatten()
    shares, here = sizes[kept] / sizes.sum(), decisions[kept] / sizes[kept, None]
    expected, error = 1 - promised[kept, kept], 1 - here[torch.arange(len(kept)), kept]
    distances = (here - promised[kept]).abs().sum(1) / 2
    wrong = float((shares * error).sum())
    limits_here = binomtest(round(wrong * len(labels)), len(labels)).proportion_ci(method="exact")
    low, high = float(limits_here.low), float(limits_here.high)
    total, distance = float((shares * expected).sum()), float((shares * distances).sum())
    divergences = [
        _bretagnolle_huber(own[labels == c], means[c], covariance) for c in kept.tolist()
    ]
    theorem = None
    if all(each is not None for each in divergences):
        limits = torch.tensor([each or 0.0 for each in divergences], dtype=torch.float64)
        theorem = float((shares * (expected + limits).clamp_max(1)).sum())
    rows = tuple(
        (names[c], float(p), float(e))
        for c, p, e in zip(kept.tolist(), expected.tolist(), error.tolist(), strict=True)
    )
    return Promise(
        total, wrong, low, high, distance, min(1.0, total + distance), theorem, low <= total, rows
    )


def _logits(head: Head, gaussians: Gaussians) -> tuple[Tensor, Tensor]:
    """Means (C, C) and covariance (C, C) of the logits of the surrogate's Gaussians."""
    weight, within = head.weight.double(), gaussians.within
    across = weight @ within.directions.double().T
    rest = float(within.rest)
    spread = (within.variances.double() - rest) * across
    # The Gaussians are of features that the head has prepared.
    means = head.scores_of_prepared(gaussians.means.double())
    return means, spread @ across.T + rest * weight @ weight.T


def _decisions(mean: Tensor, covariance: Tensor) -> Tensor:
    """Share of each decision (C,) for normal logits."""
    values, vectors = torch.linalg.eigh(covariance)
    # The same draws for every class and at every call.
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(SAMPLES, len(mean), generator=generator, dtype=torch.float64)
    logits = mean + (draws * values.clamp_min(0).sqrt()) @ vectors.T
    return torch.bincount(logits.argmax(1), minlength=len(mean)).double() / SAMPLES


def _bretagnolle_huber(own: Tensor, mean: Tensor, covariance: Tensor) -> float | None:
    """Bound of TV between own logits (n, C), taken as normal, and the surrogate's; None with too
    few records.
    """
    base = torch.cat([-torch.ones(len(mean) - 1, 1), torch.eye(len(mean) - 1)], 1).double()
    k = len(base)
    if len(own) <= RECORDS_A_NUMBER * k * (k + 3) / 2:
        return None
    points = own @ base.T
    first = torch.cov(points.T).reshape(k, k)
    second, shift = base @ covariance @ base.T, base @ mean - points.mean(0)
    if not float(torch.linalg.det(first)) > 0 or not float(torch.linalg.det(second)) > 0:
        return None
    solved = torch.linalg.solve(second, torch.cat([first, shift[:, None]], 1))
    divergence = (
        float(
            solved[:, :k].trace()
            + shift @ solved[:, k]
            - k
            + torch.logdet(second)
            - torch.logdet(first)
        )
        / 2
    )
    return math.sqrt(1 - math.exp(-max(0.0, divergence)))
