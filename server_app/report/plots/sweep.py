"""The plot of a sweep: mean accuracy against a setting that varies or the bytes sent, with its 95 %
interval over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.pages.svg import FAINT, INK, accuracy_range
from fedsurrogate.server_app.sweep import Summary, named

# Colours that people with colour blindness can tell apart (Okabe & Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", INK)
# From this ratio of the largest to the smallest value on, the axis is logarithmic.
WIDE = 8
# The axis that is no setting.
BYTES = "bytes"


def draw_sweep(summaries: Sequence[Summary], over: str = "") -> Any:
    """A matplotlib figure of a sweep. A numerical setting, or the bytes, make the x axis, with a
    line for each combination of the others; without one, every combination is a bar.

    Args:
        summaries: one for each combination of settings.
        over: the x axis: a numerical setting of them, or "bytes"; empty for the setting with the
            most values.

    Returns:
        The figure.

    Raises:
        ConfigError: for an axis that does not vary.
        PackageError: without matplotlib.
    """
    with needed_for("the plot of a sweep"):
        from matplotlib.figure import Figure

    shown = [each for each in summaries if each.accuracy is not None]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    if shown:
        found = _numerical(shown)
        if over and over not in {*found, BYTES}:
            raise ConfigError(
                f"over = {over!r}: the sweep has no two values of it; use "
                f"{', '.join(map(repr, [*found, BYTES]))}"
            )
        most = max(found, key=lambda key: found[key], default="")
        if axis := over or most:
            _lines(axes, axis, most, shown)
        else:
            _bars(axes, shown)
    else:
        axes.text(0.5, 0.5, "no run has an accuracy", ha="center", va="center")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _numerical(shown: Sequence[Summary]) -> dict[str, int]:
    """The numerical settings with two values or more, and how many they have."""
    counts = {}
    for key in shown[0].varied:
        values = [each.varied[key] for each in shown]
        if not any(isinstance(value, bool | str) for value in values) and len(set(values)) > 1:
            counts[key] = len(set(values))
    return counts


def _lines(axes: Any, axis: str, most: str, shown: Sequence[Summary]) -> None:
    """axis: of the plot. most: the setting with the most values, whose values a line over the bytes
    joins.
    """
    lines: dict[str, list[Summary]] = {}
    joined = most if axis == BYTES else axis
    for each in shown:
        lines.setdefault(
            named({key: value for key, value in each.varied.items() if key != joined}), []
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
        points.sort(key=lambda each: _place(axis, each))
        places = [_place(axis, each) for each in points]
        means = [each.accuracy or 0.0 for each in points]
        axes.plot(places, means, color=colour, marker="o", ms=5, label=name)
        if any(off := [_half_width(each) for each in points]):
            low = [mean - half for mean, half in zip(means, off, strict=True)]
            high = [mean + half for mean, half in zip(means, off, strict=True)]
            axes.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
            if len(points) == 1:
                axes.errorbar(places, means, off, color=colour, capsize=3)
    values = [_place(axis, each) for each in shown if not _has_no_privacy(axis, each)]
    if min(values) > 0 and max(values) / min(values) >= WIDE:
        axes.set_xscale("log")
        if axis != BYTES:
            axes.set_xticks(sorted(set(values)), [f"{value:g}" for value in sorted(set(values))])
            axes.minorticks_off()
    axes.set_xlabel("bytes sent by all sites" if axis == BYTES else axis)
    axes.set_ylabel("accuracy, mean and 95 % interval")
    axes.set_ylim(*_limits(shown))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", color=FAINT)
    if any(lines) or len(values) < len(shown):
        axes.legend(frameon=False, fontsize=8.5)


def _bars(axes: Any, shown: Sequence[Summary]) -> None:
    places = range(len(shown))
    accuracies, off = [each.accuracy for each in shown], [_half_width(each) for each in shown]
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
    spread = [(each.accuracy or 0.0, _half_width(each)) for each in shown]
    return accuracy_range(
        [bound for mean, off in spread for bound in (max(0.0, mean - off), min(1.0, mean + off))]
    )


def _place(axis: str, summary: Summary) -> float:
    """Where a point lies on the x axis."""
    return float(summary.bytes or 0) if axis == BYTES else float(summary.varied[axis])


def _half_width(summary: Summary) -> float:
    """Half of the 95 % interval of the mean, by Student's t; 0 below two runs."""
    if summary.deviation is None:
        return 0.0
    from scipy.special import stdtrit

    quantile = float(stdtrit(summary.runs - 1, 0.975))
    return quantile * summary.deviation / math.sqrt(summary.runs)
