"""What all pages share: escaped templates, the style of the page, and plots as SVG with axes and
labels that do not overlap.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..escapes import for_terminal, human_bytes, shorten
from ..extras import EXTRAS, install_command, is_installed, needed_for
from ..models.class_metrics import BINS, ClassReport, bins_of, wilson

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(
    template: str,
    values: Mapping[str, Any],
    folder: Path | None = None,
    filters: Mapping[str, Callable[..., Any]] | None = None,
    written: Callable[[str], str] = for_terminal,
) -> str:
    """A page, HTML or Markdown. Texts in it are escaped, and have no character that `for_terminal`
    replaces.

    Args:
        template: of Jinja, or the name of its file in `folder`.
        values: by the name that the template uses.
        folder: of templates that include each other; None for `template` itself.
        filters: of the template, by name.
        written: how a text is written before it is escaped for HTML.
    """
    environment = _environment(folder, tuple((filters or {}).items()), written)
    found = (
        environment.from_string(template) if folder is None else environment.get_template(template)
    )
    return found.render(values)


@lru_cache(maxsize=8)
def _environment(
    folder: Path | None,
    filters: tuple[tuple[str, Callable[..., Any]], ...],
    written: Callable[[str], str],
) -> Environment:
    """Of `render_page`; it keeps the templates that it has compiled."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=None if folder is None else FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is a text of another type: it stays.
        finalize=lambda value: written(value) if type(value) is str else value,
    )
    environment.filters.update(filters)
    return environment


def trusted(markup: str) -> str:
    """Markup of this program, such as a drawn picture: it stays as it is."""
    from markupsafe import Markup

    return Markup(markup)


INK, QUIET, LINE, FAINT = "#1c2430", "#5d6878", "#c9d0d9", "#eef1f5"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#c25500", "#00805d", "#aa4c87"
# Colours of a plot by their name in the page's style, each with its value on a dark page.
THEME = {
    INK: ("ink", "#e6eaf0"),
    QUIET: ("quiet", "#9aa6b6"),
    LINE: ("rule", "#3d4958"),
    FAINT: ("faint", "#262f3b"),
    "#ffffff": ("card", "#1a212b"),
    BLUE: ("blue", "#56b4e9"),
    ORANGE: ("orange", "#f0924a"),
    GREEN: ("green", "#3fc79a"),
    PURPLE: ("purple", "#dd8fc0"),
    "#332288": ("class-0", "#9c8df0"),
    "#44aa99": ("class-1", "#5cc4b2"),
    "#cc6677": ("class-2", "#e58c9a"),
    "#117733": ("class-3", "#4fb56f"),
    "#88ccee": ("class-4", "#88ccee"),
    "#aa4499": ("class-5", "#d67fc8"),
    "#999933": ("class-6", "#c0c05a"),
    "#882255": ("class-7", "#cf6a9c"),
    "#ddaa33": ("class-8", "#ddaa33"),
    "#3b3b3b": ("class-9", "#b9b9b9"),
}
CLASS_COLOURS = tuple(colour for colour, (name, _) in THEME.items() if name.startswith("class-"))
NAMED_SITES, NAMED_CLASSES, NUMBERED_CLASSES, POINTS = 24, 24, 12, 1500
WIDTH = 5.2  # inches; every plot fills one column of the page, so all text has the same size
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


def undrawn() -> str:
    """Why pages have no pictures on this machine, and what to do; empty if they have."""
    if is_installed("matplotlib"):
        return ""
    return (
        "matplotlib is not installed where this page was written, so it has no pictures; run "
        f"{install_command(EXTRAS['matplotlib'])} there, and write the page again"
    )


def render(name: str, height: float, draw: Callable[[Any], None]) -> str:
    """Draw a figure of `height` inches and return it as inline SVG whose ids start with `name`.

    Its colours are variables of the page's style, so that they follow a dark screen. Empty where
    matplotlib is not installed: a page without pictures is better than none, and `undrawn` is the
    sentence for it.
    """
    if undrawn():
        return ""
    with needed_for("a picture"):
        import matplotlib
        from matplotlib.figure import Figure

    out = StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The browser draws the text, so a missing glyph in the font used for measuring does not
        # matter.
        warnings.filterwarnings("ignore", message="Glyph")
        warnings.filterwarnings("ignore", message="Mean of empty slice")
        figure = Figure(figsize=(WIDTH, height))
        figure.patch.set_visible(False)
        draw(figure)
        figure.savefig(
            out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    # Labels hold names; matplotlib escapes what XML needs, and nothing else.
    svg = "\n".join(map(for_terminal, out.getvalue().split("\n")))
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    # Several plots share one page, so their ids must differ.
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(
        r"\b(fill|stroke): (#[0-9a-f]{6})\b",
        lambda match: f"{match[1]}: {_variable(match[2])}",
        body,
    )
    return f'<svg class="{name}" {box.group() if box else ""} aria-hidden="true">{body}'


def _variable(colour: str) -> str:
    """The style's variable for a colour; text and lines in ink have the colour of the text around
    the plot.
    """
    if colour == INK:
        return "currentColor"
    return f"var(--{THEME[colour][0]})" if colour in THEME else colour


def theme(dark: bool) -> str:
    """The variables of all colours, as CSS declarations."""
    return " ".join(
        f"--{name}: {other if dark else colour};" for colour, (name, other) in THEME.items()
    )


def make_axes(figure: Any, *, left: float, right: float, top: float, bottom: float) -> Any:
    """Add axes with margins in inches, so that text has the same space at any height of the plot."""
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )


