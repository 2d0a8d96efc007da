"""What a report shows of evaluation.json and survey.json: noisy counts, and intervals that include
the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import percent
from fedsurrogate.common.files import read_json
from fedsurrogate.common.models.class_metrics import leads_with_auroc
from fedsurrogate.common.pages.svg import BLUE, GREEN, INK, NAMED_SITES, ORANGE
from fedsurrogate.common.targets.metrics import IN_WORDS as OF_METRICS
from fedsurrogate.common.targets.metrics import metric_text

from ..runs.state import Json, as_list, as_number, as_table, at, clean
from .plots.rows import Series, WithInterval, draw_rows, draw_survival

HIDDEN, ALL = "hidden by the noise", "all sites"
# Metrics of a class in evaluation.json, in the order of the page: name, colour and mark.
METRIC_VALUES = {
    "sensitivity": ("sensitivity", BLUE, "o"),
    "specificity": ("specificity", ORANGE, "s"),
    "auroc": ("AUROC", GREEN, "D"),
}
IN_WORDS = OF_METRICS | {
    "bias": "mean error",
    "coverage": "within the model's interval",
    "survival": "without the event at the horizon",
}
OF_CHANCE = "an AUROC, nor that of the balanced accuracy, is above what chance reaches"
SHARES = ("sensitivity", "specificity", "auroc", "coverage", "survival", "prevalence")
COUNTS = ("records", "present", "annotated", "events", "last seen", "outlived")
# The measure of each output at each site that is drawn, by target.
FOREST = {"multilabel": "auroc", "regression": "mae"}
LIMITS = {
    "multilabel": "A label is decided at a probability of one half.",
    "regression": "Errors are those within the public range; few large ones count as the largest that "
    "counting.largest-error allows. If fewer than 90 % of the numbers lie within the model's "
    "interval, the true errors are larger.",
    "survival": "Thirds are those of the risk at the records from which the model was learned.",
}


@dataclass(frozen=True)
class CountsView:
    """One kind of counts, as the page shows it.

    Attributes:
        kind: "evaluation" or "survey".
        sites: their number, in words.
        title: a sentence for the top of the page.
        pictures: SVG strings; none if the noise hides all metrics, or for more than NAMED_SITES
            rows.
        columns: names of the columns of a table.
        rows: the cells of the table, row by row.
        words: sentences below it.
    """

    kind: str
    sites: str
    title: str
    pictures: tuple[str, ...]
    columns: list[str]
    rows: list[list[str]]
    words: list[str] = field(default_factory=list)


def counts_views(folder: Path) -> list[CountsView]:
    """The counts in a run folder: of the run itself if it counted, or of its model, evaluated
    later.
    """
    views = []
    for kind in ("evaluation", "survey"):
        try:
            content = clean(read_json(folder, f"{kind}.json"))
        except RunError:
            continue
        if content.get("kind") == kind and (view := view_of(content)) is not None:
            views.append(view)
    return views


def view_of(content: Json) -> CountsView | None:
    """The counts of evaluation.json or survey.json; None where they have neither classes nor outputs."""
    if as_table(content.get("outputs")):
        return _evaluation_of_target(content)
    if not as_table(content.get("classes")):
        return None
    return _evaluation(content) if content["kind"] == "evaluation" else _survey(content)


def _evaluation(content: Json) -> CountsView:
    classes = {str(name): as_table(row) for name, row in as_table(content["classes"]).items()}
    measured = {key: [_range(row.get(key)) for row in classes.values()] for key in METRIC_VALUES}
    series = [
        Series(measured[key], colour, name, mark)
        for key, (name, colour, mark) in METRIC_VALUES.items()
    ]
    rows = [
        [name, _number(row.get("records")), *(_share(row.get(metric)) for metric in METRIC_VALUES)]
        for name, row in classes.items()
    ]
    noise = as_table(content.get("noise"))
    if noise and not any(noise.values()):
        rows = [["undefined" if cell == HIDDEN else cell for cell in row] for row in rows]
    counted = [each for row in classes.values() if (each := _range(row.get("records")))]
    records = [max(0.0, each.value) for each in counted]
    majority = max(records, default=0.0) / max(1.0, sum(records))
    guessed = HIDDEN if any(each.low <= 0 < each.high for each in counted) else percent(majority)
    accuracy, balanced = (_share(content.get(key)) for key in ("accuracy", "balanced_accuracy"))
    about = "" if (total := _range(content.get("records"))) is None else f"{total.value:,.0f} "
    whose = f"{about}held-out records of its classes at {_sites(content)}"
    title = f"The model is right for {accuracy} of {whose}"
    if accuracy == HIDDEN:
        title = f"Noise hides the accuracy of the model on {whose}"
    if leads_with_auroc(majority) and balanced != HIDDEN:
        title = f"Balanced accuracy {balanced}. {title}"
    words = [
        f"Balanced accuracy: {balanced}. Majority baseline: {guessed}.",
        "All of this is about records of the model's classes. No record of another class is counted, and the "
        "model is wrong for each; the log of each site says how many it left out.",
    ]
    absent = as_list(content.get("without_records"))
    even = 1 / max(1, len(classes) - len(absent))
    chances = [(_range(content.get("balanced_accuracy")), even)]
    chances += [(each, 0.5) for each in measured["auroc"]]
    above = [each.low > chance for each, chance in chances if each is not None]
    if above and not any(above):
        words.insert(0, f"The model may be no better than chance: no interval of {OF_CHANCE}.")
    if absent:
        words.append(f"Undefined, because no record was counted: {', '.join(map(str, absent))}.")
    words += [
        f"At site {site} alone: accuracy {_share(each)}."
        for site, each in as_table(content.get("per_site")).items()
    ]
    if (exact := _range(at(content, "exact", "accuracy"))) is not None:
        words.append(
            f"Exact accuracy, known because the run was a simulation: {percent(exact.value)}."
        )
    return CountsView(
        "evaluation",
        _sites(content),
        title,
        _drawn("evaluation", [*classes], series, ("class", "on held-out records"), shares=True),
        ["Class", "Records", *(_title(name) for name, _, _ in METRIC_VALUES.values())],
        rows,
        [_noise(content), *words],
    )


def _evaluation_of_target(content: Json) -> CountsView:
    """Of labels, numbers or times."""
    outputs = {str(name): as_table(row) for name, row in as_table(content["outputs"]).items()}
    metric_values = list(dict.fromkeys(key for row in outputs.values() for key in row))
    places = {ALL: outputs} | {
        str(site): {str(name): as_table(row) for name, row in as_table(own).items()}
        for site, own in as_table(content.get("per_site")).items()
    }
    if exact := as_table(at(content, "exact", "outputs")):
        places["exact, of the simulation"] = {name: as_table(row) for name, row in exact.items()}
    kind = str(content.get("task"))
    rows = [
        [place, name, *(_metric_text(key, row.get(key)) for key in metric_values)]
        for place, own in places.items()
        for name, row in own.items()
    ]
    words = [LIMITS[kind]] if kind in LIMITS else []
    if (chance := as_number(at(content, "log_rank", "chance"))) is not None:
        words.append(f"Log-rank test of the three thirds: p = {chance:.2g}.")
    pictures: tuple[str, ...] = ()
    if (metric := FOREST.get(kind)) is not None:
        lines = [
            (name, place, each)
            for name in outputs
            for place, own in places.items()
            if (each := _range(as_table(own.get(name)).get(metric))) is not None
        ]
        series = [
            Series([each if (place == ALL) == of_all else None for _, place, each in lines], *style)
            for of_all, style in ((True, (INK, "", "D")), (False, (BLUE, "", "s")))
        ]
        names = [f"{name}, {place}" for name, place, _ in lines]
        shares = metric in SHARES
        pictures = _drawn("evaluation", names, series, ("answer", IN_WORDS[metric]), shares=shares)
    curves = {str(name): as_table(each) for name, each in as_table(content.get("curves")).items()}
    edges = [each for each in map(as_number, as_list(content.get("edges"))) if each is not None]
    if curves and len(edges) > 1:
        numbers = {
            name: {key: [as_number(x) for x in as_list(column)] for key, column in each.items()}
            for name, each in curves.items()
        }
        pictures += (draw_survival(numbers, edges, str(content.get("unit", ""))),)
    return CountsView(
        "evaluation",
        _sites(content),
        f"The model's answers on held-out records of {_sites(content)}",
        pictures,
        ["Where", "What", *(_title(IN_WORDS.get(key, key)) for key in metric_values)],
        rows,
        [_noise(content), *words],
    )


def _title(words: str) -> str:
    return words[:1].upper() + words[1:]


def _metric_text(name: str, value: Any) -> str:
    """A metric of labels, numbers or times with its interval, in words.

    Args:
        name: of the metric.
        value: with its interval, as in evaluation.json.
    """
    number = _range(value)
    if name in COUNTS or number is None:
        return _number(value)
    if name in SHARES:
        return _share(value)
    value, low, high = (metric_text(name, each) for each in (number.value, number.low, number.high))
    return f"{value} ({low} to {high})"


def _survey(content: Json) -> CountsView:
    classes = as_table(content["classes"])
    records = {str(name): each for name, row in classes.items() if (each := _range(row))}
    sites = {
        str(name): as_list(counts) for name, counts in as_table(content.get("per_site")).items()
    }
    rows = [
        [str(name), _number(row), *(_cell(counts[place : place + 1]) for counts in sites.values())]
        for place, (name, row) in enumerate(classes.items())
    ]
    words = [
        f"A run at epsilon {epsilon} could reach an accuracy of about {percent(value)}."
        for epsilon, each in as_table(at(content, "estimate", "accuracy")).items()
        if (value := as_number(each)) is not None
    ]
    if isinstance(how := at(content, "estimate", "how"), str):
        words.append(how[:1].upper() + how[1:] + ("" if how.endswith(".") else "."))
    questions = as_table(content.get("questions"))
    words = [
        f"{name}: "
        + ", ".join(f"{key} {_metric_text(key, each)}" for key, each in as_table(own).items())
        + "."
        for name, own in questions.items()
    ] + words
    # With one question its name is in every cell.
    first = f"{next(iter(questions))}: " if len(questions) == 1 else ""
    names = [name.removeprefix(first) for name in records]
    series, what = [Series([*records.values()], BLUE)], "cell" if questions else "class"
    return CountsView(
        "survey",
        _sites(content),
        f"{_sites(content)} have {_number(content.get('records'))} records".capitalize(),
        _drawn("survey", names, series, (what, "records")),
        [what.capitalize(), "All sites", *(f"Site {name}" for name in sites)],
        rows,
        [_noise(content), *words],
    )


def _drawn(
    key: str,
    rows: list[str],
    series: list[Series],
    titles: tuple[str, str],
    *,
    shares: bool = False,
) -> tuple[str, ...]:
    """The picture; none for more rows than fit, or where the noise hides all numbers."""
    known = any(each is not None for own in series for each in own.values)
    fits = known and len(rows) <= NAMED_SITES
    return (draw_rows(key, rows, series, titles, shares=shares),) if fits else ()


def _range(value: Any) -> WithInterval | None:
    numbers = [as_number(as_table(value).get(key)) for key in ("value", "low", "high")]
    known = [each for each in numbers if each is not None]
    return WithInterval(*known) if len(known) == 3 else None


def _share(value: Any) -> str:
    share = _range(value)
    return (
        HIDDEN
        if share is None
        else f"{percent(share.value)} ({percent(share.low)} to {percent(share.high)})"
    )


def _number(value: Any) -> str:
    number = _range(value)
    return (
        HIDDEN
        if number is None
        else f"{number.value:,.0f} ({number.low:,.0f} to {number.high:,.0f})"
    )


def _cell(numbers: list[Any]) -> str:
    number = as_number(numbers[0]) if numbers else None
    return "" if number is None else f"{number:,.0f}"


def _sites(content: Mapping[str, Any]) -> str:
    count = int(as_number(content.get("sites")) or 0)
    return f"{count} {'site' if count == 1 else 'sites'}"


def _noise(content: Json) -> str:
    summed = content.get("secure_aggregation") is True
    epsilon = as_number(at(content, "privacy", "epsilon"))
    if not epsilon:
        whose = " of all sites together, from secure aggregation" if summed else ""
        return f"Exact counts{whose}, which the policies of the sites allow. In brackets: 95 % intervals."
    delta = as_number(at(content, "privacy", "delta")) or 0.0
    where = "in the secure aggregation over all sites" if summed else "at each site"
    return (
        f"From counts with noise: epsilon {epsilon:g}, delta {delta:g} {where}. In "
        "brackets: 95 % intervals, which include the noise."
    )
