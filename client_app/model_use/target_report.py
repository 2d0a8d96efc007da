"""What an evaluation says of a model of another target than classes: metrics with intervals, and
pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.class_metrics import Array, Metric, curves_of
from fedsurrogate.common.models.classifiers import Classifier, scores_alone, target_of_model
from fedsurrogate.common.pages.svg import (
    MOST_DRAWN,
    curve_pictures,
    page_head,
    render_page,
    trusted,
    undrawn,
)
from fedsurrogate.common.targets.metrics import (
    IN_WORDS,
    answers_of,
    facts_of,
    measured,
    metric_text,
    metrics_of,
    score_in_words,
)
from fedsurrogate.common.targets.registry import TARGETS

from . import target_metrics
from .calibration import PRESENT, Calibration, decided_answers
from .held_out import HeldOut
from .target_metrics import Observed, Predictions, label_metrics, number_metrics, time_metrics

# Titles and pictures, as HTML.
Pictures = list[tuple[str, str]]
MetricValues = dict[str, dict[str, Metric]]
IMAGE = '<img alt="{{ title }}" style="max-width: 100%" src="data:image/png;base64,{{ content }}">'
# The beginning of every page about an evaluation.
HEADING = (
    page_head("Evaluation · {{ e.model.name }}")
    + """\
</head>
<body>
<main>
<header>
<p class="eyebrow">Evaluation · {{ e.model.name }} · {{ e.made }} · stays at this site</p>
"""
)
PAGE = (
    HEADING
    + """\
