"""Plot of a generator's value at each site: accuracy of heads from own records, synthetic records,
and both.
"""

from __future__ import annotations

from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    FAINT,
    QUIET,
    accuracy_range,
    legend_above,
    make_axes,
    percent_axis,
    render,
)
from fedsurrogate.server_app.report.plots.progress import COLOURS
from fedsurrogate.server_app.runs.json_values import as_numbers, as_table, natural_order
from fedsurrogate.server_app.runs.reader import RunFolder

SOURCES = {"local": "own records", "synthetic": "synthetic", "mixed": "both, mixed"}
MARKS = ("o", "s", "D")
MOST_SITES = 40


def downstream(run: RunFolder) -> str | None:
    """Draw every site's three accuracies and the weight of its own head; None if no site has
    reported them.
    """
    reported = {
        name: as_numbers(row) for name, row in as_table(run.metrics.get("downstream")).items()
    }
    reported = {
        name: row
        for name, row in reported.items()
        if all(f"accuracy-{source}" in row for source in SOURCES)
    }
    sites = sorted(reported, key=natural_order)[:MOST_SITES]
    if not sites:
        return None

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=1.05, right=1.0, top=0.5, bottom=0.5)
        for index, (source, label) in enumerate(SOURCES.items()):
            values = [reported[site][f"accuracy-{source}"] for site in sites]
            axes.scatter(
                values,
                range(len(sites)),
                color=COLOURS[index],
                marker=MARKS[index],
                s=34,
                label=label,
                zorder=3,
                alpha=0.9,
            )
        low, high = accuracy_range(
            [reported[site][f"accuracy-{source}"] for site in sites for source in SOURCES]
        )
        axes.set_xlim(low, high)
        axes.set_ylim(len(sites) - 0.5, -0.5)
        axes.set_yticks(range(len(sites)), [shorten(site, 12) for site in sites])
        axes.grid(axis="both", color=FAINT)
        percent_axis(axes.xaxis)
        axes.set_xlabel("accuracy on the site's own test data")
        axes.set_ylabel("site")
        for row, site in enumerate(sites):
            if (share := reported[site].get("share")) is not None:
                at = axes.get_yaxis_transform()
                axes.text(
                    1.03,
                    row,
                    f"λ = {share:.1f}",
                    transform=at,
                    va="center",
                    color=QUIET,
                    fontsize=8.5,
                )
        legend_above(axes, 3)

    return render("downstream", 1.2 + 0.26 * max(3, len(sites)), draw)
