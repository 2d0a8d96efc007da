"""Synthesis of records that match a statistic of a site's real records, in FedLAP the gradient of
the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from fedsurrogate.common.models.loss_landscape import LandscapeRecords, distance, gradient
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.models.training_parts import Change, UncompiledSGD

from .statistics import GRADIENT, Statistic

if TYPE_CHECKING:
    from fedsurrogate.common.settings import FedLAPSettings

# Of the steps of the images.
MOMENTUM = 0.5


class RealStatistic(Protocol):
    """A statistic of a site's real records, such as their gradient: of all, of a batch, or private.

    Attributes:
        noise: standard deviation of it in every entry.
    """

    noise: float

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """One evaluation of the statistic."""


@dataclass(frozen=True)
class Matching:
    """Settings of the synthesis in a round.

    Attributes:
        settings: of the run.
        rate: learning rate of the model along a trajectory.
        mse_weight: weight of the squared error in the mismatch (see
            `fedsurrogate.common.models.loss_landscape.mismatch`).
        statistic: what is matched.
        start: where the next trajectory begins, given the received model; FedLAP begins there
            itself.
    """

    settings: FedLAPSettings
    rate: float
    mse_weight: float
    statistic: Statistic = GRADIENT
    start: Callable[[Tensors], Tensors] = dict


@dataclass
class Synthesis:
    """Record of a synthesis.

    Attributes:
        first: first mismatch.
        last: last mismatch.
        looks: evaluations of the real statistic.
        seconds: for each part.
    """

    first: float = float("nan")
    last: float = float("nan")
    looks: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"real-gradients": 0.0, "image-steps": 0.0}
    )


def synthesise(
    body: nn.Module,
    model: Tensors,
    begin: LandscapeRecords,
    real: RealStatistic,
    matching: Matching,
    changes: Iterator[Change],
) -> tuple[LandscapeRecords, Synthesis]:
    """Optimise synthetic records so that their statistic, such as the gradient, matches the real
    one.

    Values are optimised along trajectories that start at `model`. Labels do not change.

    Args:
        body: the network.
        model: its parameters, by name.
        begin: the first synthetic records.
        real: statistic of the real records.
        matching: settings of the round.
        changes: augmentations, one for each evaluation of the real statistic and each step of the
            model.

    Returns:
        The synthetic records, and the record of the synthesis.

    Source: FedLAP-DP, algorithm 1 (algorithm 3 with a private `real`). Differs from the paper: the
    number of batches in a loop is a setting; the paper's algorithm omits them, but its accounting
    counts them.
    """
    synthesis, settings = Synthesis(), matching.settings
    values = begin.values.clone().requires_grad_()
    optimiser = UncompiledSGD([values], lr=settings.image_learning_rate, momentum=MOMENTUM)
    for _ in range(settings.trajectories):
        start = matching.start(model)
        here = {name: tensor.clone() for name, tensor in start.items()}
        for loop in range(settings.loops):
            if distance(here, start) >= settings.trust_radius:
                break
            for _ in range(settings.batches):
                change = next(changes)
                began = time.perf_counter()
                target = list(real(here, change).values())
                synthesis.looks += 1
                synthesis.seconds["real-gradients"] += time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(settings.image_steps):
                    now = LandscapeRecords(values, begin.labels, begin.weights)
                    synthesis.last, values.grad = matching.statistic.slope(
                        body, here, now, change, target, matching.mse_weight, real.noise
                    )
                    # A step that is not finite would destroy the result of all earlier steps.
                    if values.grad.isfinite().all():
                        optimiser.step()
                    synthesis.first = (
                        synthesis.last if synthesis.first != synthesis.first else synthesis.first
                    )
                synthesis.seconds["image-steps"] += time.perf_counter() - began
            if loop < settings.loops - 1:
                now = LandscapeRecords(values.detach(), begin.labels, begin.weights)
                for _ in range(settings.model_steps):
                    slope = gradient(body, here, now, next(changes))
                    here = {name: here[name] - matching.rate * slope[name] for name in here}
    return LandscapeRecords(values.detach(), begin.labels, begin.weights), synthesis
