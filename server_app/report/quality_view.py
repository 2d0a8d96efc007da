"""How well a model of classes answers on the test records of a simulation, as the report shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.class_measures import leads_with_auroc
from fedsurrogate.common.models.intervals import Measure
from fedsurrogate.common.models.model_quality import ModelQuality, unpacked_quality
from fedsurrogate.common.number_format import percent
from fedsurrogate.common.pages.html import trusted
from fedsurrogate.common.pages.of_classes import (
    captions,
    classes_card,
    confusion_card,
    curve_pictures,
    undefined_because,
)
from fedsurrogate.server_app.runs.json_values import as_table
from fedsurrogate.server_app.runs.reader import RunFolder

QUALITY = "quality"
AVERAGES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_auroc": "mean AUROC",
    "macro_f1": "mean F1",
    "macro_auprc": "mean average precision",
    "macro_brier": "mean Brier score",
    "macro_calibration_error": "mean calibration error",
}
# A larger matrix does not fit a page.
LARGEST_MATRIX = 24


@dataclass(frozen=True)
class QualityView:
    """Parts of the page about a model of classes.

    Attributes:
        averages: in words, each with its value and interval.
        words: whose records, and what a guess reaches.
        pictures: key, title, picture and caption of each.
        matrix: the confusion matrix as HTML; empty without one.
        rows: the table of the classes as HTML; empty without one.
    """

    averages: tuple[tuple[str, str, str], ...]
    words: str
    pictures: tuple[tuple[str, str, str, str], ...]
    matrix: str
    rows: str


def recorded_quality(run: RunFolder) -> ModelQuality | None:
    """The measures that a run has recorded; None without any that can be read.

    Args:
        run: the content of the run folder.
    """
    if not (facts := as_table(run.metrics.get(QUALITY))):
        return None
    try:
        return unpacked_quality(json.dumps(facts))
    except SurrogateError:
        return None


def quality_view(run: RunFolder) -> QualityView | None:
    """The part of the page; None for a run without test records, or of another target.

    Args:
        run: the content of the run folder.
    """
    if (found := recorded_quality(run)) is None:
        return None
    first = ("macro_auroc", "balanced_accuracy") if leads_with_auroc(found.majority) else ()
    shown = []
    for name in dict.fromkeys((*first, *AVERAGES)):
        if name in found.averages:
            value, limits = _in_words(found.averages[name])
            why = "" if value else undefined_because(name, found.per_class)
            shown.append((AVERAGES[name], value or "undefined", limits or why))
    curves = found.curves or {}
    sizes = {row.name: row.support for row in found.per_class}
    positive = next(iter(curves), "") if len(found.classes) == 2 else ""
    words = captions(positive, sizes.get(positive, 0), found.records)
    pictures = [
        (key, title, trusted(svg), words[key])
        for key, title, svg in curve_pictures(curves, list(curves))
    ]
    fits = 0 < len(found.confusion) <= LARGEST_MATRIX
    left = (
        f"Undefined, because no test record is of them, and in no average: {', '.join(found.left_out)}."
        if found.left_out
        else ""
    )
    return QualityView(
        tuple(shown),
        words_of(found),
        tuple(pictures),
        confusion_card(found.classes, found.confusion) if fits else "",
        classes_card(found.per_class, left) if found.per_class else "",
    )


def words_of(found: ModelQuality) -> str:
    """Whose records they are, and what always giving the largest class reaches.

    Args:
        found: measures of a run.
    """
    whose = f" of {found.units} patients" if found.units else ""
    unknown = (
        f" {found.unknown} more are of classes that the model does not know."
        if found.unknown
        else ""
    )
    return (
        f"{found.records} test records{whose}, of all sites together. Always giving the largest class "
        f"is right for {percent(found.majority)}. Intervals of 95 % are from samples of "
        f"{'patients' if found.units else 'records'}.{unknown}"
    )


def sentence_of(found: ModelQuality) -> str:
    """The measures in one line, for a terminal.

    Args:
        found: measures of a run.
    """
    parts = []
    named = [("balanced_accuracy", "balanced accuracy"), ("macro_auroc", "AUROC")]
    if leads_with_auroc(found.majority):
        named.reverse()
    for name, short in named:
        value, limits = _in_words(found.averages[name]) if name in found.averages else ("", "")
        if value:
            parts.append(f"{short} {value}" + (f" ({limits})" if limits else ""))
    return ", ".join([*parts, f"largest class alone {percent(found.majority)}"])


def _in_words(measure: Measure) -> tuple[str, str]:
    """A value and its interval; empty texts where there is none."""
    if measure.value is None:
        return "", ""
    limits = "" if measure.low is None else f"{measure.low:.3f} to {measure.high:.3f}"
    return f"{measure.value:.3f}", limits
