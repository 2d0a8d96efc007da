"""Plot of the value of each site, and what it shows in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    legend_above,
    make_axes,
    percent_axis,
    render,
)
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.json_values import as_list, as_number, as_numbers, as_table

FILE, MOST_SITES = "values.json", 40


@dataclass(frozen=True)
class ValuesView:
    """The values of the sites, as a report shows them.

    Attributes:
        picture: an SVG string.
        words: sentences about sites of no value.
    """

    picture: str
    words: list[str]


def values_view(folder: Path) -> ValuesView | None:
    """What a report shows of values.json; None without a readable one."""
    try:
        content = read_json(folder, FILE)
    except RunError:
        return None
    rows = [
        (str(as_table(each).get("site")), as_numbers(each))
        for each in as_list(content.get("sites"))
    ]
    # Of many sites in a deployment, only leave-one-out is measured.
    rows = [
        (name, {"shapley": row.get("leave_one_out", 0.0)} | row)
        for name, row in rows
        if "leave_one_out" in row
    ]
    rows = sorted(rows, key=lambda row: -row[1]["shapley"])[:MOST_SITES]
    if not rows or as_number(content.get("all")) is None:
        return None
    worse = [
        name
        for name, row in rows
        if _worse(row["shapley"], row["leave_one_out"], row.get("error", 0.0))
    ]
    names = [f"site {name}" if name.isdecimal() else name for name in worse]
    words = [f"The model is worse with {name} than without." for name in names]
    # "accuracy on the test records of the simulation"
    measure = str(content.get("measure", "")).partition(" on ")[0][:40] or "accuracy"
    return ValuesView(_drawn(rows, set(worse), measure), words)


def _worse(shapley: float, left_out: float, error: float) -> bool:
    """Whether the model is worse with a site, beyond the noise."""
    return shapley + 2 * error < 0 or (not error and left_out < -0.01)


def _drawn(rows: list[tuple[str, dict[str, float]]], marked: set[str], measure: str) -> str:
    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=1.2, right=0.25, top=0.5, bottom=0.5)
        places = range(len(rows))
        shares = [row["shapley"] for _, row in rows]
        colours = [ORANGE if name in marked else BLUE for name, _ in rows]
        errors = [2 * row.get("error", 0.0) for _, row in rows]
        axes.barh(places, shares, color=colours, height=0.55, zorder=2, label="Shapley value")
        if any(errors):
            axes.errorbar(
                shares, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1, zorder=3
            )
        left_out = [row["leave_one_out"] for _, row in rows]
        axes.scatter(left_out, places, marker="D", s=26, color=INK, zorder=4, label="leave-one-out")
        axes.axvline(0, color=INK, linewidth=1)
        limit = max(0.01, *(abs(each) for each in [*shares, *left_out])) * 1.1
        low = min(0.0, *shares, *left_out)
        axes.set_xlim(max(-limit, 1.25 * low - 0.01), limit)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(places, [shorten(name, 14) for name, _ in rows])
        axes.grid(axis="x", color=FAINT)
        axes.set_axisbelow(True)
        percent_axis(axes.xaxis)
        axes.set_xlabel(f"gain in {measure}")
        legend_above(axes, 2)

    return render("site-values", 1.2 + 0.26 * max(3, math.ceil(len(rows))), draw)
