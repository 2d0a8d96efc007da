"""A round of FedAvg from a secure sum: the mean update, weighted by records, without any site's own."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from common.errors import RunError
from common.models.parameters import Parameters
from strategies.base.training import Training
from strategies.fedavg.aggregation import aggregate
from strategies.pooling.total import Total


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Add the mean update of the sites `summed` to the model, and finish the round. Raises RunError without records."""
    records = float(total.tensors["records"].sum().round())
    if records < 1:
        raise RunError("the sites of the secure sum have no record of the run's classes")
    shapes = training.shapes()
    names = sorted(shapes)
    parts = torch.split(total.tensors["update"] / records, [prod(shapes[name]) for name in names])
    moved = {name: part.reshape(shapes[name]).float() for name, part in zip(names, parts, strict=True)}
    mean = Parameters(training.header(), training.round + 1, moved, int(records))
    training.model, training.memory = aggregate(training.config, training.model, [mean], training.memory, len(summed))
    training.finish_round(summed)
