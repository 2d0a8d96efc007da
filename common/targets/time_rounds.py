"""The sums of survival runs in several rounds: what travels, and its parts of a privacy budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedsurrogate.common.targets.target import (
    CODE,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Course,
)
from fedsurrogate.common.terms import Term

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
        site_sums=f"{AT_SITE}.residual_rounds:residual_sums",
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
