"""Plots of a report: from plain data to one inline SVG string. The same data always gives the same
string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.number_format import human_bytes, human_seconds, percent, shorten
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
    apart,
    axis_name,
    bytes_axis,
    in_groups,
    make_axes,
    margin,
    percent_axis,
    pitch,
    render,
    rows_height,
    site_rows,
)

REST = "everything else"


@dataclass(frozen=True)
class SiteResult:
    """Result of one method.

    Attributes:
        name: of the method.
        accuracy: in [0, 1].
        bytes: that its sites send up; None: unknown.
        ours: whether it is the run of the report.
    """

    name: str
    accuracy: float
    bytes: float | None
    ours: bool = False


@dataclass(frozen=True)
class PlotPoints:
    """Features in two dimensions.

    Attributes:
        x: the first coordinate, (n,).
        y: the second coordinate, (n,).
        label: the class index, (n,).
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    label: NDArray[np.int64]


def accuracy_against_bytes(
    outcomes: Sequence[SiteResult], ends: tuple[float, float] | None = None
) -> str:
    """Draw accuracy over uplink bytes (log).

    Args:
        outcomes: of this run and of methods to compare it with.
        ends: accuracy of the worst and the best site, drawn as a line through our own outcome; None
            without one.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.72, right=1.92, top=0.15, bottom=0.5)
        values = [o.accuracy for o in outcomes] + list(ends or ())
        axes.set_ylim(*accuracy_range(values))
        bytes_axis(axes, [o.bytes for o in outcomes if o.bytes])
        axes.grid(axis="y", color=FAINT)
        percent_axis(axes.yaxis)
        axes.set_xlabel("sent up by all sites together (log scale)")
        axes.set_ylabel("accuracy")
        colours = iter((ORANGE, GREEN, PURPLE, QUIET))
        height = float((figure.get_size_inches() * axes.get_position().size)[1])
        low, high = axes.get_ylim()
        wanted = [(0.0, (o.accuracy - low) / (high - low) * height) for o in outcomes]
        placed = apart(wanted, [(1.0, 0.42)] * len(outcomes), (1.0, height))
        for outcome, (_, label_y) in zip(outcomes, placed, strict=True):
            colour = BLUE if outcome.ours else next(colours)
            y = label_y / height
            point = (axes.get_xlim()[1], outcome.accuracy)
            if outcome.bytes:
                point = (outcome.bytes, outcome.accuracy)
                axes.plot(
                    *point,
                    marker="o" if outcome.ours else "D",
                    ms=10 if outcome.ours else 6.5,
                    color=colour,
                )
                if outcome.ours and ends:
                    axes.plot([outcome.bytes] * 2, ends, color=colour, lw=2, alpha=0.35)
            else:
                axes.axhline(outcome.accuracy, color=colour, lw=1, ls=(0, (4, 3)))
            start = axes.transData.transform(point)
            elbow = axes.transAxes.transform([(1.02, y), (1.06, y)])
            path = axes.transAxes.inverted().transform([start, *elbow])
            axes.plot(
                *path.T,
                transform=axes.transAxes,
                clip_on=False,
                color=colour,
                lw=0.8,
                alpha=0.6,
                zorder=1,
            )
            text = {"transform": axes.transAxes, "clip_on": False}
            axes.text(
                1.075, y + 0.005, outcome.name, weight="bold", color=colour, va="bottom", **text
            )
            size = f" · {human_bytes(outcome.bytes)}" if outcome.bytes else ""
            axes.text(
                1.075, y - 0.005, percent(outcome.accuracy) + size, color=QUIET, va="top", **text
            )

    return render("outcomes", 3.5, draw)


def site_accuracy(
    names: Sequence[str],
    accuracy: Sequence[float | None],
    notes: Sequence[str],
    line: tuple[str, float] | None,
) -> str:
    """Draw one bar per site, top to bottom, from 0 to 100%.

    Args:
        names: of the sites, from top to bottom.
        accuracy: of each site, in [0, 1]; None for a site without one.
        notes: a text for each site: the number of its test records, or why it has none.
        line: name and value of an accuracy in [0, 1] that is drawn as a line through all bars; None
            without one.

    Returns:
        The picture as an SVG string.
    """
    many = len(names) > NAMED_SITES

    def draw(figure: Any) -> None:
        axes = make_axes(
            figure, left=margin(names) if not many else 0.42, right=1.15, top=0.3, bottom=0.5
        )
        site_rows(axes, names)
        axes.set_xlim(0, 1)
        percent_axis(axes.xaxis)
        axes.set_xlabel("accuracy on the site's own test data")
        axes.grid(axis="x", color=FAINT)
        axes.set_axisbelow(True)
        values = np.array([a if a is not None else 0.0 for a in accuracy])
        if many:
            axes.stairs(
                values,
                np.arange(len(values) + 1) - 0.5,
                orientation="horizontal",
                fill=True,
                color=BLUE,
            )
            if unmeasured := sum(a is None for a in accuracy):
                axes.text(
                    0.01,
                    len(values) - 0.5 - unmeasured / 2,
                    f"{unmeasured:,} not measured",
                    color=ORANGE,
                    va="center",
                )
        else:
            axes.barh(range(len(values)), values, height=0.68, color=BLUE)
            for row, (value, note) in enumerate(zip(accuracy, notes, strict=True)):
                if value is None:
                    axes.text(0.01, row, shorten(note, 40), color=ORANGE, va="center", fontsize=9)
                    continue
                axes.text(1.02, row, f"{percent(value)} {note}".strip(), va="center", fontsize=9)
        if line:
            axes.axvline(line[1], color=INK, lw=1.3, ls=(0, (4, 2)))
            side = "right" if line[1] > 0.75 else "left" if line[1] < 0.25 else "center"
            axes.set_title(
                f"{line[0]} {percent(line[1])}",
                x=line[1],
                ha=side,
                pad=4,
                fontsize=9,
                weight="bold",
            )

    return render("accuracy", rows_height(len(names), 0.8), draw)


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
    many = len(names) > NAMED_SITES
    named = len(classes) <= NAMED_CLASSES
    longest = max((len(shorten(c, 16)) for c in classes), default=0)
    upright = longest > 2 and named and longest * len(classes) > 46
    bottom = 0.3 + (0.075 * longest + 0.05 if upright else 0.2)

    def draw(figure: Any) -> None:
        with needed_for(PICTURES):
            from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba

        numbered = not many and len(classes) <= NUMBERED_CLASSES
        left = 0.42 if many else margin(names)
        axes = make_axes(
            figure, left=left, right=0.25 if numbered else 0.75, top=0.3, bottom=bottom
        )
        grid = in_groups(in_groups(counts, 100 if many else len(names)).T, 80).T
        colours = LinearSegmentedColormap.from_list(
            "counts", [to_rgba(BLUE, 0.03), to_rgba(BLUE, 0.5 if numbered else 1.0)]
        )
        # More opaque is more, on a light page and on a dark one; never so much that the number in a
        # cell is hard to read. Counts are skewed; with a square-root scale small classes stay
        # visible next to large ones.
        most = float(np.nanmax(grid, initial=0)) or 1.0
        norm = PowerNorm(0.5, 0, most)
        grouped = grid.shape != counts.shape
        if named and not many:
            edges = [np.arange(size + 1) - 0.5 for size in (len(classes), len(names))]
            image = axes.pcolormesh(
                *edges, grid, cmap=colours, norm=norm, edgecolors="white", linewidth=1
            )
        else:
            extent = (-0.5, len(classes) - 0.5, len(names) - 0.5, -0.5)
            image = axes.imshow(
                grid, cmap=colours, norm=norm, aspect="auto", interpolation="none", extent=extent
            )
        site_rows(axes, names, len(grid))
        axes.set_xlim(-0.5, len(classes) - 0.5)
        axes.spines[:].set_visible(False)
        if named:
            axes.set_xticks(
                range(len(classes)),
                [shorten(c, 16) for c in classes],
                rotation=90 if upright else 0,
            )
        axes.set_xlabel(axis_name(len(classes), grid.shape[1], "classes") if not named else "class")
        if numbered:
            size = min(9, 27 * pitch(len(names)), 75 / len(classes))
            for row, column in np.argwhere(np.isfinite(counts)):
                count = float(counts[row, column])
                colour = INK if count else QUIET
                text = f"{count:.0f}" if count < 10_000 else f"{count / 1000:.0f}k"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)
            return
        box = axes.get_position()
        bar = figure.add_axes((box.x1 + 0.03, box.y0, 0.025, box.height))
        ticks = [0.0, most / 9, most * 4 / 9, most]
        figure.colorbar(image, cax=bar, ticks=ticks).outline.set_visible(False)
        bar.set_yticks(ticks, [f"{tick:,.0f}" if most >= 20 else f"{tick:.1f}" for tick in ticks])
        bar.set_title("mean" if grouped else "records", fontsize=8.5, color=QUIET, pad=8)

    return render("counts", rows_height(len(names), 0.3 + bottom), draw)


def features(real: PlotPoints, synthetic: PlotPoints, classes: Sequence[str]) -> tuple[str, str]:
    """Draw real and synthetic features as two pictures with the same axes and colours.

    Args:
        real: features of records.
        synthetic: features drawn from surrogates.
        classes: names of the classes, in the order of the labels.

    Returns:
        The picture of the real features and that of the synthetic ones, each as an SVG string.
    """
    everything = np.concatenate([real.label, synthetic.label])
    shown = np.argsort(-np.bincount(everything, minlength=1), kind="stable")[: len(CLASS_COLOURS)]
    colour = {int(index): CLASS_COLOURS[place] for place, index in enumerate(sorted(shown))}
    spread = [
        np.concatenate([getattr(real, axis), getattr(synthetic, axis)]) for axis in ("x", "y")
    ]
    lows, spans = [float(v.min()) for v in spread], [max(float(np.ptp(v)), 1e-9) for v in spread]

    def picture(name: str, points: PlotPoints, marker: str) -> str:
        keep = np.sort(np.random.default_rng(0).permutation(len(points.x))[:POINTS])
        x, y, label = points.x[keep], points.y[keep], points.label[keep]

        def draw(figure: Any) -> None:
            axes = make_axes(figure, left=0.25, right=0.05, top=0.05, bottom=0.25)
            axes.set(xticks=[], yticks=[], xlabel="first dimension", ylabel="second dimension")
            axes.spines[:].set_visible(True)
            for setter, low, span in zip((axes.set_xlim, axes.set_ylim), lows, spans, strict=True):
                setter(low - 0.06 * span, low + 1.06 * span)
            other = ~np.isin(label, list(colour))
            axes.plot(x[other], y[other], marker, ms=3, color=LINE, mew=0)
            for index, ink in colour.items():
                axes.plot(
                    x[label == index], y[label == index], marker, ms=4, color=ink, alpha=0.65, mew=0
                )
            present = [index for index in colour if (points.label == index).any()]
            size = figure.get_size_inches() * axes.get_position().size
            middles = [
                np.median(np.stack([points.x, points.y])[:, points.label == i], axis=1)
                for i in present
            ]
            texts = [shorten(classes[i] if i < len(classes) else str(i), 18) for i in present]
            wanted = [tuple(axes.transLimits.transform(middle) * size) for middle in middles]
            placed = apart(
                wanted, [(0.075 * len(text) + 0.14, 0.24) for text in texts], tuple(size)
            )
            for index, text, place in zip(present, texts, placed, strict=True):
                frame = {
                    "boxstyle": "round,pad=0.25",
                    "facecolor": "white",
                    "alpha": 0.9,
                    "edgecolor": colour[index],
                }
                at = np.array(place) / size
                axes.text(
                    *at,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    transform=axes.transAxes,
                    bbox=frame,
                )

        return render(name, 4.2, draw)

    return picture("real", real, "o"), picture("synthetic", synthetic, "^")


def time_spent(seconds: Mapping[str, float]) -> str:
    """Draw times as one stacked bar, with a line of text below it for each part, longest first.

    Args:
        seconds: of each part, by its name. `REST` comes last.

    Returns:
        The picture as an SVG string.
    """
    parts = sorted(seconds.items(), key=lambda item: (item[0] == REST, -item[1], item[0]))
    total = sum(seconds.values()) or 1.0
    height = 0.75 + 0.27 * len(parts)

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.08, right=0.08, top=0.08, bottom=0.08)
        axes.set(xlim=(0, 1), ylim=(height - 0.16, 0))
        axes.axis("off")
        start = 0.0
        for row, (name, value) in enumerate(parts):
            colour = (
                LINE if name == REST else (BLUE, ORANGE, GREEN, PURPLE, *CLASS_COLOURS)[row % 14]
            )
            axes.barh(
                0.2, value / total, 0.36, left=start, color=colour, edgecolor="white", linewidth=1
            )
            start += value / total
            y = 0.68 + 0.27 * row
            axes.plot(0.015, y, "s", ms=8, color=colour)
            axes.text(0.05, y, shorten(name, 40), va="center")
            axes.text(0.83, y, human_seconds(value), va="center", ha="right")
            axes.text(0.99, y, percent(value / total), va="center", ha="right", color=QUIET)

    return render("time", height, draw)
