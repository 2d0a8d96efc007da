"""Statistics of real records that synthetic records match: gradient of the loss, of each class's
loss, or class means; their mismatch and its derivative; and the effective radius, the distance from the
model within which synthetic records approximate the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsurrogate.common.models.loss_landscape import (
    TOGETHER,
    Descent,
    LandscapeRecords,
    distance,
    gradient,
    loss,
    mismatch,
    total_loss,
    walk,
)
from fedsurrogate.common.models.networks import HEAD, embed
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.models.training_parts import Change

# With this factor the default learning rate of images, which suits gradients, also suits means.
SCALE = 0.1


@dataclass(frozen=True)
class Statistic:
    """What is matched.

    Attributes:
        real: of a site's records, by name.
        slope: its mismatch with the same of synthetic records, and the derivative of the mismatch
            by their values (n, ...); takes the network, its parameters, the synthetic records and
            their change, the real statistic, the weight of the squared error, and the noise in the
            real statistic.
        by_class: whether a batch has `batch-size` records of each class, not of all classes
            together.
    """

    real: Callable[[nn.Module, Tensors, LandscapeRecords, Change], dict[str, Tensor]]
    slope: Callable[
        [nn.Module, Tensors, LandscapeRecords, Change, Sequence[Tensor], float, float],
        tuple[float, Tensor],
    ]
    by_class: bool = False


def gradient_slope(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    real: Sequence[Tensor],
    mse_weight: float,
    noise: float,
) -> tuple[float, Tensor]:
    """`Statistic.slope` of the gradient of the loss."""
    return matching_slope(
        body, parameters, [records], change, lambda mine: mismatch(mine, real, mse_weight, noise)
    )


def class_gradient_slope(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    real: Sequence[Tensor],
    mse_weight: float,
    noise: float,
) -> tuple[float, Tensor]:
    """`Statistic.slope` of the gradients of each class.

    The mismatch is divided by the number of tensors. Without that, the steps of the images would
    grow with the classes.

    Source: Zhao et al. 2021, algorithm 1, which matches by class.
    """
    sets = [own for _, own in classes_of(records)]
    difference, slope = matching_slope(
        body,
        parameters,
        sets,
        change,
        lambda mine: mismatch(mine, real, mse_weight, noise) / len(mine),
    )
    return difference, slope[records.labels.argsort(stable=True).argsort()]


def class_mean_slope(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    real: Sequence[Tensor],
    mse_weight: float,
    noise: float,
) -> tuple[float, Tensor]:
    """`Statistic.slope` of the means of each class: the mean squared distance over the means, times
    `SCALE`.

    Source: Xiong et al. 2023, equation 4, which sums over the classes.
    """
    values = records.values.detach().requires_grad_()
    mine = class_means(
        body, parameters, LandscapeRecords(change(values), records.labels, records.weights)
    )
    wrong = (
        SCALE
        * torch.stack([(a - b).square().sum() for a, b in zip(mine, real, strict=True)]).mean()
    )
    return float(wrong.detach()), torch.autograd.grad(wrong, [values])[0]


def classes_of(records: LandscapeRecords) -> Iterator[tuple[int, LandscapeRecords]]:
    """The records of each class in rising order, with equal weights."""
    for label in torch.unique(records.labels).tolist():
        yield label, records.take((records.labels == label).nonzero().squeeze(1))


def real_class_gradients(
    body: nn.Module, parameters: Tensors, records: LandscapeRecords, change: Change
) -> dict[str, Tensor]:
    """Gradients of each class's loss.

    Args:
        body: the network.
        parameters: where the gradients are taken, by name.
        records: of the site.
        change: their augmentation.

    Returns:
        Gradients by class and parameter.
    """
    return {
        f"{label} {name}": part
        for label, own in classes_of(records)
        for name, part in gradient(body, parameters, own, change).items()
    }


def class_means(body: nn.Module, parameters: Tensors, records: LandscapeRecords) -> list[Tensor]:
    """For each class, means of the inputs of the network's head and of its logits.

    Args:
        body: the network.
        parameters: by name.
        records: at least one of each class.

    Returns:
        Means (width,) and (C,) in turn, by class in rising order.

    Source: Xiong et al. 2023, equation 4.
    """
    means = []
    for _, own in classes_of(records):
        inputs, logits = _outputs(body, parameters, own.values)
        means += [inputs.mean(0), logits.mean(0)]
    return means


def real_class_means(
    body: nn.Module, parameters: Tensors, records: LandscapeRecords, change: Change
) -> dict[str, Tensor]:
    """The means of `class_means`, a thousand records at a time.

    Args:
        body: the network.
        parameters: by name.
        records: of the site.
        change: their augmentation.

    Returns:
        Means (width,) and (C,) by class and name.
    """
    means: dict[str, Tensor] = {}
    with torch.no_grad():
        for label, own in classes_of(records):
            parts = [
                _outputs(body, parameters, change(part))
                for part in torch.split(own.values, TOGETHER)
            ]
            for name, outputs in zip(("inputs", "logits"), zip(*parts, strict=True), strict=True):
                means[f"{label} {name}"] = torch.cat(outputs).mean(0)
    return means


def _outputs(body: nn.Module, parameters: Tensors, values: Tensor) -> tuple[Tensor, Tensor]:
    inputs = embed(body, parameters, values)
    prefix = HEAD if isinstance(body, nn.Sequential) else ""
    return inputs, torch.nn.functional.linear(
        inputs, parameters[prefix + "weight"], parameters[prefix + "bias"]
    )


GRADIENT = Statistic(gradient, gradient_slope)
CLASS_GRADIENTS = Statistic(real_class_gradients, class_gradient_slope, by_class=True)
CLASS_MEANS = Statistic(real_class_means, class_mean_slope, by_class=True)


class Batches:
    """A statistic, without noise, of random batches of a site's records.

    Args:
        body: the network.
        records: of the site.
        size: records in a batch, or of each class in it; zero: all records.
        generator: of the batches.
        statistic: which one.
    """

    noise = 0.0

    def __init__(
        self,
        body: nn.Module,
        records: LandscapeRecords,
        size: int,
        generator: torch.Generator,
        statistic: Statistic = GRADIENT,
    ) -> None:
        self._body, self._records, self._size, self._generator = body, records, size, generator
        self._statistic = statistic

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """The statistic of one batch, by name."""
        return self._statistic.real(self._body, parameters, self._batch(), change)

    def _batch(self) -> LandscapeRecords:
        records = self._records
        if not self._size:
            return records
        if not self._statistic.by_class:
            return self._sample(records)
        parts = [self._sample(own) for _, own in classes_of(records)]
        return LandscapeRecords.pool(parts, [len(part.labels) for part in parts])

    def _sample(self, records: LandscapeRecords) -> LandscapeRecords:
        count = len(records.labels)
        if self._size >= count:
            return records
        return records.take(
            torch.randperm(count, generator=self._generator)[: self._size].to(records.labels.device)
        )


# Length of a move of the model, as a share of one plus its norm. Longer moves bend; shorter ones
# lose digits of 32 bits.
MOVE = 1e-3

Difference = Callable[[Sequence[Tensor]], Tensor]


def matching_slope(
    body: nn.Module,
    parameters: Tensors,
    sets: Sequence[LandscapeRecords],
    change: Change,
    difference: Difference,
) -> tuple[float, Tensor]:
    """The difference between gradients of synthetic records and a target, and its derivative by
    their values.

    Let v be the derivative of the difference by a gradient. The derivative by the values is that of
    v · ∇L: the rate at which the derivative of L by the values changes as the model moves along v
    (Pearlmutter 1994). So two plain backward passes serve in place of one through another, which
    for GroupNorm and pooling costs more than twice as much. Each unit of ReLU stays as it is during
    the move, as in the exact derivative. The error is below a hundredth of its length.

    Args:
        body: the network.
        parameters: of the model, by name.
        sets: records with one gradient each: all together, or those of one class.
        change: augmentation of the values.
        difference: takes the gradients of all sets, parameter by parameter; differentiable.

    Returns:
        The difference, and its derivative (n, ...) by the values of all sets.

    Source: Pearlmutter 1994.
    """
    model = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    size = 1 + _norm(parameters.values())
    gradients: list[Tensor] = []
    befores, holds = [], []
    for records in sets:
        with _held_units(body) as units:
            *mine, before = _slopes(body, model, records, change, list(model.values()))
        gradients += mine
        befores.append(before)
        holds.append(units)
    for part in gradients:
        part.requires_grad_()
    wrong = difference(gradients)
    directions = torch.autograd.grad(wrong, gradients)
    slopes = []
    for index, (records, before, units) in enumerate(zip(sets, befores, holds, strict=True)):
        along = directions[index * len(model) : (index + 1) * len(model)]
        far = MOVE * size / _norm(along).clamp_min(1e-30)
        moved = {
            name: tensor + far * by
            for (name, tensor), by in zip(parameters.items(), along, strict=True)
        }
        with _held_units(body, units):
            (after,) = _slopes(body, moved, records, change, [])
        slopes.append((after - before) / far)
    return float(wrong.detach()), torch.cat(slopes)


def _slopes(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    asked: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Derivatives of the loss by the parameters `asked`, and by the values before their change."""
    values = records.values.detach().requires_grad_()
    total = loss(
        body, parameters, LandscapeRecords(change(values), records.labels, records.weights)
    )
    return torch.autograd.grad(total, [*asked, values])


