"""FedLAP at the coordinator: one walk along the loss landscapes that the sites' synthetic records make together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.sections import FedLAPConfig
from common.models.augmentation import draws
from common.models.classifiers import class_indices
from common.models.loss_landscape import LandscapeRecords, distance, gradient, walk
from common.models.networks import build, split_input
from common.models.parameters import Tensors
from common.randomness import stream
from common.surrogates.synthetic import Synthetic

# A radius this many times smaller than the median one is taken for a mistake or a lie: heeded, it would stop all others.
FAR_BELOW = 10


@dataclass(frozen=True)
class Walked:
    """Where a walk has ended, how far from its start, after how many steps, of them on the edge of the ball of `radius`."""

    model: dict[str, Tensor]
    radius: float
    moved: float
    steps: int
    at_edge: int


def heeded(radii: Mapping[str, float]) -> dict[str, float]:
    """Radii by site, those far below the median raised to a tenth of it."""
    floor = statistics.median(radii.values()) / FAR_BELOW
    return {site: max(radius, floor) for site, radius in radii.items()}


def common_radius(rule: str, radii: Sequence[float], trust_radius: float) -> float:
    """The radius all sites' landscapes are trusted within: the smallest, the median (the mean of the middle two) or the
    largest of theirs; "fixed" heeds none but the announced one. Source: FedLAP-DP, table 3.
    """
    match rule:
        case "min":
            return min(radii)
        case "median":
            return statistics.median(radii)
        case "max":
            return max(radii)
    return trust_radius


def optimise(
    model: Tensors,
    inputs: int,
    classes: tuple[str, ...],
    sets: Sequence[Synthetic],
    settings: FedLAPConfig,
    seed: int,
    device: str = "cpu",
) -> Walked:
    """Walk from `model` along the weighted losses of all sets, inside the radius that `settings.rule` makes of theirs.

    A set weighs as many records as its site has, N_k / N; where privacy hides that, all weigh the same. Source: FedLAP-DP,
    equation 14 (its code weighs all the same).
    """
    body, shape = _body(model, inputs, len(classes), settings)
    start = {name: tensor.to(device) for name, tensor in model.items()}
    records = LandscapeRecords.pool(
        [_records(each, classes, shape, device) for each in sets], [max(1, s.records) for s in sets]
    )
    number = sets[0].round
    radii = heeded({each.header.site: each.radius for each in sets})
    radius = common_radius(settings.rule, list(radii.values()), settings.trust_radius)
    changes = draws(settings.augment, stream(seed, "fedlap", "coordinator", number))
    current, steps, edge = start, 0, 0
    rate = settings.rate(number)
    for here, outside in walk(body.to(device), start, records, rate, settings.server_steps, radius, changes):
        current, steps, edge = here, steps + 1, edge + outside
    moved = distance(current, start)
    return Walked({name: tensor.cpu() for name, tensor in current.items()}, radius, moved, steps, edge)


def has_finite_gradient(
    model: Tensors, inputs: int, classes: tuple[str, ...], synthetic: Synthetic, settings: FedLAPConfig
) -> bool:
    """Whether a set says anything about the loss at `model`; one that does not would take the others' part along."""
    body, shape = _body(model, inputs, len(classes), settings)
    found = gradient(body, model, _records(synthetic, classes, shape, "cpu"))
    return all(bool(part.isfinite().all()) for part in found.values())


def _body(model: Tensors, inputs: int, classes: int, settings: FedLAPConfig) -> tuple[torch.nn.Module, torch.Size]:
    body, first = split_input(build(settings.model, inputs, classes, model), torch.zeros(1, inputs))
    return body, first.shape[1:]


def _records(synthetic: Synthetic, classes: tuple[str, ...], shape: torch.Size, device: str) -> LandscapeRecords:
    labels = class_indices(classes, synthetic.header.classes)[synthetic.labels]
    return LandscapeRecords.evenly(synthetic.values.reshape(-1, *shape).to(device), labels.to(device))
