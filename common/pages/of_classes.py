"""Parts of pages about a model of classes: its curves, its confusion matrix, and a row of measures for
each class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..escapes import shorten
from ..models.class_measures import BINS, ClassReport, bins_of
from .svg import CLASS_COLOURS, FAINT, LINE, QUIET, make_axes, render, render_page, trusted, undrawn

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
# A measure with its interval, for templates.
INTERVAL = """\
{% macro interval(m, digits=3) %}
{%- if m is none or m.value is none -%}<span class="quiet">undefined</span>
{%- else -%}{{ "%.*f" | format(digits, m.value) }}{% if m.low is not none %} <span class="quiet limits">{{ "%.*f" | format(digits, m.low) }} to {{ "%.*f" | format(digits, m.high) }}</span>{% endif %}{%- endif -%}
{% endmacro %}
"""
MATRIX = """\
<section class="card confusion"><h2>Confusion matrix</h2><div class="scroll"><table>
<thead><tr><th>true class</th>{% for name in classes %}<th class="number">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in matrix %}{% set total = row | sum %}<tr><td>{{ classes[loop.index0] }}</td>
{% for n in row %}<td class="cell" style="--share: {{ "%.3f" | format(n / total if total else 0) }}">{{ n }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div><p class="after quiet">Columns are decisions; shades are shares of the true class.</p></section>
"""
ROWS = (
    INTERVAL
    + """\
<section class="card"><h2>Each class</h2><div class="scroll"><table class="dense">
<thead><tr><th>class</th><th class="number">records</th>{% for name in names.values() %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for c in rows %}<tr><td data-name="class"><span>{{ c.name }}{% if c.few %} <span class="bad">fewer than ten</span>{% endif %}</span></td><td class="number" data-name="records">{{ c.support }}</td>
{% for key, name in names.items() %}<td data-name="{{ name }}"><span>{{ interval(c.measures[key]) }}</span></td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>{% if note %}<p class="after quiet">{{ note }}</p>{% endif %}</section>
"""
)


def undefined_because(average: str, rows: Sequence[ClassReport]) -> str:
    """Why an average over classes is undefined, naming them; empty if it is not known.

    Args:
        average: its name, such as "macro_auroc" or "balanced_accuracy".
        rows: of the classes.
    """
    key = "sensitivity" if average == "balanced_accuracy" else average.removeprefix("macro_")
    names = [row.name for row in rows if row.support and row.measures[key].value is None]
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
    return trusted(render_page(MATRIX, {"classes": classes, "matrix": matrix}))


def classes_card(rows: Sequence[ClassReport | Mapping[str, Any]], note: str = "") -> str:
    """A table of measures with a row for each class, as a card.

    Args:
        rows: of the classes.
        note: below the table; empty for none.
    """
    return trusted(render_page(ROWS, {"rows": rows, "names": NAMES, "note": note}))


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
    from scipy.stats import binomtest

    x, y, sizes = points
    most = max(sizes, default=1)
    axes.scatter(x, y, [14 + 110 * each / most for each in sizes] or 30, alpha=0.75, **label)
    if not alone:
        return
    middles = (bins_of(np.array(x)) + 0.5) / BINS
    for middle, across, share, size in zip(middles.tolist(), x, y, sizes, strict=False):
        limits = binomtest(round(share * size), size).proportion_ci(method="wilson")
        axes.plot([across, across], [limits.low, limits.high], color=label["color"], linewidth=1)
        axes.text(middle, 1.055, f"{size}", ha="center", fontsize=8, color=QUIET)
    axes.text(-0.04, 1.055, "n =", ha="center", fontsize=8, color=QUIET)
