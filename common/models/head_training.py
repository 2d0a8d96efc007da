"""Training of a linear head by Adam and cross-entropy on a stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsurrogate.common.models.optimizers import UncompiledAdam

if TYPE_CHECKING:
    from fedsurrogate.common.settings import HeadSettings

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
    """Train softmax regression on standardised features.

    The standardisation is folded into the result, so the scale of the features has no effect. Adam
    starts from zero weights at `settings.rate(d)`, which a cosine anneals to zero over `steps`
    batches.

    Args:
        batches: features (n, d), and the second argument of `loss`: labels, or class probabilities.
        steps: number of batches.
        mean: by which features are standardised, (d,).
        variance: by which features are standardised, (d,).
        classes: of the head.
        settings: of the training.
        loss: of logits (n, classes) and the second part of a batch.

    Returns:
        Weight (classes, d) and bias (classes,).
    """
    deviation = variance.sqrt()
    # Features that are constant except for rounding get no weight: Adam would turn the rounding
    # into full-size steps.
    constant = deviation <= 1e-6 * torch.maximum(deviation.max(), mean.abs())
    deviation = deviation.masked_fill(constant, torch.inf)
    weight = torch.zeros(classes, len(mean), device=mean.device, requires_grad=True)
    bias = torch.zeros(classes, device=mean.device, requires_grad=True)
    optimiser = UncompiledAdam([weight, bias], lr=settings.rate(len(mean)), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    for features, labels in batches:
        # Standardising the weights instead of every batch gives the same logits with a hundredth of
        # the work.
        scaled = weight / deviation
        logits = torch.addmm(bias - scaled @ mean, features, scaled.T)
        optimiser.zero_grad()
        loss(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    final = (weight / deviation).detach()
    return final, bias.detach() - final @ mean


def shuffled_batches(
    features: Tensor, labels: Tensor, size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """One pass over records in random order.

    Args:
        features: (n, d).
        labels: (n, ...).
        size: records of a batch; the last one may have fewer.
        generator: of the order.
    """
    for rows in torch.split(
        torch.randperm(len(labels), generator=generator).to(labels.device), size
    ):
        yield features[rows], labels[rows]


def train_on_features(
    features: Tensor,
    targets: Tensor,
    classes: int,
    settings: HeadSettings,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Train the same head as `train_head` on features held in memory.

    Args:
        features: (n, d).
        targets: labels, or other targets that `loss` takes, (n, ...).
        classes: of the head.
        settings: of the training.
        seed: of the order of the records.
        loss: of logits (n, classes) and targets.

    Returns:
        Weight (classes, d) and bias (classes,). Without records the head is zero: it gives all
        classes the same score.

    Example:
        >>> from fedsurrogate.common.settings import HeadSettings
        >>> features = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 8)
        >>> labels = torch.tensor([0, 1] * 8)
        >>> weight, bias = train_on_features(features, labels, 2, HeadSettings(), seed=0)
        >>> (features @ weight.T + bias).argmax(1).equal(labels)
        True
    """
    if not len(targets):
        return features.new_zeros(classes, features.shape[1]).float(), features.new_zeros(
            classes
        ).float()
    generator = torch.Generator().manual_seed(seed)
    features = features.float()
    per_pass = -(-len(targets) // settings.batch_size)
    passes = settings.passes(per_pass)
    batches = (
        batch
        for _ in range(passes)
        for batch in shuffled_batches(features, targets, settings.batch_size, generator)
    )
    mean, variance = features.mean(0), features.var(0, correction=0)
    return train_head(batches, passes * per_pass, mean, variance, classes, settings, loss)
