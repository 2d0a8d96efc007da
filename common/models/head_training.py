"""Training of a linear head by Adam and cross-entropy on a stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from common.settings import HeadSettings


Batch = tuple[Tensor, Tensor]


def train_head(
    batches: Iterable[Batch],
    steps: int,
    mean: Tensor,
    variance: Tensor,
    classes: int,
    settings: HeadSettings,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train softmax regression on features standardised by `mean` and `variance` (d,): weight (classes, d), bias (classes,).

    The standardisation is folded into the result, so the scale of the features has no effect. Adam starts from zero weights
    at `settings.learning_rate`, which a cosine anneals to zero over `steps` batches. A batch is features and the second
    argument of `loss`: labels, or class probabilities.
    """
    deviation = variance.sqrt()
    # Features that are constant except for rounding get no weight: Adam would turn the rounding into full-size steps.
    constant = deviation <= 1e-6 * torch.maximum(deviation.max(), mean.abs())
    deviation = deviation.masked_fill(constant, torch.inf)
    weight = torch.zeros(classes, len(mean), device=mean.device, requires_grad=True)
    bias = torch.zeros(classes, device=mean.device, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=settings.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    for features, labels in batches:
        # Standardising the weights instead of every batch gives the same logits with a hundredth of the work.
        scaled = weight / deviation
        logits = torch.addmm(bias - scaled @ mean, features, scaled.T)
        optimiser.zero_grad()
        loss(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    final = (weight / deviation).detach()
    return final, bias.detach() - final @ mean


def shuffled_batches(features: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """One pass over (n, d) features in random order."""
    for rows in torch.split(torch.randperm(len(labels), generator=generator).to(labels.device), size):
        yield features[rows], labels[rows]


def train_on_features(
    features: Tensor,
    targets: Tensor,
    classes: int,
    settings: HeadSettings,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train the same head on features (n, d) held in memory, with labels or other targets (n, ...) that `loss` takes.

    Without records the head is zero: it gives all classes the same score.
    """
    if not len(targets):
        return features.new_zeros(classes, features.shape[1]).float(), features.new_zeros(classes).float()
    generator = torch.Generator().manual_seed(seed)
    features = features.float()
    per_pass = -(-len(targets) // settings.batch_size)
    passes = settings.passes(per_pass)
    batches = (batch for _ in range(passes) for batch in shuffled_batches(features, targets, settings.batch_size, generator))
    mean, variance = features.mean(0), features.var(0, correction=0)
    return train_head(batches, passes * per_pass, mean, variance, classes, settings, loss)
