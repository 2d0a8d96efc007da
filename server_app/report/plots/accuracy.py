"""Plots of a report: accuracy against traffic, rounds and bytes; classes at the sites; features.
The same data always gives the same string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.escapes import human_bytes, percent, shorten
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.pages.svg import (
    BLUE,
    CLASS_COLOURS,
    FAINT,
    GREEN,
    INK,
    LINE,
    NAMED_CLASSES,
    NAMED_SITES,
    NUMBERED_CLASSES,
    ORANGE,
    PICTURES,
    POINTS,
    PURPLE,
    QUIET,
    accuracy_range,
    axis_name,
    bytes_axis,
    in_groups,
    legend_above,
    make_axes,
    margin,
    percent_axis,
    render,
    rows_height,
    site_rows,
)

from ...runs.reader import RunFolder
from ...runs.state import as_list, as_number, as_table

Points = NDArray[np.float64]


def accuracy_against_bytes(
    outcomes: Mapping[str, tuple[float, float | None]], ends: tuple[float, float] | None = None
) -> str:
    """Draw accuracy over uplink bytes (log).

    Args:
        outcomes: accuracy in [0, 1], and the bytes that all sites sent up, None if unknown: of this
            run, and then of methods to compare it with, by name.
        ends: accuracy of the worst and the best site, drawn as a line through our own outcome; None
            without one.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.72, right=1.92, top=0.15, bottom=0.5)
        colours = (BLUE, ORANGE, GREEN, PURPLE, QUIET)
        for place, (name, (accuracy, sent)) in enumerate(outcomes.items()):
            size = f" · {human_bytes(sent)}" if sent else ""
            label, colour = f"{name}\n{percent(accuracy)}{size}", colours[place % len(colours)]
            if sent:
                mark = {"marker": "D", "ms": 6.5} if place else {"marker": "o", "ms": 10}
                axes.plot(sent, accuracy, ls="none", color=colour, label=label, **mark)
            else:
                axes.axhline(accuracy, color=colour, lw=1, ls=(0, (4, 3)), label=label)
            if ends and sent and not place:
                axes.vlines(sent, *ends, color=colour, lw=2, alpha=0.35)
        axes.set_ylim(*accuracy_range([each for each, _ in outcomes.values()] + [*(ends or ())]))
        bytes_axis(axes, [sent for _, sent in outcomes.values() if sent])
        axes.grid(axis="y", color=FAINT)
        percent_axis(axes.yaxis)
        axes.set_xlabel("sent up by all sites together (log scale)")
        axes.set_ylabel("accuracy")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.03), labelspacing=1)

    return render("outcomes", 3.5, draw)


