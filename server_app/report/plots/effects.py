"""Plot of what each site changes: what it costs the others, and what it gains itself."""

from __future__ import annotations

from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    FAINT,
    ORANGE,
    legend_above,
    make_axes,
    percent_axis,
    render,
)
from fedsurrogate.server_app.runs.json_values import as_numbers, as_table, natural_order
from fedsurrogate.server_app.runs.reader import RunFolder

MOST_SITES = 40


def effects(run: RunFolder) -> str | None:
    """Draw two bars a site; None if no effect is measured."""
    card = as_table(run.metrics.get("card"))
    measured = {name: as_numbers(row) for name, row in as_table(card.get("effects")).items()}
    measured = {name: row for name, row in measured.items() if {"harm", "gain"} <= row.keys()}
    if not any(value for row in measured.values() for value in (row["harm"], row["gain"])):
        return None
    # Of many sites, those that change most.
    most = sorted(measured, key=lambda name: -max(measured[name]["harm"], measured[name]["gain"]))
    sites = sorted(most[:MOST_SITES], key=natural_order)

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=1.05, right=0.25, top=0.5, bottom=0.5)
        bars = (("harm", "costs the others", ORANGE, -0.2), ("gain", "gains itself", BLUE, 0.2))
        for key, label, colour, shift in bars:
            rows = [row + shift for row in range(len(sites))]
            values = [measured[site][key] for site in sites]
            axes.barh(rows, values, 0.36, color=colour, label=label, zorder=3)
        axes.set_ylim(len(sites) - 0.5, -0.5)
        axes.set_yticks(range(len(sites)), [shorten(site, 12) for site in sites])
        axes.grid(axis="x", color=FAINT)
        percent_axis(axes.xaxis)
        axes.set_xlabel("points")
        axes.set_ylabel("site")
        legend_above(axes, 2)

    return render("effects", 1.1 + 0.34 * len(sites), draw)
