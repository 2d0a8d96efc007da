"""Statistics of real records that synthetic records match: gradient of the loss, of each class's
loss, or class means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.fedlap.gradient_matching import matching_slope
from fedsurrogate.common.models.augmentation import Change
from fedsurrogate.common.models.loss_landscape import TOGETHER, LandscapeRecords, gradient, mismatch
from fedsurrogate.common.models.networks import HEAD, embed
from fedsurrogate.common.models.parameters import Tensors

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
