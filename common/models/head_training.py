"""A linear head trained by Adam and cross-entropy on batches that come in a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from common.config.sections import HeadConfig

Batch = tuple[Tensor, Tensor]


def train_head(
    batches: Iterable[Batch],
    steps: int,
    mean: Tensor,
    variance: Tensor,
    classes: int,
    settings: HeadConfig,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train softmax regression on features standardised by `mean` and `variance` (d,): weight (classes, d), bias (classes,).

    The standardisation is folded into the result, so the scale of the features does not matter. Adam starts from zero
    at `settings.learning_rate` and anneals it to zero over `steps` batches by a cosine. A batch is features and whatever
    `loss` takes beside logits: labels, or class probabilities.
    """
    deviation = variance.sqrt()
    # What is constant but for rounding gets no weight: Adam would make steps of full size out of the rounding.
    constant = deviation <= 1e-6 * torch.maximum(deviation.max(), mean.abs())
    deviation = deviation.masked_fill(constant, torch.inf)
    weight = torch.zeros(classes, len(mean), device=mean.device, requires_grad=True)
    bias = torch.zeros(classes, device=mean.device, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=settings.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    for features, labels in batches:
        # Standardising the weights instead of every batch gives the same logits for a hundredth of the work.
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
    settings: HeadConfig,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train the same head on features (n, d) held in memory, with labels or whatever `loss` takes as targets (n, ...).

    Without a record the head is zero: all classes are alike to it.
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
