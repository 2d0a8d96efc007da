"""The pictures of a report: plain data in, one inline SVG string out. The same data always gives the same string."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

# After Okabe and Ito (2008), darker so that text can wear them; for classes Tol's "muted" scheme. Both stay apart under
# the common colour blindnesses.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#c25500", "#00805d", "#aa4c87"
CLASS_COLOURS = (
    *("#332288", "#44aa99", "#cc6677", "#117733", "#88ccee"),
    *("#aa4499", "#999933", "#882255", "#ddaa33", "#3b3b3b"),
)
INK, QUIET, LINE, FAINT = "#1c2430", "#5d6878", "#c9d0d9", "#eef1f5"
REST = "everything else"
WIDTH = 5.2  # inches; every picture fills one column of the page, so all text comes out in one size
NAMED_SITES, NAMED_CLASSES, NUMBERED_CLASSES, POINTS = 24, 24, 12, 1500
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsurrogate",
    "text.parse_math": False,  # a site may be called "$x$"
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
}


@dataclass(frozen=True)
class Outcome:
    """One way to learn: its `accuracy` in [0, 1] and the `bytes` it needs sent up (None: unknown)."""

    name: str
    accuracy: float
    bytes: float | None
    ours: bool = False


@dataclass(frozen=True)
class Points:
    """Features in two dimensions: `x`, `y` and the class index `label`, all of shape (n,)."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    label: NDArray[np.int64]


def percent(share: float) -> str:
    """Return a share in [0, 1] as "68.4%"."""
    return f"{100 * share:.1f}%"


def human_bytes(count: float) -> str:
    """Return bytes in decimal units: "182 kB", "1.82 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """Return a duration as "20 ms", "3.2 s", "2 min 5 s" or "1 h 12 min"."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60:,} h"


