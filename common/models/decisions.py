"""Decisions from class probabilities: ranks, other shares of the classes, and costs of errors."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_rank(chance: Tensor) -> Tensor:
    """The rounded mean of ordered classes: best where errors cost the square of the distance.

    Args:
        chance: probabilities of k classes in their order, (n, k).

    Returns:
        Ranks from zero, (n,), int64.

    Example:
        >>> mean_rank(torch.tensor([[0.5, 0.0, 0.5], [0.1, 0.9, 0.0]])).tolist()
        [1, 1]
    """
    ranks = torch.arange(chance.shape[1], dtype=chance.dtype)
    mean = chance @ ranks / chance.sum(1).clamp_min(1e-300)
    return (mean + 0.5).floor().long().clamp(0, chance.shape[1] - 1)


def median_rank(chance: Tensor) -> Tensor:
    """The median of ordered classes: best where errors cost the distance.

    Args:
        chance: probabilities of k classes in their order, (n, k).

    Returns:
        Ranks from zero, (n,), int64: the first up to which half of the probability lies.

    Example:
        >>> median_rank(torch.tensor([[0.2, 0.2, 0.6], [0.6, 0.2, 0.2]])).tolist()
        [2, 0]
    """
    below = chance.cumsum(1) < 0.5 * chance.sum(1, keepdim=True) * (1 - 1e-12)
    return below.sum(1).clamp_max(chance.shape[1] - 1)


def with_priors(log_odds: Tensor, learned: Tensor, own: Tensor) -> Tensor:
    """Scores of classes for other shares of the classes than the model has learned.

    Args:
        log_odds: scores whose softmax are probabilities, (n, k).
        learned: shares of the classes that the scores assume, (k,).
        own: shares where the model is used, (k,), above zero.

    Returns:
        (n, k).

    Source: Saerens, Latinne & Decaestecker 2002, equation 2.4.

    Example:
        >>> even, own = torch.tensor([0.5, 0.5]), torch.tensor([0.8, 0.2])
        >>> with_priors(torch.zeros(1, 2), even, own).softmax(1).round(decimals=6).tolist()
        [[0.800000011920929, 0.20000000298023224]]
    """
    return log_odds + (own / own.sum()).log() - (learned / learned.sum()).clamp_min(1e-300).log()


def with_prevalence(log_odds: Tensor, learned: Tensor, own: Tensor) -> Tensor:
    """Log odds of labels where they are more or less frequent than the model has learned.

    Args:
        log_odds: (n, L).
        learned: share of positive records that the log odds assume, (L,).
        own: share where the model is used, (L,), between zero and one.

    Returns:
        (n, L).

    Example:
        >>> half, fifth = torch.tensor([0.5]), torch.tensor([0.2])
        >>> round(with_prevalence(torch.zeros(1, 1), half, fifth).sigmoid().item(), 6)
        0.2
    """
    return log_odds + torch.logit(own) - torch.logit(learned)


def least_cost(chance: Tensor, costs: Tensor) -> Tensor:
    """The decision of least expected cost.

    Args:
        chance: probabilities of k classes, (n, k).
        costs: of deciding for a class (columns) where another is true (rows), (k, k).

    Returns:
        Indices of classes, (n,).

    Example:
        A missed disease costs ten times as much as a false alarm.

        >>> least_cost(torch.tensor([[0.8, 0.2]]), torch.tensor([[0.0, 1.0], [10.0, 0.0]])).tolist()
        [1]
    """
    return (chance @ costs.to(chance)).argmin(1)