def class_counts(names: Sequence[str], classes: Sequence[str], counts: NDArray[np.float64]) -> str:
    """Draw counts as a heat map: with numbers if they fit, and in groups for many sites.

    Args:
        names: of the sites.
        classes: names of the classes.
        counts: records of each site and class, (n_sites, n_classes). NaN leaves a cell empty: the
            site reported no counts.

    Returns:
        The picture as an SVG string.
    """
    many, named = len(names) > NAMED_SITES, len(classes) <= NAMED_CLASSES
    numbered = not many and len(classes) <= NUMBERED_CLASSES
    longest = max((len(shorten(name, 16)) for name in classes), default=0)
    upright = named and longest > 2 and longest * len(classes) > 46
    bottom = 0.3 + (0.075 * longest + 0.05 if upright else 0.2)

    def draw(figure: Any) -> None:
        with needed_for(PICTURES):
            from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba

        left, right = 0.42 if many else margin(names), 0.25 if numbered else 0.75
        axes = make_axes(figure, left=left, right=right, top=0.3, bottom=bottom)
        grid = in_groups(in_groups(counts, 100 if many else len(names)).T, 80).T
        # More opaque is more, on a light page and on a dark one; never so much that the number in a
        # cell is hard to read. Counts are skewed; with a square-root scale small classes stay
        # visible next to large ones.
        shades = [to_rgba(BLUE, 0.03), to_rgba(BLUE, 0.5 if numbered else 1.0)]
        colours = LinearSegmentedColormap.from_list("counts", shades)
        most = float(np.nanmax(grid, initial=0)) or 1.0
        norm = PowerNorm(0.5, 0, most)
        extent = (-0.5, len(classes) - 0.5, len(names) - 0.5, -0.5)
        place: dict[str, Any] = {"extent": extent, "aspect": "auto", "interpolation": "none"}
        image = axes.imshow(grid, cmap=colours, norm=norm, **place)
        site_rows(axes, names, len(grid))
        axes.spines[:].set_visible(False)
        if named:
            texts = [shorten(name, 16) for name in classes]
            axes.set_xticks(range(len(classes)), texts, rotation=90 if upright else 0)
        axes.set_xlabel("class" if named else axis_name(len(classes), grid.shape[1], "classes"))
        if numbered:
            for row, column in np.argwhere(np.isfinite(counts)):
                count = float(counts[row, column])
                text = f"{count:.0f}" if count < 10_000 else f"{count / 1000:.0f}k"
                style = {"ha": "center", "va": "center", "fontsize": min(9, 75 / len(classes))}
                axes.text(column, row, text, color=INK if count else QUIET, **style)
            return
        box = axes.get_position()
        bar = figure.add_axes((box.x1 + 0.03, box.y0, 0.025, box.height))
        ticks = [0.0, most / 9, most * 4 / 9, most]
        figure.colorbar(image, cax=bar, ticks=ticks).outline.set_visible(False)
        bar.set_yticks(ticks, [f"{tick:,.0f}" if most >= 20 else f"{tick:.1f}" for tick in ticks])
        grouped = grid.shape != counts.shape
        bar.set_title("mean" if grouped else "records", fontsize=8.5, color=QUIET, pad=8)

    return render("counts", rows_height(len(names), 0.3 + bottom), draw)


def features(real: Points, synthetic: Points, classes: Sequence[str]) -> tuple[str, str]:
    """Draw real and synthetic features as two pictures with the same axes and colours.

    Args:
        real: features of records: two coordinates and the class index, (n, 3).
        synthetic: the same of features drawn from surrogates.
        classes: names of the classes, in the order of the labels.

    Returns:
        The picture of the real features and that of the synthetic ones, each as an SVG string.
    """
    everything = np.concatenate([real, synthetic])
    sizes = np.bincount(everything[:, 2].astype(np.int64))
    shown = sorted(np.argsort(-sizes, kind="stable")[: len(CLASS_COLOURS)])
    low, span = everything.min(0), np.maximum(np.ptp(everything, axis=0), 1e-9)

    def picture(name: str, points: Points, marker: str) -> str:
        keep = np.sort(np.random.default_rng(0).permutation(len(points))[:POINTS])
        x, y, label = points[keep].T

        def draw(figure: Any) -> None:
            axes = make_axes(figure, left=0.25, right=0.05, top=0.8, bottom=0.25)
            axes.set(xticks=[], yticks=[], xlabel="first dimension", ylabel="second dimension")
            axes.spines[:].set_visible(True)
            axes.set_xlim(low[0] - 0.06 * span[0], low[0] + 1.06 * span[0])
            axes.set_ylim(low[1] - 0.06 * span[1], low[1] + 1.06 * span[1])
            other = ~np.isin(label, shown)
            axes.plot(x[other], y[other], marker, ms=3, color=LINE, mew=0)
            for colour, index in zip(CLASS_COLOURS, shown, strict=False):
                own = label == index
                text = classes[index] if index < len(classes) else str(index)
                style = {"ms": 4, "color": colour, "alpha": 0.65, "mew": 0}
                axes.plot(x[own], y[own], marker, label=shorten(text, 18), **style)
            legend_above(axes, 3)

        return render(name, 4.6, draw)

    return picture("real", real, "o"), picture("synthetic", synthetic, "^")


