"""Plot of the trust radii of a FedLAP run: of each site's landscape, and of the coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsurrogate.common.pages.svg import BLUE, FAINT, INK, QUIET, make_axes, render
from fedsurrogate.server_app.runs.json_values import (
    as_list,
    as_number,
    as_numbers,
    as_table,
    natural_order,
)
from fedsurrogate.server_app.runs.reader import RunFolder

# The legend counts the sites if there are more.
NAMED = 12


def radii(run: RunFolder) -> str | None:
    """Draw by round each site's radius, the radius used, and the model's movement; None without
    such rounds.
    """
    rounds = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    rounds = [entry for entry in rounds if as_numbers(entry.get("radii"))]
    if not rounds:
        return None
    numbers = [as_number(entry.get("round")) or 0.0 for entry in rounds]
    reported = [as_numbers(entry.get("radii")) for entry in rounds]
    sites = sorted({site for each in reported for site in each}, key=natural_order)

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.6, right=0.1, top=0.15, bottom=0.5)
        for site in sites:
            points = [
                (n, each[site]) for n, each in zip(numbers, reported, strict=True) if site in each
            ]
            axes.plot(*zip(*points, strict=True), color=QUIET, lw=0.8, marker=".", ms=4, alpha=0.6)
        for key, colour, label in (("radius", INK, "used"), ("moved", BLUE, "moved")):
            line = [as_number(entry.get(key)) for entry in rounds]
            axes.plot(
                numbers,
                [np.nan if v is None else v for v in line],
                color=colour,
                lw=2,
                marker="o",
                ms=4,
                label=label,
            )
        axes.plot(
            [],
            [],
            color=QUIET,
            lw=0.8,
            marker=".",
            label="a site" if len(sites) <= NAMED else f"{len(sites)} sites",
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.grid(axis="y", color=FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel("distance from the round's model")
        axes.legend(frameon=False, fontsize=8.5)

    return render("radii", 2.8, draw)
