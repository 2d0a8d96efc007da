"""Combine heads that sites have trained alone into one model. No Flower types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import Ensemble, Head, class_indices
from fedsurrogate.common.models.head_training import train_on_features
from fedsurrogate.common.models.parameters import Parameters, average
from fedsurrogate.common.settings import Settings
from fedsurrogate.strategies.pooling.robust_centres import POOLED, robust_tensors

# The logit of a class that a head was not trained on: far below all others, and within half
# precision.
UNKNOWN = -1e4
# Allowed distance of a site's moments from the other sites', in median deviations.
MOST = 6.0


def average_head(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Head:
    """The mean of the sites' heads, weighted by records; with a defence of that name, their median
    or trimmed mean.

    Args:
        updates: weight (C_k, d) and bias (C_k,) of each site, for its own classes.
        classes: of the model, C.
        settings: of the run; not used.
        defence: of the run, with "auto" resolved.
    """
    return _mean(updates, _aligned(updates, classes), defence)


def ensemble(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Ensemble:
    """The heads of all sites, whose probabilities are averaged.

    Args:
        updates: as in `average_head`.
        classes: as in `average_head`.
        settings: not used.
        defence: not used.
    """
    return Ensemble(tuple(_aligned(updates, classes)))


def highest_ensemble(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Ensemble:
    """The heads of all sites, of which the highest probability counts.

    Args:
        updates: as in `average_head`.
        classes: as in `average_head`.
        settings: not used.
        defence: not used.
    """
    return replace(ensemble(updates, classes, settings, defence), highest=True)


def fedbe_head(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Head:
    """A head distilled on synthetic features from both kinds of mean.

    Args:
        updates: as in `average_head`, and the mean and the deviation of each site's features, (d,);
            the synthetic features come from these.
        classes: as in `average_head`.
        settings: for the synthetic features and the training on them.
        defence: as in `average_head`.
    """
    heads = _aligned(updates, classes)
    features = _drawn(updates, settings.baseline.synthetic, settings.seed)
    mean = _mean(updates, heads, defence)
    weights = [float(update.records) for update in updates]
    wanted = fedbe(features, heads, mean, weights, settings.baseline.samples, settings.seed)
    trained = train_on_features(features, wanted, len(classes), settings.head, settings.seed)
    return Head(mean.header, *trained)


def fedkt_head(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Head:
    """A head distilled on synthetic features from votes.

    Args:
        updates: as in `fedbe_head`.
        classes: as in `average_head`.
        settings: as in `fedbe_head`.
        defence: not used.
    """
    heads = _aligned(updates, classes)
    features = _drawn(updates, settings.baseline.synthetic, settings.seed)
    wanted = fedkt(features, heads, len(classes))
    trained = train_on_features(features, wanted, len(classes), settings.head, settings.seed)
    return Head(heads[0].header, *trained)


def fedbe(
    features: Tensor,
    heads: Sequence[Head],
    mean: Head,
    weights: Sequence[float],
    samples: int,
    seed: int,
) -> Tensor:
    """Mean probabilities of the sites' heads, their average, and heads sampled from a Gaussian
    around the average.

    Args:
        features: (n, d), in the frame of the heads.
        heads: of the sites, with a row for every class of the run.
        mean: the average of the heads.
        weights: of the heads, in records.
        samples: number of heads that are sampled.
        seed: of the samples.

    Returns:
        (n, C).

    Source: FedBE (Chen & Chao 2021), with a diagonal Gaussian.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.cat([head.weight, head.bias[:, None]], 1) for head in _filled(heads)]
    share = torch.tensor(weights) / sum(weights)
    centre = torch.cat([mean.weight, mean.bias[:, None]], 1)
    spread = sum(
        (w * (t - centre).square() for w, t in zip(share, tables, strict=True)),
        torch.zeros_like(centre),
    ).sqrt()
    tables += [centre] + [
        centre + spread * torch.randn(centre.shape, generator=generator) for _ in range(samples)
    ]
    total = sum((features @ t[:, :-1].T + t[:, -1]).softmax(1) for t in tables)
    assert isinstance(total, Tensor)  # the average is always among them
    return total / len(tables)


