"""What sites count of a target in place of learning it: their records before a run, and how a model
answers on held-out ones. One class a kind of target.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import ABOVE, ConfigError, norm_of_ones
from ..settings import CountingSettings
from ..terms import Counted
from .labels import Labels
from .number import WITHIN, Number
from .target import Facts, Target
from .time import Time

# Log-odds of labels are counted in bins from -EDGE to EDGE; the outer ones hold all beyond.
EDGE = 8.0
# What is summed for a number, all from 0 to 1: errors e as shares of the largest one, as |e|, e^2 and
# (e + 1) / 2; and the value u as a share of the range, as u and (2 u - 1)^2.
PARTS = ("records", "absolute", "squared", "error", "value", "energy", "within")
# Steps of these sums in a message of whole numbers.
STEPS = 100
# A normal distribution has a third of its mass below minus this, and a third above.
THIRD = 0.4307272992954576
THIRDS = ("low risk", "middle risk", "high risk")


# Names of the cells of what a survey counts, by what they ask: a record is in one cell of each.
Questions = dict[str, tuple[str, ...]]


class CountedTarget(ABC):
    """How a target is counted."""

    @property
    @abstractmethod
    def questions(self) -> Questions:
        """What a survey counts, Q questions."""

    @abstractmethod
    def cells(self, values: Tensor) -> Tensor:
        """The cell of each record, (n, Q), int64; values (n, k), float64."""

    @property
    @abstractmethod
    def table(self) -> Counted:
        """What an evaluation counts: T topics first."""

    @abstractmethod
    def kinds(self, values: Tensor) -> Tensor:
        """The kind of each record in each topic: exact counts need enough of each kind that is there.

        Args:
            values: (n, k), float64.

        Returns:
            (n, T), int64; -1 for a record that is not in the topic.
        """

    @abstractmethod
    def judged(
        self, facts: Facts, outputs: tuple[str, ...], scores: Tensor, values: Tensor
    ) -> Tensor:
        """What each record adds to the table; nothing to a topic in which it is not.

        Args:
            facts: that the model carries about its target.
            outputs: names of its scores.
            scores: finite, (n, o), float64.
            values: (n, k), float64.

        Returns:
            (n, *shape), float64.
        """

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of all cells of a survey."""
        return tuple(f"{name}: {cell}" for name, own in self.questions.items() for cell in own)

    @property
    def bound(self) -> float:
        """Largest norm of what a record adds to a survey."""
        return norm_of_ones(len(self.questions))


@dataclass(frozen=True)
class CountedLabels(CountedTarget):
    """Labels: present, absent or not annotated; and of a model a histogram of the log-odds."""

    target: Labels
    bins: int

    @property
    def questions(self) -> Questions:
        """One a label."""
        return dict.fromkeys(self.target.columns, ("present", "absent", "not annotated"))

    def cells(self, values: Tensor) -> Tensor:
        """(n, L)."""
        return torch.where(values.isnan(), 2, (values == 0).long()).long()

    @property
    def table(self) -> Counted:
        """Histograms of absent and of present records, (L, 2, B)."""
        count = len(self.target.columns)
        return Counted("labels", (count, 2, self.bins), math.sqrt(count) * ABOVE)

    def kinds(self, values: Tensor) -> Tensor:
        """Absent 0, present 1."""
        return torch.where(values.isnan(), -1, (values == 1).long()).long()

    def judged(
        self, facts: Facts, outputs: tuple[str, ...], scores: Tensor, values: Tensor
    ) -> Tensor:
        """One in a bin of each label that is annotated, and that the model has."""
        found = torch.zeros(len(values), *self.table.shape, dtype=torch.float64)
        kinds = self.kinds(values)
        place = ((scores + EDGE) * (self.bins / (2 * EDGE))).floor().long()
        for column, name in enumerate(outputs):
            topic = self.target.columns.index(name)
            rows = (kinds[:, topic] >= 0).nonzero().flatten()
            at = place[rows, column].clamp(0, self.bins - 1)
            found[rows, topic, kinds[rows, topic], at] = 1.0
        return found


