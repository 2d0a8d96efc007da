"""Hazard ratios of a Cox model as the report shows them: a forest plot and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import BLUE, FAINT, INK, make_axes, render
from fedsurrogate.server_app.runs.json_values import as_list, as_numbers, as_table
from fedsurrogate.server_app.runs.reader import RunFolder

# Features in the plot; the table has all.
MOST_DRAWN = 40
# Ratios in the plot are cut off beyond these.
ENDS = (0.02, 50.0)


@dataclass(frozen=True)
class RatiosView:
    """Hazard ratios.

    Attributes:
        rows: name of the feature, and ratio with both ends of its 95 % interval.
        converged: whether the last step was small.
        picture: an SVG string; empty without matplotlib.
    """

    rows: tuple[tuple[str, float, float, float], ...]
    converged: bool
    picture: str


def rows_of(run: RunFolder) -> list[tuple[str, float, float, float]]:
    """Name, ratio, low and high of each feature that the run's metrics have."""
    found = []
    for each in as_list(run.metrics.get("hazard_ratios")):
        numbers = as_numbers(as_table(each))
        if numbers.keys() >= {"ratio", "low", "high"}:
            name = str(as_table(each).get("name"))
            found.append((name, numbers["ratio"], numbers["low"], numbers["high"]))
    return found


def ratios_view(run: RunFolder) -> RatiosView | None:
    """The hazard ratios of a run; None for one without."""
    rows = rows_of(run)
    if not rows:
        return None
    return RatiosView(tuple(rows), run.metrics.get("converged") is True, _drawn(rows))


def _drawn(rows: list[tuple[str, float, float, float]]) -> str:
    shown = rows[:MOST_DRAWN]

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=1.6, right=0.25, top=0.15, bottom=0.5)
        places = range(len(shown))
        low, high = ENDS
        for place, (_, ratio, first, last) in zip(places, shown, strict=True):
            ends = [min(max(each, low), high) for each in (first, last)]
            axes.plot(ends, [place, place], color=INK, linewidth=1, zorder=2)
            axes.scatter(min(max(ratio, low), high), place, marker="s", s=26, color=BLUE, zorder=3)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(
            max(low, 0.9 * min(0.5, *(first for _, _, first, _ in shown))),
            min(high, 1.1 * max(2.0, *(last for _, _, _, last in shown))),
        )
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_yticks(places, [shorten(name, 20) for name, _, _, _ in shown])
        axes.grid(axis="x", color=FAINT)
        axes.set_axisbelow(True)
        axes.set_xlabel("hazard ratio for one unit of the feature, 95 % interval")

    return render("hazard-ratios", 1.0 + 0.26 * max(3, len(shown)), draw)