def legend_above(axes: Any, columns: int) -> None:
    """Show the legend above the axes, at their left, in this many columns."""
    axes.legend(
        frameon=False,
        fontsize=8.5,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0.2,
    )


def accuracy_range(values: Sequence[float]) -> tuple[float, float]:
    """Axis limits close to the values; the axis spans at least 10 points of accuracy."""
    low, high = min(values), max(values)
    pad = max(0.15 * (high - low), 0.05 - (high - low) / 2, 0.02)
    low, high = math.floor(20 * (low - pad)) / 20, math.ceil(20 * (high + pad)) / 20
    return (0.0 if low < 0.15 else low), min(high, 1.02)


def percent_axis(axis: Any) -> None:
    """Show an axis of shares in percent, up to 100 %, without rounding two ticks to one text."""
    axis.get_major_locator().set_params(nbins=6, steps=[1, 2, 5, 10])
    axis.set_major_formatter(lambda value, _: "" if value > 1.001 else f"{100 * value:.4g}%")


def bytes_axis(axes: Any, sizes: Sequence[float]) -> None:
    """Make the x axis logarithmic in bytes, with room around `sizes` and readable ticks."""
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


def pitch(rows: int) -> float:
    """Return the height of a row in inches."""
    return min(max(2.6 / max(rows, 1), 0.24), 0.5)


def rows_height(rows: int, margins: float) -> float:
    """Return the height in inches of a plot with `rows` rows."""
    return margins + (3.0 if rows > NAMED_SITES else pitch(rows) * rows)


def margin(names: Sequence[str]) -> float:
    """Return the width in inches that row names and the title of their axis need."""
    return 0.42 + 0.07 * max((len(shorten(n, 22)) for n in names), default=0)


def site_rows(axes: Any, names: Sequence[str], groups: int | None = None) -> None:
    """Set up one row per site; rows have names if the sites are few."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    if len(names) > NAMED_SITES:
        axes.set_yticks([])
        axes.set_ylabel(axis_name(len(names), groups or len(names), "sites") + ", best on top")
    else:
        axes.set_yticks(range(len(names)), [shorten(n, 22) for n in names])
        axes.set_ylabel("site")


def axis_name(count: int, groups: int, what: str) -> str:
    """Axis label with the number of items, and of groups if there are fewer groups than items."""
    return f"{count:,} {what}" + (f" in {groups} groups" if groups < count else "")


def in_groups(counts: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    """Average neighbouring rows of `counts` until there are at most `groups`."""
    if len(counts) <= groups:
        return counts
    return np.stack([np.nanmean(part, axis=0) for part in np.array_split(counts, groups)])


# Flower packs no file of an app whose name ends in .html, .css or .j2, so the names of these end in
# .md.
TEMPLATES = Path(__file__).parent / "templates"
STYLE = (TEMPLATES / "style.css.md").read_text(encoding="utf-8")
STYLE = STYLE.replace("LIGHT", theme(dark=False)).replace("DARK", theme(dark=True))


def page_head(title: str) -> str:
    """The start of a page, up to its styles. title: text or Jinja, with its special characters
    escaped.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n{STYLE}'
    )


MOST_DRAWN = len(CLASS_COLOURS)
NAMES = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "PPV",
    "npv": "NPV",
    "f1": "F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "brier": "Brier score",
    "calibration_error": "calibration error",
}
TITLES = {
    "roc": ("ROC", "1 - specificity", "sensitivity"),
    "precision_recall": ("Precision and recall", "recall (sensitivity)", "precision (PPV)"),
    "reliability": ("Reliability", "predicted probability", "observed share"),
}
CAPTIONS = {
    "roc": "Each class against all others.",
    "precision_recall": "With a rare class, this curve says more than the ROC curve. The dashed line "
    "is the share of the class in the records: the precision of a model that tells nothing apart.",
    "reliability": "On the diagonal, predicted probabilities are right; below it, the model is too "
    "sure. The larger a point, the more records it stands for. Calibration errors are over ten equal "
    "bins.",
}
PLACES = {"reliability": "upper left", "precision_recall": "lower left", "roc": "lower right"}


