"""Plot of the sites as points, so that the distance of two points is about that of their
surrogates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import BLUE, FAINT, ORANGE, QUIET, make_axes, render

HEIGHT = 3.4


def draw_site_map(
    names: Sequence[str], points: Sequence[Sequence[float]], marked: Collection[str]
) -> str:
    """Draw sites as points.

    Args:
        names: of the sites.
        points: two coordinates of each site, in standard deviations within classes.
        marked: names of the sites that have another colour.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.72, right=0.2, top=0.15, bottom=0.5)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set(xlabel="standard deviations within classes", ylabel="the same unit")
        x, y = ([point[axis] for point in points] for axis in (0, 1))
        axes.scatter(x, y, s=38, c=[ORANGE if each in marked else BLUE for each in names], zorder=3)
        axes.margins(0.15)
        axes.set_aspect("equal", adjustable="datalim")
        # Neighbours from left to right have their names above and below.
        for place, at in enumerate(sorted(range(len(names)), key=lambda each: x[each])):
            axes.annotate(
                shorten(names[at], 18),
                (x[at], y[at]),
                xytext=(0, 7 if place % 2 == 0 else -14),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=ORANGE if names[at] in marked else QUIET,
            )

    return render("site-map", HEIGHT, draw)
