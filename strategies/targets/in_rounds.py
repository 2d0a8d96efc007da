"""Runs in rounds that learn another target than classes: from messages, and from secure sums."""

from __future__ import annotations

from collections.abc import Sequence

from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run
from fedsurrogate.common.targets.target import SQUARES
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling.plausibility import false_numbers
from fedsurrogate.strategies.pooling.rounds_of_sums import RoundsOfSums, check_charged
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.secure_sum.rounds import SecureRounds
from fedsurrogate.strategies.targets.received import sum_rounding
from fedsurrogate.strategies.targets.steps import CourseSteps, Round


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