# A metric with its interval, for templates.
INTERVAL = (TEMPLATES / "interval.html.j2.md").read_text(encoding="utf-8")


def undefined_because(average: str, rows: Sequence[ClassReport]) -> str:
    """Why an average over classes is undefined, naming them; empty if it is not known.

    Args:
        average: its name, such as "macro_auroc" or "balanced_accuracy".
        rows: of the classes.
    """
    key = "sensitivity" if average == "balanced_accuracy" else average.removeprefix("macro_")
    names = [row.name for row in rows if row.support and row.metric_values[key].value is None]
    return f"undefined for {', '.join(names)}" if names else ""


def captions(positive: str, size: int, records: int) -> dict[str, str]:
    """The text below each picture of curves.

    Args:
        positive: the one class that is drawn; empty for several.
        size: number of its records.
        records: number of all.
    """
    if not positive:
        return CAPTIONS
    whose = f"{positive} is the positive class, with {size} of {records} records."
    return CAPTIONS | {
        "roc": whose,
        "precision_recall": f"{whose} {CAPTIONS['precision_recall']}",
        "reliability": f"{CAPTIONS['reliability']} Lines are 95 % intervals of the share; above is the number of records.",
    }


def confusion_card(classes: Sequence[str], matrix: Sequence[Sequence[int]]) -> str:
    """A confusion matrix as a card.

    Args:
        classes: names of C classes.
        matrix: (C, C), records by true class (rows) and decision (columns).
    """
    values = {"classes": classes, "matrix": matrix}
    return trusted(render_page("confusion.html.j2.md", values, TEMPLATES))


def classes_card(rows: Sequence[ClassReport | Mapping[str, Any]], note: str = "") -> str:
    """A table of metrics with a row for each class, as a card.

    Args:
        rows: of the classes.
        note: below the table; empty for none.
    """
    values = {"rows": rows, "names": NAMES, "note": note}
    return trusted(render_page("classes.html.j2.md", values, TEMPLATES))


def curve_pictures(
    curves: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> list[tuple[str, str, str]]:
    """ROC, precision and recall, and reliability.

    Args:
        curves: by class and by name of the curve; None where undefined.
        names: of the classes that are drawn, as far as there are colours.

    Returns:
        Key, title and SVG of each curve that a class has; none without matplotlib.
    """
    pictures = []
    for key, (title, across, up) in TITLES.items():
        lines = {name: curves[name][key] for name in names[:MOST_DRAWN] if curves[name].get(key)}
        if lines and not undrawn():
            drawn = render(f"evaluation-{key}", 3.6, _drawing(lines, key, across, up))
            pictures.append((key, title, drawn))
    return pictures


def _drawing(lines: Mapping[str, Any], key: str, across: str, up: str) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        top = 0.35 if key == "reliability" else 0.15
        axes = make_axes(figure, left=0.62, right=0.15, top=top, bottom=0.55)
        if key != "precision_recall":
            axes.plot([0, 1], [0, 1], color=LINE, linewidth=1, linestyle=(0, (4, 4)))
        for colour, (name, (x, y, *sizes)) in zip(CLASS_COLOURS, lines.items(), strict=False):
            label = {"color": colour, "label": shorten(name, 24)}
            if key == "reliability":
                _points(axes, (x, y, sizes[0] if sizes else []), len(lines) == 1, label)
                continue
            axes.plot(x, y, linewidth=1.8, **label)
            if key == "precision_recall":
                # Where everything is recalled, precision is the share of the class.
                axes.axhline(y[0], color=colour, linewidth=1, linestyle=(0, (3, 3)))
        # Half of the largest point.
        beyond = 0.04 if key == "reliability" else 0.01
        ends = (-beyond, 1 + beyond)
        axes.set(xlim=ends, ylim=ends, xlabel=across, ylabel=up)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=9, loc=PLACES[key])

    return draw


def _points(
    axes: Any,
    points: tuple[list[float], list[float], list[int]],
    alone: bool,
    label: dict[str, str],
) -> None:
    """Shares of bins, with areas that grow with their records; of one class with interval and
    number.
    """
    x, y, sizes = points
    most = max(sizes, default=1)
    axes.scatter(x, y, [14 + 110 * each / most for each in sizes] or 30, alpha=0.75, **label)
    if not alone:
        return
    middles = (bins_of(np.array(x)) + 0.5) / BINS
    for middle, across, share, size in zip(middles.tolist(), x, y, sizes, strict=False):
        ends = wilson(round(share * size), size)
        axes.plot([across, across], ends, color=label["color"], linewidth=1)
        axes.text(middle, 1.055, f"{size}", ha="center", fontsize=8, color=QUIET)
    axes.text(-0.04, 1.055, "n =", ha="center", fontsize=8, color=QUIET)
