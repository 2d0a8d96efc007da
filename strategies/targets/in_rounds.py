"""Runs in rounds that learn another target than classes: from messages, and from secure sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run
from fedsurrogate.common.targets.target import SQUARES
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.rounds import Rounds
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling.plausibility import false_numbers
from fedsurrogate.strategies.pooling.site_weights import shares_kept
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.secure_sum.rounds import SecureRounds
from fedsurrogate.strategies.targets.received import sum_rounding
from fedsurrogate.strategies.targets.steps import CourseSteps, Round

# In the memory of a training: the share of its weight that a site keeps, from its first round on.
SHARE = "share."


def steps_of(run: Run) -> CourseSteps:
    """The coordinator's half of a run's target, which its plan names."""
    steps: type[CourseSteps] = load(run.plan.combination.learn)
    return steps(run)


def check_charged(training: Training) -> None:
    """Raise RunError where the next round has been charged: with noise, each is released once."""
    if training.config.private and training.asked > training.round:
        raise RunError(
            f"round {training.round + 1} of this run failed, but is charged; start a new run, "
            "without resume"
        )


class TargetRounds(Rounds[Parameters]):
    """Rounds in which the coordinator sees the sums of each site."""

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        check_charged(training)
        return training

    def shapes(self, training: Training) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sums of the next round."""
        messages = self.config.plan.messages
        sizes = messages.sizes(len(training.classes), training.inputs, 1)
        return {field.name: field.sizes(sizes) for field in messages.schema(not training.round)}

    def parse(self, payload: bytes, training: Training) -> Parameters:
        """Parse one site's sums.

        Args:
            payload: its bytes.
            training: before the round.

        Raises:
            SurrogateError: for bytes that are no sums, or too many numbers.
        """
        return unpack_parameters(payload, most=sum(map(math.prod, self.shapes(training).values())))

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the rows of the code, and that some records can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other rows, or sums that no records have.
        """
        if reply.header.classes != training.classes:
            raise SurrogateError("sums of other rows than the target's, or in another order")
        steps_of(self.config).check(reply)

    def defend(self, training: Training, replies: Sequence[Parameters]) -> Defended[Parameters]:
        """Cap weights by records.

        Args:
            training: before the round.
            replies: checked sums, sorted by site.
        """
        shares = self._shares(training.memory, replies)
        capped = {
            each.header.site: share
            for each, share in zip(replies, shares, strict=True)
            if share < 1
        }
        return Defended(list(replies), capped)

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Add the sums of all sites, and finish the round.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
        """
        shares = self._shares(training.memory, replies)
        names = [each.header.site for each in replies]
        steps = steps_of(self.config)
        facts = steps.absorb(training, steps.pooled(replies, shares))
        kept = {
            SHARE + name: torch.tensor([share], dtype=torch.float64)
            for name, share in zip(names, shares, strict=True)
        }
        training.memory = {**training.memory, **kept}
        training.finish_round(names)
        return facts

    def classifier(self, training: Training) -> Classifier:
        """The model of the target after any round."""
        return steps_of(self.config).head(training)

    def _shares(self, memory: Mapping[str, Tensor], replies: Sequence[Parameters]) -> list[float]:
        """The share of its weight that each site keeps: by this round's records, or an earlier
        one's.
        """
        own, steps = self.config, steps_of(self.config)
        rows = [counts for each in replies if (counts := steps.counts(each)) is not None]
        if len(rows) == len(replies):
            power = 2.0 if own.private else 1.0
            return shares_kept(rows, own.settings.max_share, power)
        first = (memory.get(SHARE + each.header.site) for each in replies)
        return [1.0 if share is None else float(share) for share in first]

    def _accuracy(self, grid: Grid) -> float | None:
        """None: a target has measures, which are of the last model."""
        return None


class SummedTargetRounds(SecureRounds):
    """Rounds of secure sums."""

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