@dataclass(frozen=True)
class CountedNumbers(CountedTarget):
    """Numbers: a histogram over the public range; and of a model bounded sums of its errors.

    Attributes:
        largest: errors beyond this share of the range count as this.
    """

    target: Number
    bins: int
    largest: float = 1.0

    @property
    def questions(self) -> Questions:
        """One a number, with bins of equal width; the outer ones hold all beyond."""
        return {
            name: tuple(f"{a:.6g} to {b:.6g}" for a, b in pairwise(self._edges(*ends)))
            for name, ends in zip(self.target.columns, self.target.ranges, strict=True)
        }

    def cells(self, values: Tensor) -> Tensor:
        """(n, r). A value on an edge is in the bin that begins there."""
        found = [
            torch.bucketize(column, torch.tensor(self._edges(*ends)[1:-1]).double(), right=True)
            for column, ends in zip(values.double().T.contiguous(), self.target.ranges, strict=True)
        ]
        return torch.stack(found, 1)

    @property
    def table(self) -> Counted:
        """Sums of `PARTS`, (r, 7), in steps."""
        shape = (len(self.target.columns), len(PARTS))
        return Counted("errors", shape, STEPS * math.sqrt(math.prod(shape)) * ABOVE, most=STEPS)

    def kinds(self, values: Tensor) -> Tensor:
        """All records are alike."""
        return torch.zeros(len(values), len(self.target.columns), dtype=torch.int64)

    def judged(
        self, facts: Facts, outputs: tuple[str, ...], scores: Tensor, values: Tensor
    ) -> Tensor:
        """`PARTS` of each number, of predictions and values within the range."""
        order = [outputs.index(name) for name in self.target.columns]
        # A model that does not know its error has no interval, so nothing lies within.
        stated = facts.get("deviation", [-1.0] * len(outputs))
        deviation = torch.tensor([float(stated[at]) for at in order], dtype=torch.float64)
        scores = scores[:, order]
        within = (values - scores).abs() <= WITHIN * deviation
        true, answer = self._shares(values), self._shares(scores)
        error = ((answer - true) / self.largest).clamp(-1, 1)
        parts = [
            torch.ones_like(true),
            error.abs(),
            error.square(),
            (error + 1) / 2,
            true,
            (2 * true - 1).square(),
            within.double(),
        ]
        stacked: Tensor = STEPS * torch.stack(parts, 2)
        return stacked

    def _edges(self, low: float, high: float) -> list[float]:
        return [low + (high - low) * at / self.bins for at in range(self.bins + 1)]

    def _shares(self, values: Tensor) -> Tensor:
        """Values as shares of their ranges, from 0 to 1."""
        low, high = torch.tensor(self.target.ranges, dtype=torch.float64).T
        shares: Tensor = (values.double() - low) / (high - low)
        return shares.clamp(0, 1)


@dataclass(frozen=True)
class CountedTimes(CountedTarget):
    """Times: cells of time and event; and of a model the cells of each third of its risk."""

    target: Time

    @property
    def questions(self) -> Questions:
        """One: the cell."""
        return {"time": self.target.rows}

    def cells(self, values: Tensor) -> Tensor:
        """(n, 1)."""
        return self.target.cells(values)[:, None]

    @property
    def rows(self) -> tuple[str, ...]:
        """The cells."""
        return self.target.rows

    @property
    def table(self) -> Counted:
        """Cells by third of the risk, (1, 3, 2 B + 1)."""
        return Counted("thirds", (1, len(THIRDS), len(self.target.rows)), 1.0)

    def kinds(self, values: Tensor) -> Tensor:
        """Whether the event was seen before the horizon."""
        return (self.target.cells(values) < self.target.bins).long()[:, None]

    def judged(
        self, facts: Facts, outputs: tuple[str, ...], scores: Tensor, values: Tensor
    ) -> Tensor:
        """One in the cell of the third. Thirds are those of a normal distribution with the spread of
        the risk in the records from which the model was learned, so they are known in public; one
        where the model does not state it.
        """
        cut = THIRD * float(facts.get("spread", 1.0))
        if not 0 <= cut < math.inf:
            raise ValueError(f"a spread of the risk of {facts['spread']!r}"[:100])
        third = (scores[:, 0] >= -cut).long() + (scores[:, 0] > cut).long()
        found = torch.zeros(len(values), *self.table.shape, dtype=torch.float64)
        found[torch.arange(len(values)), 0, third, self.target.cells(values)] = 1.0
        return found


def counted(target: Target, own: CountingSettings) -> CountedTarget:
    """How a target is counted.

    Args:
        target: of the run.
        own: settings of what is counted.

    Raises:
        ConfigError: for a kind of target that is not counted, or an odd number of bins of labels.
    """
    make = COUNTED.get(target.name)
    if make is None:
        raise ConfigError(
            f"task = {target.name!r} is not counted; sites can count {', '.join(COUNTED)}, and classes"
        )
    return make(target, own)


def _labels(target: Target, own: CountingSettings) -> CountedTarget:
    assert isinstance(target, Labels)
    if own.bins % 2:
        raise ConfigError(
            f"counting.bins = {own.bins}: labels are decided where bins meet, so their number must be "
            f"even; set {own.bins + 1}"
        )
    return CountedLabels(target, own.bins)


def _numbers(target: Target, own: CountingSettings) -> CountedTarget:
    assert isinstance(target, Number)
    return CountedNumbers(target, own.bins, own.largest_error)


def _times(target: Target, own: CountingSettings) -> CountedTarget:
    assert isinstance(target, Time)
    return CountedTimes(target)


COUNTED: dict[str, Callable[[Target, CountingSettings], CountedTarget]] = {
    "multilabel": _labels,
    "regression": _numbers,
    "survival": _times,
}
