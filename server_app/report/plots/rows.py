"""The plot of numbers in rows, as bars or as marks with intervals: one row for each site, class or
cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    FAINT,
    INK,
    NAMED_SITES,
    legend_above,
    make_axes,
    margin,
    percent_axis,
    render,
    rows_height,
)


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


@dataclass(frozen=True)
class Series:
    """Numbers of one kind.

    Attributes:
        values: one for each row; None for a row without one.
        colour: of bars or marks.
        name: in the legend; empty without one.
        mark: of matplotlib; empty for bars.
    """

    values: Sequence[float | WithInterval | None]
    colour: str
    name: str = ""
    mark: str = ""


def draw_rows(
    key: str,
    rows: Sequence[str],
    series: Sequence[Series],
    titles: tuple[str, str],
    *,
    shares: bool = False,
    notes: Sequence[str] = (),
    line: tuple[str, float] | None = None,
) -> str:
    """Draw one row below the other.

    Args:
        key: of the picture.
        rows: their names; more than NAMED_SITES are one area without names.
        series: those with a name lie side by side within a row.
        titles: what a row is, and what the numbers are.
        shares: whether the numbers are shares, shown in percent.
        notes: a text beside each row.
        line: name and value of a number that is drawn through all rows.

    Returns:
        The picture as an SVG string.
    """
    what, title = titles
    many, named = len(rows) > NAMED_SITES, sum(bool(each.name) for each in series)
    left, right = 0.42 if many else margin(rows), 1.15 if notes else 0.25
    top = 0.5 if named else 0.3 if line else 0.15

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=left, right=right, top=top, bottom=0.5)
        for place, each in enumerate(series):
            shift = (place - (named - 1) / 2) * 0.8 / named if named else 0.0
            _draw_series(axes, each, shift, 0.7 / max(1, named), many)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_ylabel(f"{len(rows):,} {what}s, best on top" if many else what)
        axes.set_yticks(
            [] if many else range(len(rows)), [] if many else [shorten(row, 22) for row in rows]
        )
        if any(not each.mark for each in series):
            axes.set_xlim(left=0, right=1 if shares and not named else None)
        if shares:
            percent_axis(axes.xaxis)
        axes.set_xlabel(title)
        axes.grid(axis="x", color=FAINT)
        axes.set_axisbelow(True)
        for row, note in enumerate(() if many else notes):
            place = axes.get_yaxis_transform()
            axes.text(1.02, row, shorten(note, 24), transform=place, va="center", fontsize=9)
        if line:
            axes.axvline(line[1], color=INK, lw=1.3, ls=(0, (4, 2)))
            axes.set_title(f"dashed: {line[0]}", fontsize=9, pad=4)
        if named:
            legend_above(axes, named)

    return render(key, rows_height(len(rows), top + 0.5), draw)


def _draw_series(axes: Any, series: Series, shift: float, height: float, many: bool) -> None:
    known = [
        (row + shift, each if isinstance(each, WithInterval) else WithInterval(each, each, each))
        for row, each in enumerate(series.values)
        if each is not None
    ]
    rows, numbers = [row for row, _ in known], [number for _, number in known]
    values = [each.value for each in numbers]
    if many:
        # One shape, whatever the number of rows.
        axes.fill_betweenx(rows, 0, values, step="mid", color=series.colour, lw=0)
        return
    colour = series.colour
    if not series.mark:
        bars = [max(0.0, value) for value in values]
        axes.barh(rows, bars, height, color=colour, label=series.name or None, zorder=2)
        colour = INK
    if series.mark or any(each.low < each.high for each in numbers):
        # A number may lie outside its interval where its own range ends, such as a count below zero.
        errors = [
            [max(0.0, each.value - each.low) for each in numbers],
            [max(0.0, each.high - each.value) for each in numbers],
        ]
        style = {"elinewidth": 1.4, "capsize": 2.5, "markersize": 5, "color": colour, "zorder": 3}
        label = series.name if series.mark and series.name else None
        axes.errorbar(values, rows, xerr=errors, fmt=series.mark or "none", ecolor=colour, label=label, **style)  # fmt: skip