def shorten(text: str, length: int) -> str:
    """Return `text` in at most `length` characters, the cut marked by an ellipsis."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def accuracy_against_bytes(outcomes: Sequence[Outcome], ends: tuple[float, float] | None = None) -> str:
    """Draw accuracy over uplink bytes (log). `ends`, worst and best site, become a line through our own outcome."""

    def draw(figure: Any) -> None:
        axes = _axes(figure, left=0.52, right=1.92, top=0.15, bottom=0.5)
        values = [o.accuracy for o in outcomes] + list(ends or ())
        axes.set_ylim(*_accuracy_range(values))
        _bytes_axis(axes, [o.bytes for o in outcomes if o.bytes])
        axes.grid(axis="y", color=FAINT)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
        axes.set_xlabel("sent up by all sites together (log scale)")
        colours = iter((ORANGE, GREEN, PURPLE, QUIET))
        height = float((figure.get_size_inches() * axes.get_position().size)[1])
        low, high = axes.get_ylim()
        wanted = [(0.0, (o.accuracy - low) / (high - low) * height) for o in outcomes]
        placed = _apart(wanted, [(1.0, 0.42)] * len(outcomes), (1.0, height))
        for outcome, (_, label_y) in zip(outcomes, placed, strict=True):
            colour = BLUE if outcome.ours else next(colours)
            y = label_y / height
            point = (axes.get_xlim()[1], outcome.accuracy)
            if outcome.bytes:
                point = (outcome.bytes, outcome.accuracy)
                axes.plot(*point, marker="o" if outcome.ours else "D", ms=10 if outcome.ours else 6.5, color=colour)
                if outcome.ours and ends:
                    axes.plot([outcome.bytes] * 2, ends, color=colour, lw=2, alpha=0.35)
            else:
                axes.axhline(outcome.accuracy, color=colour, lw=1, ls=(0, (4, 3)))
            start = axes.transData.transform(point)
            elbow = axes.transAxes.transform([(1.02, y), (1.06, y)])
            path = axes.transAxes.inverted().transform([start, *elbow])
            axes.plot(*path.T, transform=axes.transAxes, clip_on=False, color=colour, lw=0.8, alpha=0.6, zorder=1)
            text = {"transform": axes.transAxes, "clip_on": False}
            axes.text(1.075, y + 0.005, outcome.name, weight="bold", color=colour, va="bottom", **text)
            size = f" · {human_bytes(outcome.bytes)}" if outcome.bytes else ""
            axes.text(1.075, y - 0.005, percent(outcome.accuracy) + size, color=QUIET, va="top", **text)

    return _svg("outcomes", 3.5, draw)


def site_accuracy(
    names: Sequence[str], accuracy: Sequence[float | None], notes: Sequence[str], line: tuple[str, float] | None
) -> str:
    """Draw one bar a site, top to bottom, from 0 to 100%; where there is no accuracy the note stands instead."""
    many = len(names) > NAMED_SITES

    def draw(figure: Any) -> None:
        axes = _axes(figure, left=_margin(names) if not many else 0.42, right=0.6, top=0.3, bottom=0.5)
        _site_rows(axes, names)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
        axes.set_xlabel("accuracy on the site's own test data")
        axes.grid(axis="x", color=FAINT)
        axes.set_axisbelow(True)
        values = np.array([a if a is not None else 0.0 for a in accuracy])
        if many:
            axes.stairs(values, np.arange(len(values) + 1) - 0.5, orientation="horizontal", fill=True, color=BLUE)
            if unmeasured := sum(a is None for a in accuracy):
                axes.text(
                    0.01, len(values) - 0.5 - unmeasured / 2, f"{unmeasured:,} not measured", color=ORANGE, va="center"
                )
        else:
            axes.barh(range(len(values)), values, height=0.68, color=BLUE)
            for row, (value, note) in enumerate(zip(accuracy, notes, strict=True)):
                if value is None:
                    axes.text(0.01, row, shorten(note, 40), color=ORANGE, va="center", fontsize=9)
                    continue
                axes.text(1.02, row, percent(value), va="center", fontsize=9)
        if line:
            axes.axvline(line[1], color=INK, lw=1.3, ls=(0, (4, 2)))
            side = "right" if line[1] > 0.75 else "left" if line[1] < 0.25 else "center"
            axes.set_title(f"{line[0]} {percent(line[1])}", x=line[1], ha=side, pad=4, fontsize=9, weight="bold")

    return _svg("accuracy", _rows_height(len(names), 0.8), draw)


def class_counts(names: Sequence[str], classes: Sequence[str], counts: NDArray[np.float64]) -> str:
    """Draw `counts` (n_sites, n_classes) as a heat grid, with numbers while they fit and in groups when many.

    NaN leaves a cell empty: the site told nothing.
    """
    many = len(names) > NAMED_SITES
    named = len(classes) <= NAMED_CLASSES
    longest = max((len(shorten(c, 16)) for c in classes), default=0)
    upright = longest > 2 and named and longest * len(classes) > 46
    bottom = 0.3 + (0.075 * longest + 0.05 if upright else 0.2)

    def draw(figure: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        numbered = not many and len(classes) <= NUMBERED_CLASSES
        left = 0.42 if many else _margin(names)
        axes = _axes(figure, left=left, right=0.25 if numbered else 0.75, top=0.3, bottom=bottom)
        grid = _grouped(_grouped(counts, 100 if many else len(names)).T, 80).T
        colours = LinearSegmentedColormap.from_list("counts", ["#f6f8fb", "#9ecae8", BLUE, "#08304f"])
        # Counts are skewed; under a square root small classes stay visible next to large ones.
        most = float(np.nanmax(grid, initial=0)) or 1.0
        norm = PowerNorm(0.5, 0, most)
        grouped = grid.shape != counts.shape
        if named and not many:
            edges = [np.arange(size + 1) - 0.5 for size in (len(classes), len(names))]
            image = axes.pcolormesh(*edges, grid, cmap=colours, norm=norm, edgecolors="white", linewidth=1)
        else:
            extent = (-0.5, len(classes) - 0.5, len(names) - 0.5, -0.5)
            image = axes.imshow(grid, cmap=colours, norm=norm, aspect="auto", interpolation="none", extent=extent)
        _site_rows(axes, names, len(grid))
        axes.set_xlim(-0.5, len(classes) - 0.5)
        axes.spines[:].set_visible(False)
        if named:
            axes.set_xticks(range(len(classes)), [shorten(c, 16) for c in classes], rotation=90 if upright else 0)
        axes.set_xlabel(_axis_name(len(classes), grid.shape[1], "classes") if not named else "class")
        if numbered:
            size = min(9, 27 * _pitch(len(names)), 75 / len(classes))
            for row, column in np.argwhere(np.isfinite(counts)):
                count = float(counts[row, column])
                colour = "white" if norm(count) > 0.55 else INK if count else "#9aa4b2"
                text = f"{count:.0f}" if count < 10_000 else f"{count / 1000:.0f}k"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)
            return
        box = axes.get_position()
        bar = figure.add_axes((box.x1 + 0.03, box.y0, 0.025, box.height))
        ticks = [0.0, most / 9, most * 4 / 9, most]
        figure.colorbar(image, cax=bar, ticks=ticks).outline.set_visible(False)
        bar.set_yticks(ticks, [f"{tick:,.0f}" if most >= 20 else f"{tick:.1f}" for tick in ticks])
        bar.set_title("mean" if grouped else "records", fontsize=8.5, color=QUIET, pad=8)

    return _svg("counts", _rows_height(len(names), 0.3 + bottom), draw)


def features(real: Points, synthetic: Points, classes: Sequence[str]) -> tuple[str, str]:
    """Draw real and synthetic features as two pictures with the same axes and colours."""
    everything = np.concatenate([real.label, synthetic.label])
    shown = np.argsort(-np.bincount(everything, minlength=1), kind="stable")[: len(CLASS_COLOURS)]
    colour = {int(index): CLASS_COLOURS[place] for place, index in enumerate(sorted(shown))}
    spread = [np.concatenate([getattr(real, axis), getattr(synthetic, axis)]) for axis in ("x", "y")]
    lows, spans = [float(v.min()) for v in spread], [max(float(np.ptp(v)), 1e-9) for v in spread]

    def picture(name: str, points: Points, marker: str) -> str:
        keep = np.sort(np.random.default_rng(0).permutation(len(points.x))[:POINTS])
        x, y, label = points.x[keep], points.y[keep], points.label[keep]

        def draw(figure: Any) -> None:
            axes = _axes(figure, left=0.05, right=0.05, top=0.05, bottom=0.05)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(True)
            for setter, low, span in zip((axes.set_xlim, axes.set_ylim), lows, spans, strict=True):
                setter(low - 0.06 * span, low + 1.06 * span)
            other = ~np.isin(label, list(colour))
            axes.plot(x[other], y[other], marker, ms=3, color=LINE, mew=0)
            for index, ink in colour.items():
                axes.plot(x[label == index], y[label == index], marker, ms=4, color=ink, alpha=0.65, mew=0)
            present = [index for index in colour if (points.label == index).any()]
            size = figure.get_size_inches() * axes.get_position().size
            middles = [np.median(np.stack([points.x, points.y])[:, points.label == i], axis=1) for i in present]
            texts = [shorten(classes[i] if i < len(classes) else str(i), 18) for i in present]
            wanted = [tuple(axes.transLimits.transform(middle) * size) for middle in middles]
            placed = _apart(wanted, [(0.075 * len(text) + 0.14, 0.24) for text in texts], tuple(size))
            for index, text, place in zip(present, texts, placed, strict=True):
                frame = {"boxstyle": "round,pad=0.25", "facecolor": "white", "alpha": 0.9, "edgecolor": colour[index]}
                at = np.array(place) / size
                axes.text(*at, text, ha="center", va="center", fontsize=9, transform=axes.transAxes, bbox=frame)

        return _svg(name, 4.2, draw)

    return picture("real", real, "o"), picture("synthetic", synthetic, "^")


def time_spent(seconds: Mapping[str, float]) -> str:
    """Draw one stacked bar of `seconds` and below it a line for each part, longest first."""
    parts = sorted(seconds.items(), key=lambda item: (item[0] == REST, -item[1], item[0]))
    total = sum(seconds.values()) or 1.0
    height = 0.75 + 0.27 * len(parts)

    def draw(figure: Any) -> None:
        axes = _axes(figure, left=0.08, right=0.08, top=0.08, bottom=0.08)
        axes.set(xlim=(0, 1), ylim=(height - 0.16, 0))
        axes.axis("off")
        start = 0.0
        for row, (name, value) in enumerate(parts):
            colour = LINE if name == REST else (BLUE, ORANGE, GREEN, PURPLE, *CLASS_COLOURS)[row % 14]
            axes.barh(0.2, value / total, 0.36, left=start, color=colour, edgecolor="white", linewidth=1)
            start += value / total
            y = 0.68 + 0.27 * row
            axes.plot(0.015, y, "s", ms=8, color=colour)
            axes.text(0.05, y, shorten(name, 40), va="center")
            axes.text(0.83, y, human_seconds(value), va="center", ha="right")
            axes.text(0.99, y, percent(value / total), va="center", ha="right", color=QUIET)

    return _svg("time", height, draw)


def _svg(name: str, height: float, draw: Callable[[Any], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    out = StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Text is drawn by the browser; that the font used for measuring lacks a glyph does not matter.
        warnings.filterwarnings("ignore", message="Glyph")
        warnings.filterwarnings("ignore", message="Mean of empty slice")
        figure = Figure(figsize=(WIDTH, height))
        figure.patch.set_visible(False)
        draw(figure)
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = out.getvalue()
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    # Several pictures share one page, and with it one space of ids.
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    return f'<svg class="{name}" {box.group() if box else ""} aria-hidden="true">{body}'


def _axes(figure: Any, *, left: float, right: float, top: float, bottom: float) -> Any:
    """Add axes with margins in inches, so that text keeps its room whatever the picture's height."""
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))


