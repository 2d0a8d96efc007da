"""Runs in rounds that learn another target than classes: from messages, and from secure sums.

What the coordinator does in each round of a target that is learned in several: without messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.targets.target import SQUARES
from fedsurrogate.common.targets.time import Time
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling.plausibility import Total, false_numbers
from fedsurrogate.strategies.pooling.rounds_of_sums import RoundsOfSums, check_charged
from fedsurrogate.strategies.secure_sum.strategy import SecureRounds
from fedsurrogate.strategies.targets.sums import (
    sum_rounding,
)


def steps_of(run: Run) -> CourseSteps:
    """The coordinator's half of a run's target, which its plan names."""
    steps: type[CourseSteps] = load(run.plan.combination.learn)
    return steps(run)


class TargetRounds(RoundsOfSums):
    """Rounds in which the coordinator sees the sums of each site."""

    power = 2.0

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the rows of the code, and that some records can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other rows, or sums that no records have.
        """
        super().check(reply, training)
        steps_of(self.config).check(reply)

    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of a site's records by kind; None where a reply has none."""
        return steps_of(self.config).counts(reply)

    def add(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> dict[str, object]:
        """Let the target's steps absorb the sums of all sites."""
        steps = steps_of(self.config)
        return steps.absorb(training, steps.pooled(replies, shares))

    def classifier(self, training: Training) -> Classifier:
        """The model of the target after any round."""
        return steps_of(self.config).head(training)

    def _accuracy(self, grid: Grid) -> float | None:
        """None: a target has measures, which are of the last model."""
        return None


class SummedTargetRounds(SecureRounds):
    """Rounds of secure sums, none of which can be left out."""

    def _check_resumed(self, training: Training) -> None:
        check_charged(training)

    def classifier(self, training: Training) -> Classifier:
        """The model of the target after any round."""
        return steps_of(self.config).head(training)

    def _accuracy(self, grid: Grid) -> float | None:
        """None: a target has measures, which are of the last model."""
        return None


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Finish a round with a secure sum.

    Args:
        total: of the round.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for sums that no records have, or from which nothing can be learned.
    """
    tensors: dict[str, Tensor] = {name: each.double() for name, each in total.tensors.items()}
    rounding = 0.0
    if not total.sigmas:
        rounding = sum_rounding(total.usual_rounding.get(SQUARES, 0.0), training.inputs)
    try:
        steps_of(training.config).absorb(training, Round(tensors, total.sigmas, rounding))
    except SurrogateError as error:
        raise false_numbers(str(error)) from None
    training.finish_round(summed)


@dataclass(frozen=True)
class Round:
    """The sums of a round over all sites, around zero.

    Attributes:
        tensors: by name, float64.
        sigmas: standard deviation of the noise in an entry; empty without noise.
        rounding: largest eigenvalue, about, of what rounding has changed in the second moment.
    """

    tensors: Mapping[str, Tensor]
    sigmas: Mapping[str, float] = field(default_factory=dict)
    rounding: float = 0.0


class CourseSteps(ABC):
    """The coordinator's half of a target in rounds.

    Its state is the training's: `model` is what sites receive in the next round, `memory` the rest.

    Attributes:
        run: whose target it is.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @abstractmethod
    def start(self, dimension: int) -> Tensors:
        """What sites receive in the first round.

        Args:
            dimension: of the features.
        """

    @abstractmethod
    def check(self, reply: Parameters) -> None:
        """Check that some records can have the sums of one site's reply. Raises SurrogateError."""

    @abstractmethod
    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of a site's records by kind, for the cap of its weight; None where a reply has
        none.
        """

    @abstractmethod
    def pooled(self, replies: Sequence[Parameters], shares: Sequence[float]) -> Round:
        """The sums of all sites.

        Args:
            replies: checked.
            shares: of its weight that each site keeps.
        """

    @abstractmethod
    def absorb(self, training: Training, sums: Round) -> dict[str, object]:
        """Finish a round: change model and memory. Returns facts for its event.

        Raises:
            RunError: for sums that no records have, or from which nothing can be learned.
        """

    @abstractmethod
    def head(self, training: Training) -> Head:
        """The model after any round."""


class TimeSteps(CourseSteps):
    """The same of times."""

    @property
    def target(self) -> Time:
        """Of the run."""
        target = self.run.target
        assert isinstance(target, Time)
        return target


# In the memory of the training: numbers by cell with the standard deviation of their noise; and the
# model, once it is learned.
CELLS, NOISE, WEIGHT, MEAN, BASELINE = "cells", "cells-noise", "weight", "mean", "baseline"
