"""What an evaluation says of a model of another target than classes: metrics with intervals, and
pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.models.class_metrics import Metric, curves_of
from fedsurrogate.common.models.classifiers import Classifier, scores_alone, target_of_model
from fedsurrogate.common.pages.svg import (
    MOST_DRAWN,
    curve_pictures,
    page_head,
    render,
    render_page,
    trusted,
    undrawn,
)
from fedsurrogate.common.targets.labels import LABELS
from fedsurrogate.common.targets.metrics import (
    IN_WORDS,
    answers_of,
    facts_of,
    measured,
    metric_text,
    metrics_of,
    score_in_words,
)
from fedsurrogate.common.targets.number import NUMBER
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.common.targets.time import TIME

from .calibration import PRESENT, Calibration, decided_answers
from .held_out import HeldOut
from .target_metrics import (
    PURPOSE,
    bland_altman,
    kaplan_meier_thirds,
    label_metrics,
    number_metrics,
    predicted_against_true,
    time_metrics,
)

# Titles and pictures, as HTML.
Pictures = list[tuple[str, str]]
MetricValues = dict[str, dict[str, Metric]]
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
        "pictures": [(title, trusted(picture)) for title, picture in pictures if picture],
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
        PackageError: without a library that computes a metric.
    """
    if held.values is None:
        raise DataError("the held-out records have no values of the model's target")
    target, outputs = target_of_model(classifier), classifier.header.classes
    scores, facts = scores_alone(classifier, held.features), facts_of(target)
    answers, plain = (
        {name: column.numpy() for name, column in each.items()}
        for each in (
            decided_answers(target, outputs, scores, calibration),
            answers_of(target, outputs, scores),
        )
    )
    values, own = held.values.numpy(), dict[str, Any](patients=held.patients, draws=draws)
    true = dict(zip(facts["columns"], values.T, strict=True))
    metric_values: MetricValues = {}
    pictures: Pictures = []
    match facts["name"]:
        case NUMBER.name:
            for name in outputs:
                limits = [answers[end] for end in (f"{name} low", f"{name} high") if end in answers]
                both = true[name], answers[name]
                metric_values[name] = number_metrics(*both, limits, **own)
                against = partial(predicted_against_true, limits=limits)
                for title, draw in (
                    ("predicted against true", against),
                    ("differences (Bland and Altman)", bland_altman),
                ):
                    pictures.append(_picture(f"{name}: {title}", draw, *both))
        case LABELS.name:
            chances, before = ({name: each[name] for name in outputs} for each in (answers, plain))
            present = {n: answers[n + PRESENT] for n in outputs if n + PRESENT in answers}
            truth = np.stack([true[name] for name in outputs], 1)
            metric_values = label_metrics(truth, chances, before, present, **own)
            known = {name: ~np.isnan(true[name]) for name in outputs}
            curves = {n: curves_of(true[n][at] == 1, chances[n][at]) for n, at in known.items()}
            pictures = [
                (f"{title}: {', '.join(some)}", picture)
                for some in (
                    outputs[at : at + MOST_DRAWN] for at in range(0, len(outputs), MOST_DRAWN)
                )
                for _, title, picture in curve_pictures(curves, some)
            ]
        case TIME.name:
            edges, unit = np.asarray(facts["edges"], dtype=float), str(facts.get("unit", ""))
            # At the horizon itself no record is left to compare.
            survival = [answers[f"survival {edge:g}"] for edge in edges[1:-1]]
            curve = (edges[1:-1], np.stack(survival, 1)) if survival else None
            with needed_for(PURPOSE):
                from sksurv.util import Surv
            both = Surv.from_arrays(values[:, 1] == 1, values[:, 0]), answers["risk"]
            metric_values["risk"] = time_metrics(*both, edges[-1], curve, **own)
            title = "Survival by third of the risk"
            pictures.append(_picture(title, kaplan_meier_thirds, *both, edges[-1], unit))
        case _:
            # The metrics of a run, without intervals and pictures.
            sums = measured(target, outputs, scores, held.values)
            for name, found in metrics_of(sums).items():
                count = int(found.pop("records"))
                metric_values[name] = {
                    key: Metric(value, None, None, count) for key, value in found.items()
                }
    content = {
        "count": len(values),
        "patients": held.patients is not None,
        "metric_values": {
            name: {key: asdict(each) for key, each in found.items()}
            for name, found in metric_values.items()
        },
    }
    return content, pictures


def _picture(title: str, draw: Callable[..., None], *of: Any) -> tuple[str, str]:
    name = hashlib.sha256(title.encode()).hexdigest()[:8]
    return title, render(f"evaluation-{name}", 3.6, lambda figure: draw(figure, *of))