COLOURS = (BLUE, ORANGE, GREEN, PURPLE, QUIET)
NAMED_STEPS = 8
ROUND = "round"


@dataclass(frozen=True)
class AccuracyStep:
    """Accuracy after one step.

    Attributes:
        name: of the step: the number of a round, or the name of a site in a chain.
        accuracy: in [0, 1].
        bytes: sent up until then; None: unknown.
    """

    name: str
    accuracy: float
    bytes: float | None


def steps(run: RunFolder) -> tuple[str, list[AccuracyStep]]:
    """The name of a run's steps, and the steps with a known accuracy."""
    hops = [as_table(hop) for hop in as_list(run.metrics.get("hops"))]
    if hops:
        total, measured = 0.0, []
        for hop in hops:
            total += as_number(hop.get("bytes")) or 0.0
            if (accuracy := as_number(hop.get("accuracy"))) is not None:
                measured.append(AccuracyStep(str(hop.get("site", "")), accuracy, total))
        return "site in the chain", measured
    rounds = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    known = []
    for entry in rounds:
        accuracy, number = as_number(entry.get("accuracy")), as_number(entry.get("round"))
        if accuracy is not None and number is not None:
            known.append(AccuracyStep(f"{number:.0f}", accuracy, as_number(entry.get("bytes_up"))))
    if len(rounds) == 1 and known and known[0].bytes is None:
        # A method that sends once: its only step has all bytes of the run.
        known = [replace(known[0], bytes=run.number("bytes", "up"))]
    return ROUND, known


def accuracy_over(
    runs: Mapping[str, Sequence[AccuracyStep]],
    what: str = ROUND,
    reference: float | None = None,
    by_bytes: bool = False,
) -> str:
    """Draw the accuracy of runs over their steps, or over the bytes sent up.

    A run of one step is a diamond, with a thin line to compare the others with.

    Args:
        runs: the steps of each run, by its name.
        what: name of the steps; those that are no rounds are named on the axis.
        reference: the accuracy of the pooled head in [0, 1], drawn as a line; None without one.
        by_bytes: whether the axis has bytes.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.72, right=0.2, top=0.15, bottom=0.5)
        for index, (label, taken) in enumerate(runs.items()):
            drawn = [step for step in taken if step.bytes or not by_bytes]
            xs = [
                float(step.bytes or 0) if by_bytes else float(step.name) if what == ROUND else place
                for place, step in enumerate(drawn, 1)
            ]
            ys, once = [step.accuracy for step in drawn], len(taken) == 1
            style = {"marker": "D", "ms": 7, "ls": "none"} if once else {"marker": "o", "ms": 4}
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(xs, ys, color=colour, lw=1.3 if index else 2, label=label, **style)
            if once and drawn:
                axes.axhline(ys[0], color=colour, lw=0.8, ls=(0, (4, 3)), alpha=0.7)
        accuracies = [step.accuracy for taken in runs.values() for step in taken]
        if reference is not None:
            axes.axhline(reference, color=QUIET, lw=1, ls=(0, (4, 3)), label="pooled head")
            accuracies.append(reference)
        axes.set_ylim(*accuracy_range(accuracies))
        percent_axis(axes.yaxis)
        axes.grid(axis="y", color=FAINT)
        axes.set_ylabel("accuracy")
        if by_bytes:
            sizes = [step.bytes for taken in runs.values() for step in taken if step.bytes]
            bytes_axis(axes, sizes)
            axes.set_xlabel("sent up by all sites together (log scale)")
            return
        axes.set_xlabel(what)
        axes.margins(x=0.1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if what != ROUND:
            names = [shorten(step.name, 12) for taken in runs.values() for step in taken]
            every = -(-len(names) // NAMED_STEPS)
            axes.set_xticks(range(1, len(names) + 1)[::every], names[::every])
        if len(runs) > 1 or reference is not None:
            axes.legend(frameon=False, fontsize=8.5, loc="lower right")

    return render("bytes" if by_bytes else "rounds", 2.8, draw)
