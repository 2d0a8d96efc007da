"""The plot of a sweep: a mean score against a setting that varies or the bytes sent, with its 95 %
interval over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.pages.svg import FAINT, INK, accuracy_range

from ...runs.scores import SCORES
from ...sweep import Summary, leading_score, named

# Colours that people with colour blindness can tell apart (Okabe & Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", INK)
# From this ratio of the largest to the smallest value on, the axis is logarithmic.
WIDE = 8
# The axis that is no setting.
BYTES = "bytes"


def draw_sweep(summaries: Sequence[Summary], over: str = "", score: str = "") -> Any:
    """A matplotlib figure of a sweep. A numerical setting, or the bytes, make the x axis, with a
    line for each combination of the others; without one, every combination is a bar.

    Args:
        summaries: one for each combination of settings.
        over: the x axis: a numerical setting of them, or "bytes"; empty for the setting with the
            most values.
        score: of `SCORES`, on the y axis; empty for AUROC where one class is so large that accuracy
            misleads, else for accuracy.

    Returns:
        The figure.

    Raises:
        ConfigError: for an axis that does not vary, or an unknown score.
        PackageError: without matplotlib.
    """
    with needed_for("the plot of a sweep"):
        from matplotlib.figure import Figure

    if score and score not in SCORES:
        raise ConfigError(f"score = {score!r}: use {', '.join(map(repr, SCORES))}")
    score = score or leading_score(summaries)
    shown = [each for each in summaries if each.means.get(score) is not None]
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
            _lines(axes, axis, most, shown, score)
        else:
            _bars(axes, shown, score)
    else:
        axes.text(0.5, 0.5, f"no run has an {SCORES[score]}", ha="center", va="center")
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


def _lines(axes: Any, axis: str, most: str, shown: Sequence[Summary], score: str) -> None:
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
        _line(axes, axis, name, points, COLOURS[number % len(COLOURS)], score)
    values = [_place(axis, each) for each in shown if not _has_no_privacy(axis, each)]
    if values and min(values) > 0 and max(values) / min(values) >= WIDE:
        axes.set_xscale("log")
        if axis != BYTES:
            axes.set_xticks(sorted(set(values)), [f"{value:g}" for value in sorted(set(values))])
            axes.minorticks_off()
    axes.set_xlabel("bytes sent by all sites" if axis == BYTES else axis)
    axes.set_ylabel(f"{SCORES[score]}, mean and 95 % interval")
    axes.set_ylim(*accuracy_range([end for each in shown for end in _interval(each, score)]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", color=FAINT)
    # A line without a name is the only one.
    if any(text for text in axes.get_legend_handles_labels()[1] if not text.startswith("_")):
        axes.legend(frameon=False, fontsize=8.5)


def _line(
    axes: Any, axis: str, name: str, points: Sequence[Summary], colour: str, score: str
) -> None:
    drawn = []
    for each in sorted(points, key=lambda each: _place(axis, each)):
        if _has_no_privacy(axis, each):
            label = f"{name}, no privacy".removeprefix(", ")
            axes.axhline(_mean(each, score), color=colour, ls="--", lw=1, label=label)
        else:
            drawn.append(each)
    if drawn:
        places, means = [_place(axis, each) for each in drawn], [_mean(e, score) for e in drawn]
        style = {"color": colour, "marker": "o", "ms": 5, "elinewidth": 1.4}
        axes.errorbar(places, means, _beside(drawn, score), label=name, **style)


def _bars(axes: Any, shown: Sequence[Summary], score: str) -> None:
    places = range(len(shown))
    means = [_mean(each, score) for each in shown]
    axes.barh(places, means, xerr=_beside(shown, score), color=COLOURS[0], height=0.6)
    axes.set_ylim(-0.5, max(4, len(shown)) - 0.5)
    axes.set_yticks(places, [named(each.varied) or "all runs" for each in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(SCORES[score])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)


def _has_no_privacy(axis: str, summary: Summary) -> bool:
    """Whether a point has no place on an axis of epsilon: 0 stands for no privacy, which is an
    infinite epsilon.
    """
    return axis == "epsilon" and summary.varied[axis] == 0


def _place(axis: str, summary: Summary) -> float:
    """Where a point lies on the x axis."""
    return float(summary.bytes or 0) if axis == BYTES else float(summary.varied[axis])


def _mean(summary: Summary, score: str) -> float:
    return summary.means.get(score) or 0.0


def _interval(summary: Summary, score: str) -> tuple[float, float]:
    """The 95 % interval of the mean, by Student's t, within [0, 1]; of width zero below two runs."""
    from scipy.special import stdtrit

    _, deviation, runs = summary.spreads[score]
    mean, half = _mean(summary, score), 0.0
    if deviation is not None:
        half = float(stdtrit(runs - 1, 0.975)) * deviation / math.sqrt(runs)
    # The R² of numbers may be below zero.
    return min(mean, max(0.0, mean - half)), min(1.0, mean + half)


def _beside(points: Sequence[Summary], score: str) -> list[list[float]]:
    """Lengths of error bars below and above."""
    ends = [(_mean(each, score), *_interval(each, score)) for each in points]
    return [[mean - low for mean, low, _ in ends], [high - mean for mean, _, high in ends]]
