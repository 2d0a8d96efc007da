"""Evaluation of a model of another target than classes on this site's held-out records: measures with
intervals, and plots. Nothing of it leaves the site.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.label_answers import decided_answers
from fedsurrogate.client_app.model_use.label_decisions import decision_measures
from fedsurrogate.client_app.model_use.target_metrics import plots
from fedsurrogate.client_app.model_use.target_metrics.labels import label_report
from fedsurrogate.client_app.model_use.target_metrics.numbers import Predictions, number_measures
from fedsurrogate.client_app.model_use.target_metrics.times import Observed, Survival, time_measures
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.classifiers import Classifier, scores_alone, target_of_model
from fedsurrogate.common.models.intervals import DRAWS, Array, Measure
from fedsurrogate.common.pages.html import render_page
from fedsurrogate.common.pages.style import page_head
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.targets.answers import answers_of, facts_of
from fedsurrogate.common.targets.measures import measured, metrics_of

Figures = dict[str, Any]
PLAIN = Calibration()
Measures = dict[str, dict[str, Measure]]
PAGE = (
    page_head("Evaluation · {{ e.model.name }}")
    + """\
</head>
<body>
<main>
<header>
<p class="eyebrow">Evaluation · {{ e.model.name }} · {{ e.made }} · stays at this site</p>
<h1>{{ e.count }} records.</h1>
<p>{% if e.adapted %}The model is this site's own version of the shared one. {% endif %}
{{ e.records | capitalize }}{% if e.left_out %}; {{ e.left_out }} more cannot be used{% endif %}.
{% if e.calibration.note %}Decisions: {{ e.calibration.note }}. {% endif %}
Intervals are percentiles of {{ "whole patients" if e.patients else "records" }} drawn with replacement.</p>
</header>
{% for name, own in e.measures.items() %}
<section class="card"><h2>{{ name }}</h2><div class="scroll"><table>
<thead><tr><th>measure</th><th class="number">value</th><th class="number">95 % interval</th>
<th class="number">records</th></tr></thead><tbody>
{% for key, m in own.items() %}<tr><td>{{ key | replace("_", " ") }}</td>
<td class="number">{{ "undefined" if m.value is none else "%.4g" | format(m.value) }}</td>
<td class="number">{% if m.low is not none %}{{ "%.4g to %.4g" | format(m.low, m.high) }}{% endif %}</td>
<td class="number">{{ m.support }}</td></tr>
{% endfor %}</tbody></table></div></section>
{% endfor %}
{% for title, picture in pictures.items() %}
<section class="card"><h2>{{ title }}</h2>
<img alt="{{ title }}" style="max-width: 100%" src="data:image/png;base64,{{ picture }}"></section>
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
        columns: what it answers, by name, (n,) each.
        values: true ones, (n, k), NaN where missing.
        patients: of each record, if known.
        plain: what it answers without anything of this site.
    """

    facts: Mapping[str, Any]
    outputs: tuple[str, ...]
    columns: Mapping[str, Array]
    values: Array
    patients: tuple[str, ...] | None
    plain: Mapping[str, Array]


def evaluate_target(
    model: SignedModel,
    held: HeldOut,
    folder: Path,
    draws: int = DRAWS,
    calibration: Calibration = PLAIN,
    own: Classifier | None = None,
) -> tuple[Path, Path]:
    """Judge a model, and write evaluation.json and evaluation.html.

    Args:
        model: of another target than classes.
        held: records with values of the target.
        folder: of the files.
        draws: number of samples for the intervals.
        calibration: prevalence and thresholds of labels at this site.
        own: the site's own version of the model; None for the shared one.

    Returns:
        Both files.

    Raises:
        DataError: for records without values.
        PackageError: without a library that computes a measure, or matplotlib.
        OSError: if they cannot be written.
    """
    classifier = own or model.classifier
    answers = _answers(classifier, held, calibration)
    judge = JUDGED.get(str(answers.facts["name"]), partial(_plain, classifier, held))
    measures, figures = judge(answers, draws)
    content = {
        "schema": 1,
        "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "model": model.manifest.model_dump(),
        "records": held.where,
        "count": len(answers.values),
        "patients": held.patients is not None,
        "left_out": held.left_out,
        "calibration": asdict(calibration),
        "adapted": own is not None,
        "measures": {
            name: {key: asdict(each) for key, each in own.items()} for name, own in measures.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    facts, page = folder / "evaluation.json", folder / "evaluation.html"
    facts.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    pictures = {title: _picture(figure) for title, figure in figures.items()}
    page.write_text(
        render_page(PAGE, {"e": content, "pictures": pictures}).lstrip(),
        encoding="utf-8",
        newline="\n",
    )
    return facts, page


def _answers(classifier: Classifier, held: HeldOut, calibration: Calibration) -> Answers:
    if held.values is None:
        raise DataError("the held-out records have no values of the model's target")
    target, outputs = target_of_model(classifier), classifier.header.classes
    scores = scores_alone(classifier, held.features)
    columns, plain = (
        {name: column.numpy() for name, column in answers.items()}
        for answers in (
            decided_answers(target, outputs, scores, calibration),
            answers_of(target, outputs, scores),
        )
    )
    return Answers(facts_of(target), outputs, columns, held.values.numpy(), held.patients, plain)


def _numbers(answers: Answers, draws: int) -> tuple[Measures, Figures]:
    measures: Measures = {}
    figures: Figures = {}
    for name in answers.outputs:
        records = Predictions(
            answers.values[:, answers.facts["columns"].index(name)],
            answers.columns[name],
            answers.columns.get(f"{name} low"),
            answers.columns.get(f"{name} high"),
            answers.patients,
        )
        measures[name] = number_measures(records, draws)
        figures[f"{name}: predicted against true"] = plots.predicted_against_true(records)
        figures[f"{name}: differences (Bland and Altman)"] = plots.bland_altman(records)
    return measures, figures


def _labels(answers: Answers, draws: int) -> tuple[Measures, Figures]:
    places = [answers.facts["columns"].index(name) for name in answers.outputs]
    truth = answers.values[:, places]
    chance = np.stack([answers.columns[name] for name in answers.outputs], 1)
    report = label_report(truth, chance, answers.outputs, answers.patients, draws)
    measures: Measures = {each.name: dict(each.measures) for each in report.labels}
    for at, name in enumerate(answers.outputs):
        measures[name] |= decision_measures(
            truth[:, at], answers.plain[name], answers.columns, name, answers.patients, draws
        )
    less = (
        f" but {', '.join(report.left_out)}, without a positive or without a negative record"
        if report.left_out
        else ""
    )
    measures[f"all labels{less}"] = dict(report.averages)
    areas = {each.name: {"this site": each.measures["auroc"]} for each in report.labels}
    names = list(answers.outputs)
    return measures, {
        "Area under the ROC curve": plots.forest(areas, "AUROC", 0.5),
        "Calibration": plots.calibration(truth, chance, names),
        "Precision and recall": plots.precision_recall(truth, chance, names),
    }


def _times(answers: Answers, draws: int) -> tuple[Measures, Figures]:
    edges = np.asarray(answers.facts["edges"], dtype=float)
    curves = np.stack([answers.columns[f"survival {edge:g}"] for edge in edges[1:]], 1)
    records = Observed(
        answers.values[:, 0], answers.values[:, 1] == 1, answers.columns["risk"], answers.patients
    )
    horizon, unit = float(edges[-1]), str(answers.facts.get("unit", ""))
    # At the horizon itself no record is left to compare.
    survival = Survival(edges[1:-1], curves[:, :-1]) if len(edges) > 2 else None
    measures = time_measures(records, horizon, survival, draws)
    figure = plots.kaplan_meier_thirds(records, horizon, unit)
    return {"risk": measures}, {"Survival by third of the risk": figure}


def _plain(
    classifier: Classifier, held: HeldOut, answers: Answers, draws: int
) -> tuple[Measures, Figures]:
    """The measures of a run, without intervals and plots, for any other kind of target."""
    scores = classifier.scores(held.features)
    sums = measured(
        target_of_model(classifier), answers.outputs, scores, torch.from_numpy(answers.values)
    )
    return {
        output: {
            name: Measure(value, None, None, int(own["records"]))
            for name, value in own.items()
            if name != "records"
        }
        for output, own in metrics_of(sums).items()
    }, {}


JUDGED: dict[str, Callable[[Answers, int], tuple[Measures, Figures]]] = {
    "number": _numbers,
    "labels": _labels,
    "time": _times,
}


def _picture(figure: Any) -> str:
    """A figure as PNG in base64."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return base64.b64encode(out.getvalue()).decode()
