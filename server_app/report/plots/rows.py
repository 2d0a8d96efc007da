"""Plots of a report: accuracy, classes and features, numbers in rows, survival by third of the risk,
trust radii, and sheets of synthetic images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.escapes import human_bytes, percent, shorten
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.pages import svg

from ...runs.reader import RunFolder
from ...runs.state import as_list, as_number, as_numbers, as_table, natural_order


@dataclass(frozen=True)
class WithInterval:
    """A number with its 95 % interval.

    Attributes:
        value: the number.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """Numbers of one kind.

    Attributes:
        values: one for each row; None for a row without one.
        colour: of bars or marks.
        name: in the legend; empty without one.
        mark: of matplotlib; empty for bars.
    """

    values: Sequence[float | WithInterval | None]
    colour: str
    name: str = ""
    mark: str = ""


def draw_rows(
    key: str,
    rows: Sequence[str],
    series: Sequence[Series],
    titles: tuple[str, str],
    *,
    shares: bool = False,
    notes: Sequence[str] = (),
    line: tuple[str, float] | None = None,
) -> str:
    """Draw one row below the other.

    Args:
        key: of the picture.
        rows: their names; more than NAMED_SITES are one area without names.
        series: those with a name lie side by side within a row.
        titles: what a row is, and what the numbers are.
        shares: whether the numbers are shares, shown in percent.
        notes: a text beside each row.
        line: name and value of a number that is drawn through all rows.

    Returns:
        The picture as an SVG string.
    """
    what, title = titles
    many, named = len(rows) > svg.NAMED_SITES, sum(bool(each.name) for each in series)
    left, right = 0.42 if many else svg.margin(rows), 1.15 if notes else 0.25
    top = 0.5 if named else 0.3 if line else 0.15

    def draw(figure: Any) -> None:
        axes = svg.make_axes(figure, left=left, right=right, top=top, bottom=0.5)
        for place, each in enumerate(series):
            shift = (place - (named - 1) / 2) * 0.8 / named if named else 0.0
            _draw_series(axes, each, shift, 0.7 / max(1, named), many)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_ylabel(f"{len(rows):,} {what}s, best on top" if many else what)
        axes.set_yticks(
            [] if many else range(len(rows)), [] if many else [shorten(row, 22) for row in rows]
        )
        if any(not each.mark for each in series):
            axes.set_xlim(left=0, right=1 if shares and not named else None)
        if shares:
            svg.percent_axis(axes.xaxis)
        axes.set_xlabel(title)
        axes.grid(axis="x", color=svg.FAINT)
        axes.set_axisbelow(True)
        for row, note in enumerate(() if many else notes):
            place = axes.get_yaxis_transform()
            axes.text(1.02, row, shorten(note, 24), transform=place, va="center", fontsize=9)
        if line:
            axes.axvline(line[1], color=svg.INK, lw=1.3, ls=(0, (4, 2)))
            axes.set_title(f"dashed: {line[0]}", fontsize=9, pad=4)
        if named:
            svg.legend_above(axes, named)

    return svg.render(key, svg.rows_height(len(rows), top + 0.5), draw)


def _draw_series(axes: Any, series: Series, shift: float, height: float, many: bool) -> None:
    known = [
        (row + shift, each if isinstance(each, WithInterval) else WithInterval(each, each, each))
        for row, each in enumerate(series.values)
        if each is not None
    ]
    rows, numbers = [row for row, _ in known], [number for _, number in known]
    values = [each.value for each in numbers]
    if many:
        # One shape, whatever the number of rows.
        axes.fill_betweenx(rows, 0, values, step="mid", color=series.colour, lw=0)
        return
    colour = series.colour
    if not series.mark:
        bars = [max(0.0, value) for value in values]
        axes.barh(rows, bars, height, color=colour, label=series.name or None, zorder=2)
        colour = svg.INK
    if series.mark or any(each.low < each.high for each in numbers):
        # A number may lie outside its interval where its own range ends, such as a count below zero.
        errors = [
            [max(0.0, each.value - each.low) for each in numbers],
            [max(0.0, each.high - each.value) for each in numbers],
        ]
        style = {"elinewidth": 1.4, "capsize": 2.5, "markersize": 5, "color": colour, "zorder": 3}
        label = series.name if series.mark and series.name else None
        axes.errorbar(values, rows, xerr=errors, fmt=series.mark or "none", ecolor=colour, label=label, **style)  # fmt: skip


