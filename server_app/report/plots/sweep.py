"""The plot of a sweep: accuracy against the setting that varies, mean and standard deviation over
the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.pages.svg import FAINT, INK, accuracy_range
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.sweep import Summary, named

# Colours that people with colour blindness can tell apart (Okabe & Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", INK)
# From this ratio of the largest to the smallest value on, the axis is logarithmic.
WIDE = 8


def draw_sweep(summaries: Sequence[Summary]) -> Any:
    """A matplotlib figure of a sweep. A numerical setting makes the x axis, with a line for each
    combination of the others; without one, every combination is a bar.

    Args:
        summaries: one for each combination of settings.

    Returns:
        The figure.

    Raises:
        PackageError: without matplotlib.
    """
    with needed_for("the plot of a sweep"):
        from matplotlib.figure import Figure

    shown = [each for each in summaries if each.accuracy is not None]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    if shown:
        axis = _axis(shown)
        if axis:
            _lines(axes, axis, shown)
        else:
            _bars(axes, shown)
    else:
        axes.text(0.5, 0.5, "no run has an accuracy", ha="center", va="center")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _axis(shown: Sequence[Summary]) -> str:
    """The numerical setting with the most values; empty if none has two."""
    counts = {}
    for key in shown[0].varied:
        values = [each.varied[key] for each in shown]
        if not any(isinstance(value, bool | str) for value in values) and len(set(values)) > 1:
            counts[key] = len(set(values))
    return max(counts, key=lambda key: counts[key], default="")


def _lines(axes: Any, axis: str, shown: Sequence[Summary]) -> None:
    lines: dict[str, list[Summary]] = {}
    for each in shown:
        lines.setdefault(
            named({key: value for key, value in each.varied.items() if key != axis}), []
        ).append(each)
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        for each in points:
            if _has_no_privacy(axis, each):
                axes.axhline(
                    each.accuracy,
                    color=colour,
                    ls="--",
                    lw=1,
                    label=f"{name}, no privacy".removeprefix(", "),
                )
        points = [each for each in points if not _has_no_privacy(axis, each)]
        points.sort(key=lambda each: _number(each.varied[axis]))
        off = [each.deviation or 0 for each in points]
        places, means = (
            [_number(each.varied[axis]) for each in points],
            [each.accuracy for each in points],
        )
        axes.errorbar(
            places,
            means,
            off if any(off) else None,
            color=colour,
            marker="o",
            ms=5,
            capsize=3,
            label=name,
        )
    values = [_number(each.varied[axis]) for each in shown if not _has_no_privacy(axis, each)]
    if min(values) > 0 and max(values) / min(values) >= WIDE:
        axes.set_xscale("log")
        axes.set_xticks(sorted(set(values)), [f"{value:g}" for value in sorted(set(values))])
        axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.set_ylabel("accuracy")
    axes.set_ylim(*_limits(shown))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", color=FAINT)
    if any(lines) or len(values) < len(shown):
        axes.legend(frameon=False, fontsize=8.5)


def _bars(axes: Any, shown: Sequence[Summary]) -> None:
    places = range(len(shown))
    accuracies, off = [each.accuracy for each in shown], [each.deviation or 0 for each in shown]
    axes.barh(
        places, accuracies, xerr=off if any(off) else None, color=COLOURS[0], height=0.6, capsize=3
    )
    axes.set_ylim(-0.5, max(4, len(shown)) - 0.5)
    axes.set_yticks(places, [named(each.varied) or "all runs" for each in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy")
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)


def _has_no_privacy(axis: str, summary: Summary) -> bool:
    """Whether a point has no place on an axis of epsilon: 0 stands for no privacy, which is an
    infinite epsilon.
    """
    return axis == "epsilon" and summary.varied[axis] == 0


def _limits(shown: Sequence[Summary]) -> tuple[float, float]:
    spread = [(each.accuracy or 0.0, each.deviation or 0.0) for each in shown]
    return accuracy_range(
        [bound for mean, off in spread for bound in (mean - off, min(1.0, mean + off))]
    )


def _number(value: Scalar) -> float:
    return float(value)
