"""Plots of noisy counts: measures of a model by class, and records by class, with intervals that
include the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    legend_above,
    make_axes,
    percent_axis,
    render,
)

# Measures of a class in evaluation.json, in the order of the page, with the colours of their marks.
MEASURES = {"sensitivity": BLUE, "specificity": ORANGE, "auroc": GREEN}
NAMES = {"sensitivity": "sensitivity", "specificity": "specificity", "auroc": "AUROC"}
MARKS = {"sensitivity": "o", "specificity": "s", "auroc": "D"}


@dataclass(frozen=True)
class WithInterval:
    """A number with its 95 % interval.

    Attributes:
        value: the number.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float


def draw_measures(classes: Mapping[str, Mapping[str, WithInterval]]) -> str:
    """A row for each class, and in it the measures that the noise does not hide.

    Args:
        classes: measures in [0, 1] by class and key of `MEASURES`.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=1.2, right=0.25, top=0.5, bottom=0.5)
        for place, (measure, colour) in enumerate(MEASURES.items()):
            rows = [(y, row[measure]) for y, row in enumerate(classes.values()) if measure in row]
            heights = [y + 0.24 * (place - 1) for y, _ in rows]
            _marks(
                axes, [each for _, each in rows], heights, colour, MARKS[measure], NAMES[measure]
            )
        _rows(axes, list(classes))
        axes.set_xlim(-0.02, 1.02)
        percent_axis(axes.xaxis)
        legend_above(axes, 3)

    return render("evaluation", 1.2 + 0.42 * max(3, len(classes)), draw)


def draw_records(classes: Mapping[str, WithInterval]) -> str:
    """A bar for each class: its records at all sites together."""

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=1.2, right=0.25, top=0.15, bottom=0.5)
        numbers = list(classes.values())
        axes.barh(
            range(len(numbers)),
            [max(0.0, each.value) for each in numbers],
            color=BLUE,
            height=0.55,
            zorder=2,
        )
        _marks(axes, numbers, [float(y) for y in range(len(numbers))], INK, "", "")
        _rows(axes, list(classes))
        axes.set_xlim(0, 1.05 * max(1.0, *(each.high for each in numbers)))
        axes.set_xlabel("records")

    return render("survey", 0.9 + 0.34 * max(3, len(classes)), draw)


def _marks(
    axes: Any,
    numbers: Sequence[WithInterval],
    heights: Sequence[float],
    colour: str,
    mark: str,
    name: str,
) -> None:
    values = [each.value for each in numbers]
    # A number may lie outside its interval where its own range ends, such as a count below zero.
    errors = [
        [max(0.0, each.value - each.low) for each in numbers],
        [max(0.0, each.high - each.value) for each in numbers],
    ]
    style = {
        "ecolor": colour,
        "elinewidth": 1.4,
        "capsize": 2.5,
        "zorder": 3,
        "markersize": 5,
        "color": colour,
    }
    axes.errorbar(values, heights, xerr=errors, fmt=mark or "none", label=name or None, **style)


def _rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [shorten(name, 14) for name in names])
    axes.set_ylabel("class")
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