# Of a curve in evaluation.json: survival, its limits, and numbers at risk, one for each bin.
Curve = Mapping[str, Sequence[float | None]]
COLOURS = (svg.GREEN, svg.BLUE, svg.ORANGE)


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
        axes = svg.make_axes(figure, left=svg.margin(list(curves)), right=0.3, top=0.35, bottom=1.4)
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
        svg.percent_axis(axes.yaxis)
        axes.set_ylabel("without the event")
        axes.set_xlabel(f"time in {unit}" if unit else "time")
        svg.legend_above(axes, 3)

    return svg.render("evaluation-survival", 4.2, draw)


def _known(curve: Curve, name: str) -> list[float]:
    return [each for each in curve.get(name, ()) if each is not None]


# The legend counts the sites if there are more.
NAMED = 12


def radii(run: RunFolder) -> str | None:
    """Draw by round each site's radius, the radius used, and the model's movement; None without
    such rounds.
    """
    rounds = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    rounds = [entry for entry in rounds if as_numbers(entry.get("radii"))]
    if not rounds:
        return None
    numbers = [as_number(entry.get("round")) or 0.0 for entry in rounds]
    reported = [as_numbers(entry.get("radii")) for entry in rounds]
    sites = sorted({site for each in reported for site in each}, key=natural_order)

    def draw(figure: Any) -> None:
        axes = svg.make_axes(figure, left=0.6, right=0.1, top=0.15, bottom=0.5)
        for site in sites:
            points = [
                (n, each[site]) for n, each in zip(numbers, reported, strict=True) if site in each
            ]
            axes.plot(
                *zip(*points, strict=True), color=svg.QUIET, lw=0.8, marker=".", ms=4, alpha=0.6
            )
        for key, colour, label in (("radius", svg.INK, "used"), ("moved", svg.BLUE, "moved")):
            line = [as_number(entry.get(key)) for entry in rounds]
            axes.plot(
                numbers,
                [np.nan if v is None else v for v in line],
                color=colour,
                lw=2,
                marker="o",
                ms=4,
                label=label,
            )
        axes.plot(
            [],
            [],
            color=svg.QUIET,
            lw=0.8,
            marker=".",
            label="a site" if len(sites) <= NAMED else f"{len(sites)} sites",
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.grid(axis="y", color=svg.FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel("distance from the round's model")
        axes.legend(frameon=False, fontsize=8.5)

    return svg.render("radii", 2.8, draw)


SHEETS = ("first", "middle", "last")
# Most classes on a sheet, and most images of a class.
ROWS, COLUMNS = 20, 10
# Black and white lie this many standard deviations from grey.
CONTRAST = 2.5


def sheets(folder: Path) -> list[tuple[int, str]]:
    """The sheets of images that a run has stored.

    Args:
        folder: the run folder.

    Returns:
        (round, picture as an SVG string), each round once, in the order of rounds.
    """
    by_round: dict[int, str] = {}
    for name in SHEETS:
        try:
            number, names, images = _read(folder / f"synthetic-{name}.safetensors")
            drawn = _sheet(f"sheet-{name}", names, images)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        by_round.setdefault(number, drawn)
    return sorted(by_round.items())


def _read(file: Path) -> tuple[int, list[str], NDArray[np.float32]]:
    """Round, row names, and images (rows, columns, side, side, 3) in [0, 1] from one file that
    `strategies` stored.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "numpy") as content:
            metadata = content.metadata() or {}
            tables = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if metadata.get("model") != "convnet":
        raise ValueError("the synthetic records are not images")
    rows: dict[str, NDArray[np.float32]] = {}
    spread = float(
        np.concatenate([tables[site].ravel() for site in json.loads(metadata["sites"])])
        .astype(np.float32)
        .std()
    )
    for site, classes in sorted(
        json.loads(metadata["sites"]).items(), key=lambda item: natural_order(item[0])
    ):
        for index, label in enumerate(classes):
            flat = tables[site][tables[f"{site} labels"] == index][:COLUMNS].astype(np.float32)
            rows.setdefault(str(label), _pixels(flat / max(spread, 1e-6)))
    names = sorted(rows, key=natural_order)[:ROWS]
    return int(metadata["round"]), names, np.stack([rows[name] for name in names])


def _pixels(flat: NDArray[np.float32]) -> NDArray[np.float32]:
    channels = 1 if round((flat.shape[1]) ** 0.5) ** 2 == flat.shape[1] else 3
    side = round((flat.shape[1] / channels) ** 0.5)
    images = flat.reshape(-1, channels, side, side) / (2 * CONTRAST) + 0.5
    shown: NDArray[np.float32] = np.clip(
        images.transpose(0, 2, 3, 1).repeat(3 // channels, axis=3), 0, 1
    )
    return shown


def _sheet(name: str, names: Sequence[str], images: NDArray[np.float32]) -> str:
    rows, columns, side = images.shape[:3]
    step = side + max(1, side // 16)
    # The last channel is opacity: the gaps show the page, which may be dark.
    page = np.zeros((rows * step, columns * step, 4), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            place = page[row * step : row * step + side, column * step : column * step + side]
            place[..., :3], place[..., 3] = images[row, column], 1.0

    def draw(figure: Any) -> None:
        axes = svg.make_axes(figure, left=0.95, right=0.05, top=0.05, bottom=0.25)
        axes.set(xlabel="images of the class", ylabel="class")
        axes.imshow(np.rint(page * 255).astype(np.uint8), interpolation="none", aspect="equal")
        axes.set_xticks([])
        axes.set_yticks(
            [row * step + side / 2 for row in range(rows)], [shorten(n, 10) for n in names]
        )
        for spine in axes.spines.values():
            spine.set_visible(False)

    return svg.render(name, 4.2 * rows / max(columns, COLUMNS) + 0.3, draw)


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
        axes = svg.make_axes(figure, left=0.72, right=1.92, top=0.15, bottom=0.5)
        colours = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.QUIET)
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
        axes.set_ylim(
            *svg.accuracy_range([each for each, _ in outcomes.values()] + [*(ends or ())])
        )
        svg.bytes_axis(axes, [sent for _, sent in outcomes.values() if sent])
        axes.grid(axis="y", color=svg.FAINT)
        svg.percent_axis(axes.yaxis)
        axes.set_xlabel("sent up by all sites together (log scale)")
        axes.set_ylabel("accuracy")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.03), labelspacing=1)

    return svg.render("outcomes", 3.5, draw)


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
    many, named = len(names) > svg.NAMED_SITES, len(classes) <= svg.NAMED_CLASSES
    numbered = not many and len(classes) <= svg.NUMBERED_CLASSES
    longest = max((len(shorten(name, 16)) for name in classes), default=0)
    upright = named and longest > 2 and longest * len(classes) > 46
    bottom = 0.3 + (0.075 * longest + 0.05 if upright else 0.2)

    def draw(figure: Any) -> None:
        with needed_for("a picture"):
            from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba

        left, right = 0.42 if many else svg.margin(names), 0.25 if numbered else 0.75
        axes = svg.make_axes(figure, left=left, right=right, top=0.3, bottom=bottom)
        grid = svg.in_groups(svg.in_groups(counts, 100 if many else len(names)).T, 80).T
        # More opaque is more, on a light page and on a dark one; never so much that the number in a
        # cell is hard to read. Counts are skewed; with a square-root scale small classes stay
        # visible next to large ones.
        shades = [to_rgba(svg.BLUE, 0.03), to_rgba(svg.BLUE, 0.5 if numbered else 1.0)]
        colours = LinearSegmentedColormap.from_list("counts", shades)
        most = float(np.nanmax(grid, initial=0)) or 1.0
        norm = PowerNorm(0.5, 0, most)
        extent = (-0.5, len(classes) - 0.5, len(names) - 0.5, -0.5)
        place: dict[str, Any] = {"extent": extent, "aspect": "auto", "interpolation": "none"}
        image = axes.imshow(grid, cmap=colours, norm=norm, **place)
        svg.site_rows(axes, names, len(grid))
        axes.spines[:].set_visible(False)
        if named:
            texts = [shorten(name, 16) for name in classes]
            axes.set_xticks(range(len(classes)), texts, rotation=90 if upright else 0)
        axes.set_xlabel("class" if named else svg.axis_name(len(classes), grid.shape[1], "classes"))
        if numbered:
            for row, column in np.argwhere(np.isfinite(counts)):
                count = float(counts[row, column])
                text = f"{count:.0f}" if count < 10_000 else f"{count / 1000:.0f}k"
                style = {"ha": "center", "va": "center", "fontsize": min(9, 75 / len(classes))}
                axes.text(column, row, text, color=svg.INK if count else svg.QUIET, **style)
            return
        box = axes.get_position()
        bar = figure.add_axes((box.x1 + 0.03, box.y0, 0.025, box.height))
        ticks = [0.0, most / 9, most * 4 / 9, most]
        figure.colorbar(image, cax=bar, ticks=ticks).outline.set_visible(False)
        bar.set_yticks(ticks, [f"{tick:,.0f}" if most >= 20 else f"{tick:.1f}" for tick in ticks])
        grouped = grid.shape != counts.shape
        bar.set_title("mean" if grouped else "records", fontsize=8.5, color=svg.QUIET, pad=8)

    return svg.render("counts", svg.rows_height(len(names), 0.3 + bottom), draw)


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
    shown = sorted(np.argsort(-sizes, kind="stable")[: len(svg.CLASS_COLOURS)])
    low, span = everything.min(0), np.maximum(np.ptp(everything, axis=0), 1e-9)

    def picture(name: str, points: Points, marker: str) -> str:
        keep = np.sort(np.random.default_rng(0).permutation(len(points))[: svg.POINTS])
        x, y, label = points[keep].T

        def draw(figure: Any) -> None:
            axes = svg.make_axes(figure, left=0.25, right=0.05, top=0.8, bottom=0.25)
            axes.set(xticks=[], yticks=[], xlabel="first dimension", ylabel="second dimension")
            axes.spines[:].set_visible(True)
            axes.set_xlim(low[0] - 0.06 * span[0], low[0] + 1.06 * span[0])
            axes.set_ylim(low[1] - 0.06 * span[1], low[1] + 1.06 * span[1])
            other = ~np.isin(label, shown)
            axes.plot(x[other], y[other], marker, ms=3, color=svg.LINE, mew=0)
            for colour, index in zip(svg.CLASS_COLOURS, shown, strict=False):
                own = label == index
                text = classes[index] if index < len(classes) else str(index)
                style = {"ms": 4, "color": colour, "alpha": 0.65, "mew": 0}
                axes.plot(x[own], y[own], marker, label=shorten(text, 18), **style)
            svg.legend_above(axes, 3)

        return svg.render(name, 4.6, draw)

    return picture("real", real, "o"), picture("synthetic", synthetic, "^")


OF_RUNS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.QUIET)
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
        reference: the accuracy of the centralized head in [0, 1], drawn as a line; None without one.
        by_bytes: whether the axis has bytes.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = svg.make_axes(figure, left=0.72, right=0.2, top=0.15, bottom=0.5)
        for index, (label, taken) in enumerate(runs.items()):
            drawn = [step for step in taken if step.bytes or not by_bytes]
            xs = [
                float(step.bytes or 0) if by_bytes else float(step.name) if what == ROUND else place
                for place, step in enumerate(drawn, 1)
            ]
            ys, once = [step.accuracy for step in drawn], len(taken) == 1
            style = {"marker": "D", "ms": 7, "ls": "none"} if once else {"marker": "o", "ms": 4}
            colour = OF_RUNS[index % len(OF_RUNS)]
            axes.plot(xs, ys, color=colour, lw=1.3 if index else 2, label=label, **style)
            if once and drawn:
                axes.axhline(ys[0], color=colour, lw=0.8, ls=(0, (4, 3)), alpha=0.7)
        accuracies = [step.accuracy for taken in runs.values() for step in taken]
        if reference is not None:
            axes.axhline(reference, color=svg.QUIET, lw=1, ls=(0, (4, 3)), label="centralized head")
            accuracies.append(reference)
        axes.set_ylim(*svg.accuracy_range(accuracies))
        svg.percent_axis(axes.yaxis)
        axes.grid(axis="y", color=svg.FAINT)
        axes.set_ylabel("accuracy")
        if by_bytes:
            sizes = [step.bytes for taken in runs.values() for step in taken if step.bytes]
            svg.bytes_axis(axes, sizes)
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

    return svg.render("bytes" if by_bytes else "rounds", 2.8, draw)
