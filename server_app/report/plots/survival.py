"""The plot of survival by third of the risk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    GREEN,
    ORANGE,
    legend_above,
    make_axes,
    margin,
    percent_axis,
    render,
)

# Of a curve in evaluation.json: survival, its limits, and numbers at risk, one for each bin.
Curve = Mapping[str, Sequence[float | None]]
COLOURS = (GREEN, BLUE, ORANGE)


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
                axes.fill_between(times, [1.0, *low], [1.0, *high], color=colour, alpha=0.14, lw=0)
            below = {"textcoords": "offset points", "fontsize": 8.5, "color": colour}
            down = -46 - 15 * place
            for time, count in zip(edges, _known(curve, "at_risk"), strict=False):
                at: dict[str, Any] = {
                    "xy": (time, 0),
                    "xycoords": ("data", "axes fraction"),
                    "xytext": (0, down),
                }
                axes.annotate(f"{count:,.0f}", ha="center", **at, **below)
            name_at: dict[str, Any] = {
                "xy": (0, 0),
                "xycoords": "axes fraction",
                "xytext": (-18, down),
            }
            axes.annotate(shorten(name, 22), ha="right", **name_at, **below)
        axes.set(xlim=(0, 1.01 * edges[-1]), ylim=(0, 1.02))
        percent_axis(axes.yaxis)
        axes.set_ylabel("without the event")
        axes.set_xlabel(f"time in {unit}" if unit else "time")
        legend_above(axes, 3)

    return render("evaluation-survival", 4.2, draw)


def _known(curve: Curve, name: str) -> list[float]:
    return [each for each in curve.get(name, ()) if each is not None]
