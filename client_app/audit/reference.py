"""RMIA, the membership attack on heads that needs few reference models."""

from __future__ import annotations

import numpy as np
import torch

from fedsurrogate.client_app.audit.membership import Mask, Matrix, Trials

# A record counts as more likely a member than another one if its ratio is so many times larger.
GAMMA = 2.0
SMALLEST = 1e-12


def rmia(
    own: Matrix, reference: Matrix, others: Matrix, others_reference: Matrix, gamma: float = GAMMA
) -> Matrix:
    """The share of other records that a record beats in the ratio of its probability to the usual.

    Args:
        own: (n,), probability of the record's own class under the attacked model.
        reference: (n,), the mean of it over reference models, half of them trained with the record.
        others: (m,), as `own`, of records of the population.
        others_reference: (m,), as `reference`, of records of the population.
        gamma: a record counts as more likely a member than another one if its ratio is so many
            times larger.

    Returns:
        Scores (n,) in [0, 1].

    Source: Zarifzadeh, Liu & Shokri 2024, "Low-Cost High-Power Membership Inference Attacks",
    equations 5 and 9.
    """
    ratio, usual = (
        own / np.maximum(reference, SMALLEST),
        others / np.maximum(others_reference, SMALLEST),
    )
    sorted_others = np.sort(usual)
    beaten = np.searchsorted(sorted_others, ratio / gamma, side="right") / max(
        1, len(sorted_others)
    )
    # The share is a step function of the ratio; the ratio itself decides between equal shares.
    return np.asarray(beaten * (1 - 1e-6) + 1e-6 * ratio / (1 + ratio))


def rmia_of(trials: Trials, gamma: float = GAMMA) -> Matrix:
    """Scores of heads.

    The other releases are the references. The population are all records of the site: the attacker
    knows them, but not which half is in the attacked release.

    Args:
        trials: their scores are log-odds of the right class.
        gamma: see `rmia`.

    Returns:
        Scores (K, n) in [0, 1].
    """
    probabilities: Matrix = torch.from_numpy(trials.scores).sigmoid().numpy()
    scores = []
    for at in range(len(probabilities)):
        # A release and its complement have the same coin tosses, so the complement is no reference.
        rest = np.array([row for row in range(len(probabilities)) if row // 2 != at // 2])
        usual = _balanced(probabilities[rest], trials.members[rest])
        scores.append(rmia(probabilities[at], usual, probabilities[at], usual, gamma))
    return np.stack(scores)


def _balanced(probabilities: Matrix, members: Mask) -> Matrix:
    """The mean over models with the record and without it, each half (equation 9)."""
    means = [
        np.where(mask, probabilities, 0).sum(0) / np.maximum(mask.sum(0), 1)
        for mask in (members, ~members)
    ]
    return np.asarray((means[0] + means[1]) / 2)
