"""Plots of counts about labels, numbers and times: cells of a survey, measures by output and site, and
survival by third of the risk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    margin,
    percent_axis,
    render,
)
from fedsurrogate.server_app.report.plots.counts import WithInterval

# Of a curve in evaluation.json: survival, its limits, and numbers at risk, one for each bin.
Curve = Mapping[str, Sequence[float | None]]
NAMED = 22
COLOURS = (GREEN, BLUE, ORANGE)
ROW = 0.28


def draw_cells(cells: Mapping[str, WithInterval]) -> str:
    """A bar for each cell: its records at all sites together, as an SVG string."""

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=margin(list(cells)), right=0.25, top=0.15, bottom=0.5)
        numbers = list(cells.values())
        widths = [max(0.0, each.value) for each in numbers]
        axes.barh(range(len(numbers)), widths, color=BLUE, height=0.6, zorder=2)
        _lines(axes, numbers, range(len(numbers)), INK, "none")
        _names(axes, list(cells))
        axes.set_xlim(0, 1.05 * max(1.0, *(each.high for each in numbers)))
        axes.set_xlabel("records")

    return render("survey", 0.8 + ROW * max(3, len(cells)), draw)


def draw_forest(lines: Mapping[tuple[str, str], WithInterval], title: str, shares: bool) -> str:
    """A forest plot: a line for each output and place.

    Args:
        lines: by output, and where it was measured.
        title: of the measure.
        shares: whether it is a share of one.

    Returns:
        The picture as an SVG string.
    """
    names = [f"{output}, {place}" for output, place in lines]

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=margin(names), right=0.25, top=0.15, bottom=0.5)
        for heights, colour, mark in ((True, INK, "D"), (False, BLUE, "s")):
            own = [
                (y, each)
                for y, ((_, place), each) in enumerate(lines.items())
                if (place == "all sites") == heights
            ]
            _lines(axes, [each for _, each in own], [y for y, _ in own], colour, mark)
        _names(axes, names)
        if shares:
            low = min((each.low for each in lines.values()), default=0.0)
            axes.set_xlim(max(0.0, min(0.45, low - 0.02)), 1.02)
            axes.axvline(0.5, color=FAINT, zorder=1)
        axes.set_xlabel(title)

    return render("evaluation-forest", 0.8 + ROW * max(3, len(lines)), draw)


def draw_survival(curves: Mapping[str, Curve], edges: Sequence[float], unit: str) -> str:
    """Kaplan-Meier curves at the ends of the bins, with 95 % intervals and the numbers at risk below.

    Args:
        curves: by third of the risk; a curve may end before the last bin.
        edges: of the bins, from zero.
        unit: of the times.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=margin(list(curves)), right=0.3, top=0.35, bottom=1.4)
        for place, (name, curve) in enumerate(curves.items()):
            colour = COLOURS[place % len(COLOURS)]
            survival = _known(curve, "survival")
            times = edges[: len(survival) + 1]
            # Known at the ends of bins only, so no steps within them.
            axes.plot(times, [1.0, *survival], "o-", ms=3.5, color=colour, label=name)
            low, high = (
                [value if end is None else end for value, end in zip(survival, ends, strict=False)]
                for ends in (curve.get("low", ()), curve.get("high", ()))
            )
            if len(low) == len(high) == len(survival):
                style = {"color": colour, "alpha": 0.14, "lw": 0}
                axes.fill_between(times, [1.0, *low], [1.0, *high], **style)
            for time, count in zip(edges, _known(curve, "at_risk"), strict=False):
                axes.annotate(
                    f"{count:,.0f}",
                    (time, 0),
                    (0, -46 - 15 * place),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    color=colour,
                )
            axes.annotate(
                shorten(name, NAMED),
                (0, 0),
                (-18, -46 - 15 * place),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
                color=colour,
            )
        axes.set(xlim=(0, 1.01 * edges[-1]), ylim=(0, 1.02))
        percent_axis(axes.yaxis)
        axes.set_ylabel("without the event")
        axes.set_xlabel(f"time in {unit}" if unit else "time")
        legend_above(axes, 3)

    return render("evaluation-survival", 4.2, draw)


def _known(curve: Curve, name: str) -> list[float]:
    return [each for each in curve.get(name, ()) if each is not None]


def _names(axes: Any, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [shorten(name, NAMED) for name in names])
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)


def _lines(
    axes: Any, numbers: Sequence[WithInterval], heights: Sequence[int], colour: str, mark: str
) -> None:
    if not numbers:
        return
    errors = [
        [max(0.0, each.value - each.low) for each in numbers],
        [max(0.0, each.high - each.value) for each in numbers],
    ]
    style = {"ecolor": colour, "elinewidth": 1.4, "capsize": 2.5, "markersize": 5, "color": colour}
    values = [each.value for each in numbers]
    axes.errorbar(values, list(heights), xerr=errors, fmt=mark, zorder=3, **style)
