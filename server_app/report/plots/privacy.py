"""Plot of signal over noise: from plain data to one inline SVG string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LINE,
    NAMED_SITES,
    ORANGE,
    QUIET,
    make_axes,
    margin,
    render,
)

STATISTICS = {
    "counts": ("class sizes", GREEN),
    "sums": ("class sums", BLUE),
    "squares": ("second moments", ORANGE),
}
# Smaller estimates are all drawn here: they only show that noise dominates.
LEAST = 0.1
ROW = 0.17  # inches


def noise_against_signal(
    names: Sequence[str], signals: Mapping[str, Sequence[float | None]]
) -> str:
    """Draw signal over noise (log) by site and statistic, each as a line that starts at a ratio of
    one.

    Args:
        names: of the sites.
        signals: by statistic (a key of STATISTICS), a number or None for every site of `names`.

    Returns:
        The picture as an SVG string.
    """
    shown = [name for name in STATISTICS if name in signals]
    many = len(names) > NAMED_SITES
    pitch = ROW * len(shown) + 0.14
    values = [value for name in shown for value in signals[name] if value is not None]
    highest = max([10.0, *(1.6 * value for value in values)])

    def draw(figure: Any) -> None:
        axes = make_axes(
            figure, left=0.42 if many else margin(names), right=0.25, top=0.52, bottom=0.5
        )
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xlim(0.8 * LEAST, highest)
        ticks = [10.0**power for power in range(-1, 8) if 10.0**power <= highest]
        axes.set_xticks(
            ticks, [f"{tick:,g}" if tick > LEAST else f"{LEAST:g} or less" for tick in ticks]
        )
        axes.set_xlabel("signal over noise (log scale)")
        axes.axvspan(0.8 * LEAST, 1, color=FAINT, lw=0)
        axes.axvline(1, color=INK, lw=1.3, ls=(0, (4, 2)))
        axes.spines["left"].set_visible(False)
        rows = len(names)
        axes.set_ylim((rows - 0.5, -0.5) if not many else (rows, -1))
        if many:
            axes.set_yticks([])
            axes.set_ylabel(f"{rows:,} sites")
        else:
            axes.set_yticks(range(rows), [shorten(name, 22) for name in names])
            axes.set_ylabel("site")
            for row in range(1, rows):
                axes.axhline(row - 0.5, color=LINE, lw=0.6)
        for place, name in enumerate(shown):
            text, colour = STATISTICS[name]
            offset = 0.0 if many else (place - (len(shown) - 1) / 2) * ROW / pitch
            drawn = [
                (row + offset, value)
                for row, value in enumerate(signals[name])
                if value is not None
            ]
            points = [max(value, LEAST) for _, value in drawn]
            heights = [height for height, _ in drawn]
            if not many:
                axes.hlines(heights, 1, points, color=colour, lw=2, alpha=0.5)
                for (height, value), x in zip(drawn, points, strict=True):
                    label = (
                        ""
                        if value <= LEAST
                        else f"{value:.1f}"
                        if value < 9.95
                        else f"{value:,.0f}"
                    )
                    side = -1 if x < 1 else 1
                    near = {
                        "textcoords": "offset points",
                        "va": "center",
                        "ha": "left" if side > 0 else "right",
                    }
                    axes.annotate(
                        label, (x, height), (6 * side, 0), fontsize=7.5, color=QUIET, **near
                    )
            axes.plot(points, heights, "o", ms=2 if many else 5.5, color=colour, mew=0, label=text)
        # Aligned on the right, because long site names shift the axes to the right.
        where = {
            "loc": "lower right",
            "bbox_to_anchor": (1.0, 1.0),
            "borderaxespad": 1.5,
            "markerscale": 2.5 if many else 1,
        }
        axes.legend(
            ncols=3, frameon=False, handletextpad=0.1, columnspacing=1.2, fontsize=9, **where
        )
        high = {
            "transform": axes.get_xaxis_transform(),
            "va": "bottom",
            "fontsize": 8.5,
            "color": QUIET,
        }
        axes.text(0.88, 1.015, "noise is larger", ha="right", **high)
        axes.text(1.14, 1.015, "signal is larger", ha="left", **high)

    return render("privacy", 1.02 + (3.0 if many else pitch * len(names)), draw)