<h1>{{ score ~ " on " if score }}{{ e.count }} records.</h1>
<p>{% if e.adapted %}The model is this site's own version of the shared one. {% endif %}
{{ e.records | capitalize }}{% if e.left_out %}; {{ e.left_out }} more cannot be used{% endif %}.
{% if e.calibration.note %}Decisions: {{ e.calibration.note }}. {% endif %}
Intervals are percentiles of {{ "whole patients" if e.patients else "records" }} drawn with replacement.</p>
</header>
<section class="card"><h2>What the model answers</h2><div class="scroll" tabindex="0"><table class="dense">
<thead><tr><th>answer</th><th class="number">records</th>
{% for name in columns.values() %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for answer, records, cells in rows %}<tr><td data-name="answer">{{ answer }}</td>
<td class="number" data-name="records">{{ records }}</td>
{% for key, name in columns.items() %}<td data-name="{{ name }}"><span>
{% if key in cells %}{{ cells[key][0] }} <span class="quiet limits">{{ cells[key][1] }}</span>{% endif %}
</span></td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<p class="after quiet">Below a value: its interval of 95 %, and the number n of records where it is not of all.</p></section>
{% if undrawn %}<p class="quiet">{{ undrawn }}.</p>{% endif %}
{% for title, picture in pictures %}
<figure class="card"><h2>{{ title }}</h2><div class="plots">{{ picture }}</div></figure>
{% endfor %}
</main>
</body>
</html>
"""
)


@dataclass(frozen=True, eq=False)
class Answers:
    """Records and what a model says of them.

    Attributes:
        facts: that the model carries about its target.
        outputs: names of its scores.
        scores: (n, o).
        columns: what it answers, by name, (n,) each.
        plain: the same without anything of this site.
        values: true ones, (n, k), NaN where missing.
        patients: of each record, if known.
    """

    facts: Mapping[str, Any]
    outputs: tuple[str, ...]
    scores: torch.Tensor
    columns: Mapping[str, Array]
    plain: Mapping[str, Array]
    values: Array
    patients: tuple[str, ...] | None

    def true(self, name: str) -> Array:
        """The true values (n,) of an output."""
        column: Array = self.values[:, list(self.facts["columns"]).index(name)]
        return column


def page_of_target(content: Mapping[str, Any], pictures: Pictures) -> str:
    """The page of an evaluation.

    Args:
        content: of evaluation.json.
        pictures: as HTML, with titles.
    """
    answers: Mapping[str, Mapping[str, Any]] = content["metric_values"]
    rows = []
    for answer, own in answers.items():
        records = max(each["support"] for each in own.values())
        cells = {key.removeprefix("macro_"): _cell(key, each, records) for key, each in own.items()}
        rows.append((answer, records, cells))
    keys = dict.fromkeys(key for _, _, cells in rows for key in cells)
    scores = {
        kind.score: [own[kind.score]["value"] for own in answers.values() if kind.score in own]
        for kind in TARGETS.values()
    }
    known = {name: [each for each in own if each is not None] for name, own in scores.items()}
    score = next((score_in_words(name, own) for name, own in known.items() if own), "")
    values = {
        "e": content,
        "score": score[:1].upper() + score[1:],
        "rows": rows,
        "columns": {key: IN_WORDS.get(key, key.replace("_", " ")) for key in keys},
        "pictures": [(title, trusted(picture)) for title, picture in pictures],
        "undrawn": undrawn(),
    }
    return render_page(PAGE, values).lstrip()


def in_words(key: str, metric: Mapping[str, Any]) -> tuple[str, str]:
    """The value of a metric, and its interval; empty without one.

    Args:
        key: its name.
        metric: as in evaluation.json.

    Example:
        >>> in_words("auroc", {"value": 0.5, "low": 0.25, "high": 1.0})
        ('0.500', '0.250 to 1.000')
    """
    value = "undefined" if metric["value"] is None else metric_text(key, metric["value"])
    if metric["low"] is None:
        return value, ""
    return value, " to ".join(metric_text(key, metric[end]) for end in ("low", "high"))


def _cell(key: str, metric: Mapping[str, Any], records: int) -> tuple[str, str]:
    """The value of a metric, and below it its interval, and its records if they are not all."""
    value, limits = in_words(key, metric)
    own = "" if metric["support"] == records else f"n {metric['support']:,}"
    return value, ", ".join(filter(None, (limits, own)))


def target_facts(
    classifier: Classifier, held: HeldOut, calibration: Calibration, draws: int
) -> tuple[dict[str, Any], Pictures]:
    """Judge a model.

    Args:
        classifier: of another target than classes.
        held: records with values of the target.
        calibration: prevalence and thresholds of labels at this site.
        draws: number of samples for the intervals.

    Returns:
        What evaluation.json has of it, and the pictures.

    Raises:
        DataError: for records without values.
        PackageError: without a library that computes a metric, or matplotlib.
    """
    if held.values is None:
        raise DataError("the held-out records have no values of the model's target")
    target, outputs = target_of_model(classifier), classifier.header.classes
    scores, facts = scores_alone(classifier, held.features), facts_of(target)
    columns, plain = (
        {name: column.numpy() for name, column in answers.items()}
        for answers in (
            decided_answers(target, outputs, scores, calibration),
            answers_of(target, outputs, scores),
        )
    )
    answers = Answers(facts, outputs, scores, columns, plain, held.values.numpy(), held.patients)
    judge = JUDGED.get(str(facts["name"]))
    metric_values, pictures = (
        (_plain(target, answers), []) if judge is None else judge(answers, draws)
    )
    content = {
        "count": len(held.values),
        "patients": held.patients is not None,
        "metric_values": {
            name: {key: asdict(each) for key, each in own.items()}
            for name, own in metric_values.items()
        },
    }
    return content, pictures


def _numbers(answers: Answers, draws: int) -> tuple[MetricValues, Pictures]:
    metric_values: MetricValues = {}
    pictures: Pictures = []
    for name in answers.outputs:
        low, high = (answers.columns.get(f"{name} {end}") for end in ("low", "high"))
        records = Predictions(
            answers.true(name), answers.columns[name], low, high, answers.patients
        )
        metric_values[name] = number_metrics(records, draws)
        for title, draw in (
            ("predicted against true", target_metrics.predicted_against_true),
            ("differences (Bland and Altman)", target_metrics.bland_altman),
        ):
            pictures.append(_picture(f"{name}: {title}", draw(records)))
    return metric_values, pictures


def _labels(answers: Answers, draws: int) -> tuple[MetricValues, Pictures]:
    names = answers.outputs
    truth = np.stack([answers.true(name) for name in names], 1)
    chances, plain = (
        {name: each[name] for name in names} for each in (answers.columns, answers.plain)
    )
    present = {
        name: answers.columns[name + PRESENT] for name in names if name + PRESENT in answers.columns
    }
    metric_values = label_metrics(truth, chances, plain, present, answers.patients, draws)
    curves = {}
    for at, name in enumerate(names):
        known = ~np.isnan(truth[:, at])
        curves[name] = curves_of(truth[known, at] == 1, chances[name][known])
    return metric_values, [
        (f"{title}: {', '.join(some)}", svg)
        for some in (names[at : at + MOST_DRAWN] for at in range(0, len(names), MOST_DRAWN))
        for _, title, svg in curve_pictures(curves, some)
    ]


def _times(answers: Answers, draws: int) -> tuple[MetricValues, Pictures]:
    edges = np.asarray(answers.facts["edges"], dtype=float)
    # At the horizon itself no record is left to compare.
    curves = [answers.columns[f"survival {edge:g}"] for edge in edges[1:-1]]
    records = Observed(
        answers.values[:, 0],
        answers.values[:, 1] == 1,
        answers.columns["risk"],
        answers.patients,
        edges[1:-1],
        np.stack(curves, 1) if curves else None,
    )
    horizon, unit = float(edges[-1]), str(answers.facts.get("unit", ""))
    figure = target_metrics.kaplan_meier_thirds(records, horizon, unit)
    return (
        {"risk": time_metrics(records, horizon, draws)},
        [_picture("Survival by third of the risk", figure)],
    )


def _plain(target: str, answers: Answers) -> MetricValues:
    """The metrics of a run, without intervals and pictures, for any other kind of target."""
    sums = measured(target, answers.outputs, answers.scores, torch.from_numpy(answers.values))
    return {
        output: {
            name: Metric(value, None, None, int(own["records"]))
            for name, value in own.items()
            if name != "records"
        }
        for output, own in metrics_of(sums).items()
    }


JUDGED: dict[str, Callable[[Answers, int], tuple[MetricValues, Pictures]]] = {
    "regression": _numbers,
    "multilabel": _labels,
    "survival": _times,
}


def _picture(title: str, figure: Any) -> tuple[str, str]:
    """A figure as PNG in an image of HTML."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=110)
    content = base64.b64encode(out.getvalue()).decode()
    return title, render_page(IMAGE, {"title": title, "content": content})
