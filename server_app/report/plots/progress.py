"""Plots of accuracy after every round, along a chain of sites, or over the bytes sent; of one run or
of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    QUIET,
    accuracy_range,
    bytes_axis,
    make_axes,
    percent_axis,
    render,
)
from fedsurrogate.server_app.runs.json_values import as_list, as_number, as_table
from fedsurrogate.server_app.runs.reader import RunFolder

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, QUIET)
NAMED_STEPS = 8
ROUND = "round"


@dataclass(frozen=True)
class AccuracyStep:
    """Accuracy after one step.

    Attributes:
        name: of the step: the number of a round, or the name of a site in a chain.
        accuracy: in [0, 1].
        bytes: sent up until then; None: unknown.
    """

    name: str
    accuracy: float
    bytes: float | None


def steps(run: RunFolder) -> tuple[str, list[AccuracyStep]]:
    """The name of a run's steps, and the steps with a known accuracy."""
    hops = [as_table(hop) for hop in as_list(run.metrics.get("hops"))]
    if hops:
        total, measured = 0.0, []
        for hop in hops:
            total += as_number(hop.get("bytes")) or 0.0
            if (accuracy := as_number(hop.get("accuracy"))) is not None:
                measured.append(AccuracyStep(str(hop.get("site", "")), accuracy, total))
        return "site in the chain", measured
    rounds = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    known = []
    for entry in rounds:
        accuracy, number = as_number(entry.get("accuracy")), as_number(entry.get("round"))
        if accuracy is not None and number is not None:
            known.append(AccuracyStep(f"{number:.0f}", accuracy, as_number(entry.get("bytes_up"))))
    if len(rounds) == 1 and known and known[0].bytes is None:
        # A method that sends once: its only step has all bytes of the run.
        known = [replace(known[0], bytes=run.number("bytes", "up"))]
    return ROUND, known


def accuracy_over(
    runs: Mapping[str, Sequence[AccuracyStep]],
    what: str = ROUND,
    reference: float | None = None,
    by_bytes: bool = False,
) -> str:
    """Draw the accuracy of runs over their steps, or over the bytes sent up.

    A run of one step is a diamond, with a thin line to compare the others with.

    Args:
        runs: the steps of each run, by its name.
        what: name of the steps; those that are no rounds are named on the axis.
        reference: the accuracy of the pooled head in [0, 1], drawn as a line; None without one.
        by_bytes: whether the axis has bytes.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.72, right=0.2, top=0.15, bottom=0.5)
        for index, (label, taken) in enumerate(runs.items()):
            drawn = [step for step in taken if step.bytes or not by_bytes]
            xs = [
                float(step.bytes or 0) if by_bytes else float(step.name) if what == ROUND else place
                for place, step in enumerate(drawn, 1)
            ]
            ys, once = [step.accuracy for step in drawn], len(taken) == 1
            style = {"marker": "D", "ms": 7, "ls": "none"} if once else {"marker": "o", "ms": 4}
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(xs, ys, color=colour, lw=1.3 if index else 2, label=label, **style)
            if once and drawn:
                axes.axhline(ys[0], color=colour, lw=0.8, ls=(0, (4, 3)), alpha=0.7)
        accuracies = [step.accuracy for taken in runs.values() for step in taken]
        if reference is not None:
            axes.axhline(reference, color=QUIET, lw=1, ls=(0, (4, 3)), label="pooled head")
            accuracies.append(reference)
        axes.set_ylim(*accuracy_range(accuracies))
        percent_axis(axes.yaxis)
        axes.grid(axis="y", color=FAINT)
        axes.set_ylabel("accuracy")
        if by_bytes:
            sizes = [step.bytes for taken in runs.values() for step in taken if step.bytes]
            bytes_axis(axes, sizes)
            axes.set_xlabel("sent up by all sites together (log scale)")
            return
        axes.set_xlabel(what)
        axes.margins(x=0.1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if what != ROUND:
            names = [shorten(step.name, 12) for taken in runs.values() for step in taken]
            every = -(-len(names) // NAMED_STEPS)
            axes.set_xticks(range(1, len(names) + 1)[::every], names[::every])
        if len(runs) > 1 or reference is not None:
            axes.legend(frameon=False, fontsize=8.5, loc="lower right")

    return render("bytes" if by_bytes else "rounds", 2.8, draw)