def _accuracy_range(values: Sequence[float]) -> tuple[float, float]:
    """Zoom to the values, but never so far that less than 10 points of accuracy fill the axis."""
    low, high = min(values), max(values)
    pad = max(0.15 * (high - low), 0.05 - (high - low) / 2, 0.02)
    low, high = math.floor(20 * (low - pad)) / 20, math.ceil(20 * (high + pad)) / 20
    return (0.0 if low < 0.15 else low), min(high, 1.02)


def _bytes_axis(axes: Any, sizes: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.minorticks_off()
    low, high = (math.log10(min(sizes)), math.log10(max(sizes))) if sizes else (5.0, 6.0)
    pad = max(0.12 * (high - low), 0.75 - (high - low) / 2)
    low, high = low - pad, high + pad
    axes.set_xlim(10**low, 10**high)
    steps = (1, 3) if high - low < 2.2 else (1,)
    ticks = [s * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for s in steps]
    ticks = [t for t in ticks if 10**low <= t <= 10**high]
    ticks = ticks[:: math.ceil(len(ticks) / 5)]
    axes.set_xticks(ticks, [human_bytes(t) for t in ticks])


def _pitch(rows: int) -> float:
    return min(max(2.6 / max(rows, 1), 0.24), 0.5)


def _rows_height(rows: int, margins: float) -> float:
    return margins + (3.0 if rows > NAMED_SITES else _pitch(rows) * rows)


def _margin(names: Sequence[str]) -> float:
    return 0.2 + 0.07 * max((len(shorten(n, 22)) for n in names), default=0)


def _site_rows(axes: Any, names: Sequence[str], groups: int | None = None) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    if len(names) > NAMED_SITES:
        axes.set_yticks([])
        axes.set_ylabel(_axis_name(len(names), groups or len(names), "sites") + ", best on top")
    else:
        axes.set_yticks(range(len(names)), [shorten(n, 22) for n in names])


def _axis_name(count: int, groups: int, what: str) -> str:
    return f"{count:,} {what}" + (f" in {groups} groups" if groups < count else "")


def _grouped(counts: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    """Average neighbouring rows of `counts` until there are at most `groups`."""
    if len(counts) <= groups:
        return counts
    return np.stack([np.nanmean(part, axis=0) for part in np.array_split(counts, groups)])


def _apart(
    wanted: Sequence[tuple[float, ...]], sizes: Sequence[tuple[float, float]], room: tuple[float, ...]
) -> list[tuple[float, float]]:
    """Move boxes of `sizes`, centred where `wanted`, just far enough that none overlaps another inside `room`."""
    centre, size = np.array(wanted, dtype=np.float64).reshape(-1, 2), np.array(sizes).reshape(-1, 2)
    for _ in range(300):
        for i in range(len(centre)):
            for j in range(i):
                gap = centre[i] - centre[j]
                overlap = (size[i] + size[j]) / 2 - np.abs(gap)
                if (overlap > 0).all():
                    axis = int(np.argmin(overlap))
                    push = np.zeros(2)
                    push[axis] = overlap[axis] / 2 * (1 if gap[axis] >= 0 else -1)
                    centre[i], centre[j] = centre[i] + push, centre[j] - push
        centre = np.clip(centre, size / 2, np.maximum(np.array(room) - size / 2, size / 2))
    return [(float(x), float(y)) for x, y in centre]