def fedkt(features: Tensor, heads: Sequence[Head], classes: int) -> Tensor:
    """The majority vote of the sites' heads on each feature, as probabilities of zero and one.

    Args:
        features: (n, d), in the frame of the heads.
        heads: of the sites, with a row for every class of the run.
        classes: their number, C.

    Returns:
        (n, C).

    Source: FedKT (Li et al. 2021).

    Example:
        >>> from fedsurrogate.common.surrogates.surrogates import Header
        >>> header = Header("fedkt", "0" * 16, "coordinator", "", ("a", "b"))
        >>> weight = torch.tensor([[0.0], [1.0]])
        >>> heads = [Head(header, weight, torch.tensor([bias, 0.0])) for bias in (1.0, 2.0, 5.0)]
        >>> fedkt(torch.tensor([[0.0], [3.0]]), heads, 2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    votes = torch.zeros(len(features), classes)
    for head in heads:
        logits = head.scores_of_prepared(features)
        votes[torch.arange(len(features)), logits.argmax(1)] += 1
    return torch.nn.functional.one_hot(votes.argmax(1), votes.shape[1]).float()


def _aligned(updates: Sequence[Parameters], classes: tuple[str, ...]) -> list[Head]:
    """The sites' heads, each with a row for every class of the run."""
    first = updates[0].header
    header = replace(first, site="coordinator", classes=classes)
    heads = []
    for update in updates:
        own = update.tensors["weight"]
        weight = torch.zeros(len(classes), own.shape[1])
        bias = torch.full((len(classes),), UNKNOWN)
        rows = class_indices(classes, update.header.classes)
        weight[rows[rows >= 0]] = own[rows >= 0]
        bias[rows[rows >= 0]] = update.tensors["bias"][rows >= 0]
        heads.append(Head(header, weight, bias))
    return heads


def _mean(updates: Sequence[Parameters], heads: Sequence[Head], defence: str) -> Head:
    """The mean of aligned heads, by the rule of a defence."""
    tables = [{"weight": head.weight, "bias": head.bias} for head in _filled(heads)]
    if defence in POOLED:
        middle = robust_tensors(tables, defence)
    else:
        middle = average(tables, [float(update.records) for update in updates])
    return Head(heads[0].header, middle["weight"], middle["bias"])


def _filled(heads: Sequence[Head]) -> list[Head]:
    """Heads for parameter averages: an unknown class gets the head's lowest bias instead of
    UNKNOWN.
    """
    filled = []
    for head in heads:
        known = head.bias > UNKNOWN
        lowest = float(head.bias[known].min()) if known.any() else 0.0
        filled.append(Head(head.header, head.weight, torch.where(known, head.bias, lowest)))
    return filled


def _drawn(updates: Sequence[Parameters], number: int, seed: int) -> Tensor:
    """About so many unlabelled features (n, d), drawn around every site's mean, in proportion to its
    records.

    No mean is farther from the sites' coordinate median, and no deviation is larger, than MOST median
    deviations. Otherwise one site could decide the scale of all features.
    """
    means, deviations = (
        torch.stack([update.tensors[name] for update in updates]) for name in ("mean", "deviation")
    )
    if len(updates) >= 3:
        middle, wide = means.median(0).values, MOST * deviations.median(0).values
        means, deviations = means.clamp(middle - wide, middle + wide), deviations.clamp(-wide, wide)
    generator, total = (
        torch.Generator().manual_seed(seed),
        sum(update.records for update in updates),
    )
    drawn = []
    for update, mean, deviation in zip(updates, means, deviations, strict=True):
        count = max(1, round(number * update.records / total))
        drawn.append(mean + deviation * torch.randn(count, len(mean), generator=generator))
    return torch.cat(drawn)
