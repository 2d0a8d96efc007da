"""What training by gradients needs to know of a target: the loss of a record, and the linear model that
makes it small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class LearningRates(NamedTuple):
    """Learning rates of a linear model for fedavg.learning-rate = 0.

    Attributes:
        site: at a site, over the mean squared norm of its features.
        private: at a site under privacy, for features of norm one.
        joint: of the coordinator's step with joint noise.
    """

    site: float
    private: float
    joint: float


@dataclass(frozen=True)
class TrainedHead:
    """What a linear model answers after training.

    Attributes:
        outputs: names of o answers.
        weight: (o, d).
        bias: (o,).
        public: what a model says of it besides the target's own facts, as values of JSON.
    """

    outputs: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    public: Mapping[str, object]


@dataclass(frozen=True)
class Objective:
    """What sites minimise together: the mean loss of all records.

    A record adds the sum over what is known of it, and the divisor is the number of records. So the
    mean of sites' gradients by their records is the gradient of all records together, whatever each
    site knows; and under privacy the divisor, a number of records, is public.

    Attributes:
        outputs: o, of the model in training.
        losses: of each record (n,), from outputs (n, o) and code (n, q).
        rates: of a linear model.
        answering: the head, from the parameters by name.
        levels: where outputs differ by a level only, and so share one weight vector: their values
            at the start, o; empty for a weight vector each.
    """

    outputs: int
    losses: Callable[[Tensor, Tensor], Tensor]
    rates: LearningRates
    answering: Callable[[Mapping[str, Tensor]], TrainedHead]
    levels: tuple[float, ...] = ()

    def numbers(self, dimension: int) -> int:
        """Number of parameters for features of a dimension."""
        shared = dimension + self.outputs
        return shared if self.levels else self.outputs * (dimension + 1)
