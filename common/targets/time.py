"""Time to an event: records are classes whose classes are cells, a bin of time by event. In runs of several
rounds, what travels, and its parts of a privacy budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..settings import Settings
from ..terms import Term
from .target import (
    CODE,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Answering,
    Course,
    Facts,
    Kind,
    LearningRates,
    Objective,
    Target,
    sums_of_counts,
)

# What sites receive: the value of each cell.
VALUES = "values"
AT_SITE = "fedsurrogate.client_app.methods"
AT_COORDINATOR = "fedsurrogate.strategies.targets"


def residual_course(private: bool) -> Course:
    """Two rounds: numbers of records by cell; then the features weighted with the martingale
    residual of each record's cell, which follows from these numbers.

    Args:
        private: whether with noise. Without it, the second round is of messages around the site's
            mean, and states its own numbers of records.
    """
    exact = () if private else (Term(RECORDS, "1"),)
    code = () if private else (Term(CODE, "1", whole=False),)
    return Course(
        rounds=2,
        first=(Term(CODE, "C", share=1.0),),
        first_share=0.05,
        each=(
            *exact,
            Term(TOTALS, "d", 1, False, share=0.08, count=RECORDS),
            *code,
            # Of one row. The residuals are scaled to magnitudes of at most one.
            Term(SUMS, "1 d", 1, False, share=0.45),
            Term(SQUARES, "T", 2, False, share=0.42),
        ),
        receives=((VALUES, "C"),),
        site_sums=f"{AT_SITE}.sums:residual_sums",
        steps=f"{AT_COORDINATOR}.residual_steps:ResidualSteps",
    )


def merged_places(counts: Sequence[float], least: float) -> list[int]:
    """Where the records of each place of an axis are counted, so that each place has none, or
    enough: those of neighbouring places are counted in the middle of these.

    Args:
        counts: of each place.
        least: that is enough.

    Returns:
        For each place, the one in which its records are counted; -1 if there are not enough in all
        places together.

    Example:
        >>> merged_places([5, 1, 0, 4, 1], least=3)
        [0, 3, 3, 3, 3]
        >>> merged_places([1, 0, 1], least=3)
        [-1, -1, -1]
    """
    starts, found = [0], 0.0
    for place, count in enumerate(counts):
        found += count
        if found >= least:
            starts.append(place + 1)
            found = 0.0
    if len(starts) == 1:
        return [-1 if sum(counts) else place for place, _ in enumerate(counts)]
    # What is left over at the end joins the last run.
    starts[-1] = len(counts)
    places = list(range(len(counts)))
    for start, end in pairwise(starts):
        held = [place for place in range(start, end) if counts[place]]
        places[start:end] = [held[(len(held) - 1) // 2] if held else start] * (end - start)
    return places


def merged_cells(counts: Tensor, least: int) -> Tensor:
    """The cell in which the records of each cell are counted, so that each has none, or enough.

    Args:
        counts: of 2 B + 1 cells: events by bin, last seen by bin, outlived.
        least: records that are enough.

    Returns:
        (2 B + 1,), int64; -1 where there are not enough records with, or without, an event.

    Example:
        >>> merged_cells(torch.tensor([3, 1, 9, 0, 5]), least=2).tolist()
        [0, 0, 2, 4, 4]
    """
    bins = len(counts) // 2
    events = merged_places(counts[:bins].tolist(), least)
    others = merged_places(counts[bins:].tolist(), least)
    return torch.tensor([*events, *(each + bins if each >= 0 else -1 for each in others)])


# The hazards of all records add up to their events, and each adds less than itself to the second
# derivative, which so is below one.
RATES = LearningRates(1.0, 0.4, 4.0)
# Share of records in the first bin, or beyond the horizon, that says the unit is likely wrong.
MOST_ALIKE = 0.95
# Bins without and with noise, and how much wider the last one is than the first. Where most events
# are early, few of equal bins tell them apart; and a bin that is too wide for its curve to be that
# of the records, as one of five is, helps nobody (benchmarks/targets_survival.py).
BINS, PRIVATE_BINS, WIDENING = 20, 10, 4.0
# Digits of an edge, as people read it.
DIGITS = 3
# Ways to learn risks: from cells in one round, or from residuals in two.
HEADS = ("cells", "residuals")


@dataclass(frozen=True)
class Time(Target):
    """The time to an event, up to a public horizon.

    The code is one-hot over 2 B + 1 cells: events in each bin (e_b, e_(b+1)], records that were last
    seen about each edge e_0 to e_(B-1), and those that outlived the horizon. The time of a record
    without an event is rounded to the nearest edge: it is at risk in the bins before. So a
    Kaplan-Meier curve is exact where times lie on edges, and elsewhere the actuarial one on average.

    Attributes:
        columns: of time and event.
        edges: of the B bins, (B + 1,), from 0 to the horizon.
        unit: of the times.
        head: how risks are learned: "cells" or "residuals".

    Example:
        >>> time = Time(("t", "e"), (0.0, 1.0, 2.0))
        >>> values = torch.tensor([[0.5, 1.0], [1.0, 1.0], [1.2, 0.0], [2.0, 1.0], [0.5, 0.0]])
        >>> time.cells(values).tolist()
        [0, 0, 3, 1, 3]
    """

    columns: tuple[str, ...]
    edges: tuple[float, ...]
    unit: str = ""
    head: str = "cells"
    name = "survival"
    compared = "survival"
    divides = True

    @property
    def outputs(self) -> tuple[str, ...]:
        """One score: the larger, the sooner the event."""
        return ("risk",)

    @property
    def bins(self) -> int:
        """B."""
        return len(self.edges) - 1

    @property
    def rows(self) -> tuple[str, ...]:
        """The cells: events, last seen, outlived."""
        spans = [f"{a:g} to {b:g}" for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]
        return (
            *(f"event {span}" for span in spans),
            *(f"last seen about {edge:g}" for edge in self.edges[:-1]),
            f"outlived {self.edges[-1]:g}",
        )

    @property
    def gap(self) -> str:
        """Cells without noise of a site alone."""
        if self.head != HEADS[0]:
            return ""
        return (
            "a site takes part only if each cell of time and event that has records there has two or "
            "more; set time-head = 'residuals', secure-aggregation = true or epsilon, or fewer bins"
        )

    @property
    def public(self) -> dict[str, object]:
        """Columns, edges and unit; and how risks are learned, if not from cells."""
        usual: dict[str, object] = {
            "name": self.name,
            "columns": list(self.columns),
            "edges": list(self.edges),
            "unit": self.unit,
        }
        return usual | ({} if self.head == HEADS[0] else {"head": self.head})

    @property
    def title(self) -> str:
        """What is learned, in words."""
        return f"time to the event, up to {self.edges[-1]:g} {self.unit}".strip()

    def statistics(self, private: bool) -> tuple[Term, ...]:
        """Sums of the code t, of t z' and of z z'; without noise also of 1 and z, which a message
        needs to have the others around the mean. A record is in one cell, so |t| = 1.
        """
        return sums_of_counts(1.0, private)

    def course(self, private: bool) -> Course | None:
        """Two rounds with residuals."""
        return None if self.head == HEADS[0] else residual_course(private)

    def cells(self, values: Tensor) -> Tensor:
        """The cell of each record, (n,), int64. Times are compared with edges in single precision, in
        which some files hold them.
        """
        edges = torch.tensor(self.edges, dtype=torch.float32)
        times, outlived = values[:, 0].float().contiguous(), 2 * self.bins
        # Of equal distances, the later edge.
        middles = (edges[1:] + edges[:-1]) / 2
        last_seen = torch.bucketize(times, middles, right=True) + self.bins
        events = torch.bucketize(times, edges[1:])
        return torch.where(
            (values[:, 1] == 1) & (events < self.bins), events, last_seen.clamp_max(outlived)
        )

    def code(self, values: Tensor) -> Tensor:
        """One-hot, (n, 2 B + 1)."""
        return torch.nn.functional.one_hot(self.cells(values), 2 * self.bins + 1).double()

    def faults(self, values: Tensor) -> Mapping[str, Tensor]:
        """Times below zero or infinite, and events that are neither 1 nor 0."""
        time, event = values.T
        return {
            "a time that is negative or infinite": (time < 0) | time.isinf(),
            "an event that is not 1 or 0": ~((event == 0) | (event == 1) | event.isnan()),
        }

    def large_enough(self, code: Tensor, least: int, summed: bool) -> tuple[Tensor, str]:
        """All cells, or none: the sum of a cell of few records shows their features."""
        sizes = code.sum(0)
        small = (sizes > 0) & (sizes < max(2, least))
        if summed or not small.any():
            return code, ""
        cell = self.rows[int(small.nonzero()[0])]
        raise DataError(
            f"{int(small.sum())} cells of time and event have fewer than {max(2, least)} records "
            f"at this site, such as {cell!r}, and the sum of one shows its record; set time-head = "
            "'residuals', secure-aggregation = true, epsilon, or fewer bins"
        )

    def objective(self) -> Objective:
        """Discrete hazards: logistic regression on the bins in which a record is at risk, with a
        level for each bin and one weight vector for all.
        """
        # Half of the records have the event before the horizon.
        level = math.log(math.expm1(math.log(2) / self.bins))
        return Objective(
            self.bins, partial(_losses, self.bins), RATES, self._answering, (level,) * self.bins
        )

    def _answering(self, model: Mapping[str, Tensor]) -> Answering:
        levels = [float(each) for each in model["levels.weight"].flatten()]
        weight = model["score.weight"]
        return Answering(self.outputs, weight, torch.zeros(1), {"levels": levels})

    def groups(self, values: Tensor) -> Tensor:
        """Cells."""
        return self.cells(values)

    def warnings(self, values: Tensor) -> list[str]:
        """Nearly all records in one bin: a wrong unit."""
        times = values[:, 0].double()
        first = (times < self.edges[1]).double().mean() if len(times) else 0.0
        last = (times > self.edges[-1]).double().mean() if len(times) else 0.0
        what = [("in the first bin", first), (f"beyond the horizon {self.edges[-1]:g}", last)]
        unit = self.unit or "time-unit"
        return [
            f"{float(share):.0%} of the records are {where}; are the times in {unit}?"
            for where, share in what
            if share > MOST_ALIKE
        ]


@dataclass(frozen=True)
class Scored(Time):
    """Times whose code is one number, that of a record's cell.

    Attributes:
        values: of the cells, (2 B + 1,), of magnitudes of at most one.
    """

    values: tuple[float, ...] = ()
    divides = False
    counts = False

    @property
    def rows(self) -> tuple[str, ...]:
        """The one number."""
        return ("value",)

    def code(self, values: Tensor) -> Tensor:
        """The number of each record, (n, 1)."""
        table = torch.tensor(self.values, dtype=torch.float64)
        return table[self.cells(values)][:, None]


def scored(target: Time, values: Tensor) -> Scored:
    """A target whose code is the value of a record's cell.

    Args:
        target: of the run.
        values: of the cells, (2 B + 1,).
    """
    given = {field.name: getattr(target, field.name) for field in fields(target)}
    return Scored(**given, values=tuple(values.clamp(-1, 1).tolist()))


def widening_edges(horizon: float, bins: int, ratio: float = 1.0) -> tuple[float, ...]:
    """Edges of bins up to a horizon; with a ratio above one, later bins are wider.

    Args:
        horizon: end of the last bin, above zero.
        bins: number of bins.
        ratio: width of the last bin by that of the first.

    Returns:
        B + 1 edges, from zero.

    Example:
        >>> widening_edges(10.0, 2, ratio=4.0), widening_edges(3.0, 3)
        ((0.0, 2.0, 10.0), (0.0, 1.0, 2.0, 3.0))
    """
    if ratio == 1:
        return tuple(horizon * index / bins for index in range(bins + 1))
    step = ratio ** (1 / max(1, bins - 1))
    widths = [step**index for index in range(bins)]
    whole = math.fsum(widths)
    inner = (horizon * math.fsum(widths[:index]) / whole for index in range(1, bins))
    return (0.0, *(float(f"{edge:.{DIGITS}g}") for edge in inner), horizon)


def at_risk_in(by_cell: Tensor) -> Tensor:
    """Sums over the records at risk in each bin, from those of each cell: of events in the bin or
    later, of records last seen about a later edge, and of those that outlived the horizon.

    Args:
        by_cell: (2 B + 1, ...), in the order of the code.

    Returns:
        (B, ...).

    Example:
        >>> at_risk_in(torch.tensor([1.0, 1.0, 5.0, 1.0, 1.0])).tolist()
        [4.0, 2.0]
    """
    bins = len(by_cell) // 2
    # Last seen about e_(b+1), or outlived: at risk in bin b for the last time, as an event there.
    leaving = by_cell[:bins] + by_cell[bins + 1 :]
    return leaving.flip(0).cumsum(0).flip(0)


def usual_edges(horizon: float, private: bool) -> tuple[float, ...]:
    """The edges where `bins` says nothing."""
    return widening_edges(horizon, PRIVATE_BINS if private else BINS, WIDENING)


def _losses(bins: int, outputs: Tensor, code: Tensor) -> Tensor:
    """Minus the log likelihood of what is seen of each record, from cells (n, 2 B + 1).

    A record that is last seen about an edge is at risk in the bins before it.
    """
    cells = code.to(outputs)
    events, at_risk = cells[:, :bins], at_risk_in(cells.T).T
    losses: Tensor = at_risk * torch.nn.functional.softplus(outputs) - events * outputs
    return losses.sum(1)


def _make(settings: Settings) -> Target:
    if not settings.horizon:
        raise ConfigError(
            "task = 'survival' needs horizon, the time up to which survival is learned"
        )
    columns = (settings.time_column or "time", settings.event_column or "event")
    if columns[0] == columns[1]:
        raise ConfigError(f"time-column and event-column are both {columns[0]!r}")
    if settings.time_column and not settings.time_unit:
        raise ConfigError(
            "task = 'survival' needs time-unit, such as years, so that all sites mean the same"
        )
    head = settings.time_head
    if head == "auto":
        hidden = settings.epsilon or settings.secure_aggregation
        head = "cells" if hidden else "residuals"
    edges = (
        widening_edges(settings.horizon, settings.bins)
        if settings.bins
        else usual_edges(settings.horizon, bool(settings.epsilon))
    )
    return Time(columns, edges, settings.time_unit, head)


def _answers(facts: Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """The risk, as a log hazard relative to a mean record, and survival at the end of each bin: from
    the hazard of each bin, or from the levels of discrete hazards.
    """
    risk = scores[:, 0]
    kind = "levels" if "levels" in facts else "hazard"
    steps = torch.tensor([float(each) for each in facts[kind]], dtype=torch.float64)
    if kind == "levels":
        survival = (-torch.nn.functional.softplus(steps + risk[:, None]).cumsum(1)).exp()
    else:
        survival = (-steps.cumsum(0) * risk.exp()[:, None]).exp()
    ends = zip(facts["edges"][1:], survival.unbind(1), strict=True)
    named = {f"survival {edge:g}": column for edge, column in ends}
    return {"risk": risk, **named}


def _measured(scores: Tensor, true: Tensor) -> dict[str, float]:
    """Pairs of which the first had the event while the second was still without it (Harrell)."""
    time, event = true[:, 0], true[:, 1] == 1
    pairs = concordant = 0.0
    for row in event.nonzero().flatten().tolist():
        later = time > time[row]
        later |= (time == time[row]) & ~event
        pairs += float(later.sum())
        lower = scores[later] < scores[row]
        concordant += float(lower.sum()) + 0.5 * float((scores[later] == scores[row]).sum())
    return {
        "records": float(len(time)),
        "events": float(event.sum()),
        "pairs": pairs,
        "concordant": concordant,
    }


def _metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Events, and concordance."""
    pairs = sums["pairs"]
    found = {"events": sums["events"]}
    return found | ({"concordance": sums["concordant"] / pairs} if pairs > 0 else {})


def _chance(metrics: Mapping[str, float], z: float) -> float:
    """By Kendall 1938, for the pairs of two events: those with a record without one make it less."""
    events = metrics["events"]
    if events < 2:
        return math.inf
    return 0.5 + z * math.sqrt((2 * events + 5) / (18 * events * (events - 1)))


TIME = Kind(
    "survival",
    ("time_column", "event_column", "horizon", "bins", "time_unit", "time_head"),
    _make,
    _answers,
    _measured,
    _metrics,
    score="concordance",
    chance=_chance,
    once={"time_head": HEADS[0]},
    trained={"time_head": HEADS[0]},
)
