"""Plot of the sites as points, so that the distance of two points is about that of their
surrogates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import BLUE, FAINT, ORANGE, QUIET, apart, make_axes, render

HEIGHT = 3.4
# From a point to the centre of its label, as a share of the height.
LABEL = 0.06
Point = tuple[float, float]


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
        x, y = ([point[axis] for point in points] for axis in (0, 1))
        width = max(max(x) - min(x), max(y) - min(y), 1e-6)
        pad = 0.15 * width
        middle = [(max(values) + min(values)) / 2 for values in (x, y)]
        for set_limits, centre, share in (
            (axes.set_xlim, middle[0], 1.0),
            (axes.set_ylim, middle[1], 0.65),
        ):
            half = (
                max(width * share / 2, max(abs(v - centre) for v in (x if share == 1.0 else y)))
                + pad
            )
            set_limits(centre - half, centre + half)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set(xlabel="standard deviations within classes", ylabel="the same unit")
        colours = [ORANGE if name in marked else BLUE for name in names]
        axes.scatter(x, y, s=38, c=colours, zorder=3)
        low, high = axes.get_xlim(), axes.get_ylim()
        across, up = (high_ - low_ for low_, high_ in (low, high))
        shown = [shorten(name, 18) for name in names]
        places = [((a - low[0]) / across, (b - high[0]) / up) for a, b in zip(x, y, strict=True)]
        sizes = [(0.018 * len(name) + 0.01, 0.06) for name in shown]
        wanted = [_label(place, size, places) for place, size in zip(places, sizes, strict=True)]
        for name, (a, b), colour in zip(
            shown, apart(wanted, sizes, (1.0, 1.0)), colours, strict=True
        ):
            ink = colour if colour == ORANGE else QUIET
            axes.text(
                a,
                b,
                name,
                transform=axes.transAxes,
                ha="center",
                va="center",
                fontsize=9,
                color=ink,
                zorder=4,
            )

    return render("site-map", HEIGHT, draw)


def _label(place: Point, size: Point, places: Sequence[Point]) -> Point:
    """The centre of the label of the point at `place`: above it, or below where another point is in
    the way.
    """
    x, y = place
    taken = any(abs(a - x) < size[0] and 0 < b - y < LABEL + size[1] for a, b in places)
    return x, y - LABEL if taken else y + LABEL
