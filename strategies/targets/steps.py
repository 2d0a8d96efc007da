"""What the coordinator does in each round of a target that is learned in several: without messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.targets.time import Time
from fedsurrogate.strategies.base.training import Training


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


def added(replies: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """Sums of tensors by name, float64.

    Args:
        replies: of the same names and shapes.
        shares: factor of each.
    """
    # One after the other: ten thousand second moments in double precision are too many.
    total = {name: torch.zeros_like(each).double() for name, each in replies[0].items()}
    for reply, share in zip(replies, shares, strict=True):
        for name, tensor in reply.items():
            total[name] += share * tensor.double()
    return total