@contextmanager
def _held_units(
    body: nn.Module, units: dict[nn.Module, Tensor] | None = None
) -> Iterator[dict[nn.Module, Tensor]]:
    """Record which units of each ReLU pass their inputs on; with `units`, these do, whatever their
    inputs.
    """
    kept: dict[nn.Module, Tensor] = {} if units is None else units

    def hold(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if units is not None:
            return inputs[0] * units[layer]  # type: ignore[no-any-return]
        kept[layer] = (output > 0).to(output)
        return None

    handles = [
        layer.register_forward_hook(hold) for layer in body.modules() if isinstance(layer, nn.ReLU)
    ]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.detach().square().sum() for tensor in tensors]).sum().sqrt()


# The search may use this share of the forward passes of the synthesis: a tenth of its time, with a
# margin.
SHARE = 0.07
# Real records in an evaluation; number of evaluations without a smaller loss after which the search
# stops.
SUBSET, PATIENCE = 128, 4
# Costs of one step in forward passes of its records. Image step: forward and backward, twice
# (benchmarks/fedlap_cost.py).
IMAGE_STEP, MODEL_STEP = 7, 3


@dataclass(frozen=True)
class Search:
    """Length of a search.

    Attributes:
        steps: number of steps of the walk.
        every: number of steps between two evaluations.
    """

    steps: int
    every: int = 1

    @classmethod
    def within(cls, work: float, synthetic: int, real: int, most: int) -> Search:
        """The search that the allowed part of the synthesis pays for.

        Half is spent on the walk, half on evaluations.

        Args:
            work: of the synthesis, in forward passes of a record.
            synthetic: number of synthetic records.
            real: number of real records.
            most: steps at most.
        """
        half = SHARE * work / 2
        steps = max(4, min(most, int(half / (MODEL_STEP * synthetic))))
        evaluations = max(4, int(half / min(real, SUBSET)))
        return cls(steps, max(1, -(-steps // evaluations)))


@dataclass(frozen=True)
class ServerWalk:
    """The coordinator's gradient descent.

    Attributes:
        body: the network without its fixed first step.
        start: its parameters at the start.
        descent: its steps.
        changes: the augmentation of each step.
    """

    body: nn.Module
    start: Tensors
    descent: Descent
    changes: Iterator[Change]

    def along(self, records: LandscapeRecords) -> Iterator[Tensors]:
        """The parameters after every step of descent on the loss of `records`."""
        path = walk(self.body, self.start, records, self.descent, self.changes)
        return (parameters for parameters, _ in path)


def effective_radius(
    server: ServerWalk,
    synthetic: LandscapeRecords,
    real: LandscapeRecords,
    search: Search,
    generator: torch.Generator,
) -> float:
    """Distance that gradient descent on synthetic records has covered where the loss of real ones
    is smallest.

    The search takes the first `search.steps` steps of the coordinator's walk. If the loss still
    falls at the last step, there is no turning point; the result is then the trust radius, or the
    distance itself if the descent is plain.

    Args:
        server: the coordinator's walk.
        synthetic: records that the walk descends on.
        real: records of the site.
        search: its length.
        generator: draws the real records that are evaluated.

    Returns:
        The distance, at most the trust radius.

    Source: FedLAP-DP, figure 2. Differs from the paper: the loss is evaluated every few steps on at
    most 128 real records, and the search stops after four evaluations without a smaller loss. The
    paper's code makes a hundred passes over all records, more than half of a round.
    """
    rows = torch.randperm(len(real.labels), generator=generator)[:SUBSET].to(real.labels.device)
    seen = real.take(rows)
    best, best_step, covered, last = float("inf"), 0, 0.0, 0
    for step, here in enumerate(server.along(synthetic), 1):
        if step % search.every == 0 or step == search.steps:
            last, now = step, total_loss(server.body, here, seen)
            if now < best:
                best, best_step, covered = now, step, distance(here, server.start)
            elif step - best_step >= PATIENCE * search.every:
                break
        if step >= search.steps:
            break
    most = server.descent.radius
    if (best_step == last and not server.descent.plain) or not covered > 0:
        return most
    return min(covered, most)
