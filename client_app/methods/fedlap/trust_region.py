"""Effective radius: the distance from the model within which synthetic records approximate the real
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fedsurrogate.common.models.augmentation import Change
from fedsurrogate.common.models.loss_landscape import (
    Descent,
    LandscapeRecords,
    distance,
    total_loss,
    walk,
)
from fedsurrogate.common.models.parameters import Tensors

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
