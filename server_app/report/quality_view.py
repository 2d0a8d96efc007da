"""What a report shows of a model's quality, of classes or another target, and of the run's privacy."""

from __future__ import annotations

import json
import math

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.escapes import percent
from fedsurrogate.common.models.class_metrics import (
    Metric,
    ModelQuality,
    leads_with_auroc,
    unpacked_quality,
)
from fedsurrogate.common.pages.svg import (
    captions,
    classes_card,
    confusion_card,
    curve_pictures,
    trusted,
    undefined_because,
)
from fedsurrogate.common.targets.metrics import IN_WORDS, metric_text, score_in_words
from fedsurrogate.common.targets.registry import TARGETS

from ..runs.reader import RunFolder
from ..runs.state import Json, as_list, as_number, as_numbers, as_table, at, natural_order

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


def recorded_quality(run: RunFolder) -> ModelQuality | None:
    """The metrics that a run has recorded; None without any that can be read.

    Args:
        run: the content of the run folder.
    """
    if not (facts := as_table(run.metrics.get(QUALITY))):
        return None
    try:
        return unpacked_quality(json.dumps(facts))
    except SurrogateError:
        return None


def quality_view(run: RunFolder) -> Json | None:
    """The part of the page about a model of classes; None for a run without test records, or of another
    target.

    Args:
        run: the content of the run folder.

    Returns:
        averages: in words, each with its value and interval. words: whose records, and what a guess
        reaches. pictures: key, title, picture and caption of each. matrix: the confusion matrix as
        HTML; empty without one. rows: the table of the classes as HTML; empty without one.
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
    return {
        "averages": shown,
        "words": words_of(found),
        "pictures": pictures,
        "matrix": confusion_card(found.classes, found.confusion) if fits else "",
        "rows": classes_card(found.per_class, left) if found.per_class else "",
    }


def words_of(found: ModelQuality) -> str:
    """Whose records they are, and what the majority baseline reaches.

    Args:
        found: metrics of a run.
    """
    whose = f" of {found.units} patients" if found.units else ""
    unknown = (
        f" {found.unknown} more are of classes that the model does not know."
        if found.unknown
        else ""
    )
    return (
        f"{found.records} test records{whose}, of all sites together. The majority baseline "
        f"is right for {percent(found.majority)}. Intervals of 95 % are from samples of "
        f"{'patients' if found.units else 'records'}.{unknown}"
    )


def sentence_of(found: ModelQuality) -> str:
    """The metrics in one line, for a terminal.

    Args:
        found: metrics of a run.
    """
    parts = []
    named = [("balanced_accuracy", "balanced accuracy"), ("macro_auroc", "AUROC")]
    if leads_with_auroc(found.majority):
        named.reverse()
    for name, short in named:
        value, limits = _in_words(found.averages[name]) if name in found.averages else ("", "")
        if value:
            parts.append(f"{short} {value}" + (f" ({limits})" if limits else ""))
    parts.append(f"majority baseline {percent(found.majority)}")
    if found.unknown:
        parts.append(f"without {found.unknown} records of classes that the model does not know")
    return ", ".join(parts)


def _in_words(metric: Metric) -> tuple[str, str]:
    """A value and its interval; empty texts where there is none."""
    if metric.value is None:
        return "", ""
    limits = "" if metric.low is None else f"{metric.low:.3f} to {metric.high:.3f}"
    return f"{metric.value:.3f}", limits


def metrics_view(run: RunFolder) -> Json | None:
    """A table of the metrics of a run; None for a run of classes, or one that measured nothing.

    Args:
        run: whose metrics have them.

    Returns:
        names: of the columns, in words. rows: whose test records, which answer, and a text for each
        column. score: the metric that says most, in words, such as "a mean AUROC of 0.912 over 3
        answers"; empty if it is not known. choices: what a target chose, and why.
    """
    rows = [
        ("all sites" if place == "all" else place, output, as_numbers(own))
        for place, output, own in run.metric_values
    ]
    if not rows:
        return None
    names = tuple(dict.fromkeys(name for _, _, own in rows for name in own))
    table = [
        (place, output, [metric_text(name, own.get(name)) for name in names])
        for place, output, own in rows
    ]
    kind = TARGETS.get(str(run.config.get("task")))
    within = bool(at(run.metrics, "metric_values", "ranks"))
    together = [own for place, _, own in rows if place == "all sites"]
    scores = [] if kind is None else [own[kind.score] for own in together if kind.score in own]
    return {
        "names": [IN_WORDS.get(name, name) for name in names],
        "rows": table,
        "score": score_in_words(kind.score, scores, within) if kind else "",
        "choices": _choices(run),
    }


def _choices(run: RunFolder) -> tuple[str, ...]:
    learning = as_table(run.metrics.get("learning"))
    found = ((key, learning.get(key)) for key in ("label code", "label moment"))
    return tuple(f"{key}: {value}" for key, value in found if isinstance(value, str))


STATISTICS = {"counts": "class sizes", "sums": "class sums", "squares": "second moments"}
MECHANISMS = {
    "sums": "noisy class sums",
    "secure-aggregation": "noise in secure aggregation",
    "counts": "noise on counts",
    "dp-em": "noisy EM (DP-EM)",
    "theorem-4.1": "FedPFT theorem 4.1",
}


def privacy_view(run: RunFolder) -> Json:
    """All values that the privacy section of the page shows."""
    privacy = as_table(at(run.metrics, "privacy"))
    per_site = as_table(privacy.get("per_site"))
    rows = [_row(name, as_table(per_site[name])) for name in sorted(per_site, key=natural_order)]
    epsilon, delta = as_number(privacy.get("epsilon")), as_number(privacy.get("delta"))
    units = {row["unit"] for row in rows if row["unit"]} or {"record"}
    config = run.config
    return {
        "private": epsilon is not None or bool(rows),
        "epsilon": epsilon,
        "seed": config.get("noise-seed") or 0,
        "delta": delta,
        "one_in": round(1 / delta) if delta else None,
        "factor": math.exp(min(epsilon, 700.0)) if epsilon is not None else None,
        "certainty": 1 / (1 + math.exp(-epsilon)) if epsilon is not None and epsilon >= 0 else None,
        "units": sorted(units),
        "relation": str(privacy.get("relation") or "add or remove one record"),
        "covers": str(privacy.get("covers") or ""),
        "not_covered": [str(item) for item in as_list(privacy.get("not_covered"))],
        "dropped": [str(name) for name in as_list(privacy.get("dropped_classes"))],
        # One, and several, of what a run with this target learns.
        "learns": ("label", "labels")
        if config.get("task") == "multilabel"
        else ("class", "classes"),
        "rows": rows,
        "statistics": [
            (key, text)
            for key, text in STATISTICS.items()
            if any(key in row["noise"] for row in rows)
        ],
        "signals": [
            (key, text)
            for key, text in STATISTICS.items()
            if any(key in row["signal"] for row in rows)
        ],
        "tight": any(row["tight"] is not None for row in rows),
        "sum": _sum(as_table(run.metrics.get("learning"))),
        "asked": as_number(config.get("epsilon")) or None,
    }


def _sum(learning: Json) -> Json:
    """The numbers of secure aggregation, and whether every site knew the keys of the others; empty for
    other runs.
    """
    keys = {"summed": "secure-aggregation-of", "members": "members", "local": "local-epsilon"}
    keys |= {each: each for each in ("colluding", "least")}
    found = {name: as_number(learning.get(key)) for name, key in keys.items()}
    if found["summed"] is None or found["members"] is None:
        return {}
    found |= {name: found[name] or 0 for name in ("colluding", "least")}
    return found | {"pinned": learning.get("keys") == "pinned by every site"}


def privacy_line(metrics: Json) -> str:
    """Privacy guarantee in one line: "sums, epsilon 4, delta 1e-05, for one record"; "none" without
    a guarantee.

    Example:
        >>> sites = {"north": {"unit": "record"}}
        >>> privacy = {"mechanism": "sums", "epsilon": 4.0, "delta": 1e-5, "per_site": sites}
        >>> privacy_line({"privacy": privacy})
        'sums, epsilon 4, delta 1e-05, for one record'
    """
    privacy = as_table(metrics.get("privacy"))
    parts = [str(privacy["mechanism"])] if privacy.get("mechanism") else []
    parts += [
        f"{key} {number:g}"
        for key in ("epsilon", "delta")
        if (number := as_number(privacy.get(key))) is not None
    ]
    units = {
        str(site["unit"])
        for site in as_table(privacy.get("per_site")).values()
        if as_table(site).get("unit")
    }
    return ", ".join(parts + [f"for one {' or '.join(sorted(units))}"] * bool(units)) or "none"


def _row(name: str, site: Json) -> Json:
    mechanism = str(site.get("mechanism") or "")
    return {
        "name": name,
        "unit": str(site.get("unit") or ""),
        "epsilon": as_number(site.get("epsilon")),
        "delta": as_number(site.get("delta")),
        "tight": as_number(site.get("epsilon_tight")),
        "mechanism": MECHANISMS.get(mechanism, mechanism),
        "multiplier": as_number(site.get("noise_multiplier")),
        "noise": as_numbers(site.get("noise")),
        "signal": as_numbers(site.get("signal_to_noise")),
    }
