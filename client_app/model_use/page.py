"""The page of an evaluation: one file, no network, in the style of the coordinator's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsurrogate.common.models.class_metrics import drawn_classes, leads_with_auroc
from fedsurrogate.common.pages.svg import (
    INTERVAL,
    captions,
    classes_card,
    confusion_card,
    curve_pictures,
    page_head,
    render_page,
    trusted,
    undrawn,
)

from .target_report import PAGE as TARGET_PAGE
from .target_report import Pictures

PAGE = (
    INTERVAL
    + """\
{% macro tile(name, m) %}
{% if m %}<div class="tile"><dt>{{ name }}</dt><dd>{{ "undefined" if m.value is none else "%.3f" | format(m.value) }}</dd>
<dd class="quiet">{% if m.low is not none %}95 % interval {{ "%.3f" | format(m.low) }} to {{ "%.3f" | format(m.high) }}{% else %}no interval{% endif %}</dd></div>{% endif %}
{% endmacro %}
"""
    + page_head("Evaluation · {{ e.model.name }}")
    + """\
</head>
<body>
<main>
<header>
<p class="eyebrow">Evaluation · {{ e.model.name }} · {{ e.made }} · stays at this site</p>
<h1>{{ r.records }} records{% if r.units %} of {{ r.units }} patients{% endif %}:
{%- if auroc_first and r.averages.macro_auroc.value is not none %} AUROC {{ "%.3f" | format(r.averages.macro_auroc.value) }},{% endif %} accuracy {{ "%.1f" | format(100 * r.averages.accuracy.value) }} %
{%- if r.averages.balanced_accuracy and r.averages.balanced_accuracy.value is not none %}, balanced {{ "%.1f" | format(100 * r.averages.balanced_accuracy.value) }} %{% endif %}.</h1>
<p>{{ e.records | capitalize }}{% if e.left_out %}; {{ e.left_out }} more cannot be used{% endif %}.
{% if e.adapted %}The model is this site's own version of the shared one. {% endif %}
{% if e.calibrated_on %}{{ e.calibrated_on }} other records chose temperature and threshold and are not judged. {% endif %}
The majority baseline is right for {{ "%.1f" | format(100 * majority) }} %.
Intervals are percentiles of {{ "whole patients" if r.units else "records" }} drawn with replacement.</p>
</header>
{% if r.left_out %}
<div class="banner little" role="alert"><h2>Classes without a record</h2>
<p>{{ r.left_out | join(", ") }}: undefined, and in no average.</p></div>
{% endif %}
<dl class="tiles">
{{ tile("accuracy", r.averages.accuracy) }}{{ tile("balanced accuracy", r.averages.balanced_accuracy) }}
{{ tile("macro AUROC", r.averages.macro_auroc) }}{{ tile("macro AUPRC", r.averages.macro_auprc) }}{{ tile("macro F1", r.averages.macro_f1) }}
</dl>
<div class="grid">
{% if undrawn %}
<p class="quiet">{{ undrawn }}.</p>
{% endif %}
{% for title, svg, caption in pictures %}
<figure class="card"><h2>{{ title }}</h2><div class="plots">{{ svg }}</div>
<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
{{ confusion }}
</div>
{{ each_class }}
{% for column, kinds in e.groups.items() %}
<section class="card"><h2>By {{ column }}</h2><div class="scroll"><table>
<thead><tr><th>{{ column }}</th><th class="number">records</th><th>accuracy</th><th>balanced accuracy</th><th>macro AUROC</th>
{% if e.calibration.positive %}<th>sensitivity for {{ e.calibration.positive }}</th><th>specificity</th>{% endif %}</tr></thead><tbody>
{% for kind, g in kinds.items() %}<tr><td>{{ kind }}</td>
{% if g is number %}<td class="number">{{ g }}</td><td colspan="5"><span class="bad">fewer than ten records</span></td>
{% else %}<td class="number">{{ g.records }}</td><td>{{ interval(g.averages.accuracy) }}</td><td>{{ interval(g.averages.balanced_accuracy) }}</td><td>{{ interval(g.averages.macro_auroc) }}</td>
{% if e.calibration.positive %}{% for c in g.per_class if c.name == e.calibration.positive %}<td>{{ interval(c.metric_values.sensitivity) }}</td><td>{{ interval(c.metric_values.specificity) }}</td>{% endfor %}{% endif %}
{% endif %}</tr>{% endfor %}
</tbody></table></div></section>
{% endfor %}
{% if e.promise %}{% set p = e.promise %}
<section class="card promise"><h2>{% if p.kept %}As good here as promised{% else %}<span class="bad">Worse here than promised</span>{% endif %}</h2>
<p>On the sites' shared surrogate, with the classes in the proportions of these records, the model errs in {{ "%.1f" | format(100 * p.promised) }} %.
Here it errs in {{ "%.1f" | format(100 * p.error) }} % ({{ "%.1f" | format(100 * p.low) }} to {{ "%.1f" | format(100 * p.high) }}).
Its decisions differ from those on the surrogate by {{ "%.1f" | format(100 * p.distance) }} %, so the error on these records is at most {{ "%.1f" | format(100 * p.bound) }} %.
{% if p.theorem is not none %}Theorem 6.1 of FedPFT, over the logits, bounds the error at this site by {{ "%.1f" | format(100 * p.theorem) }} %.{% endif %}</p>
<div class="scroll"><table><thead><tr><th>class</th><th class="number">promised error</th><th class="number">error here</th></tr></thead><tbody>
{% for name, promised, error in p.classes %}<tr><td>{{ name }}</td><td class="number">{{ "%.1f" | format(100 * promised) }} %</td><td class="number">{{ "%.1f" | format(100 * error) }} %</td></tr>{% endfor %}
</tbody></table></div></section>
{% endif %}
{% if e.out_of_distribution %}
<section class="card"><h2>Out-of-distribution scores of these records</h2><div class="scroll"><table>
<thead><tr><th>score</th><th class="number">median</th><th class="number">90 %</th><th class="number">95 %</th><th class="number">99 %</th></tr></thead><tbody>
{% for score in ("mahalanobis", "relative") %}<tr><td style="overflow-wrap: break-word">{{ score }}</td>{% for level, value in e.out_of_distribution[score].items() %}<td class="number">{{ "%.4g" | format(value) }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div><p class="after quiet">Against {{ e.out_of_distribution.against }}. {% if e.out_of_distribution.abstained is not none %}The model abstains where the {{ e.calibration.score }} score is above {{ "%.4g" | format(e.calibration.abstain_above) }}: from {{ "%.1f" | format(100 * e.out_of_distribution.abstained) }} % of the judged records, which all metrics on this page count like the others.{% else %}--abstain 0.05 --store chooses a number from which the model abstains, so that one such record in twenty has no decision.{% endif %}</p></section>
{% endif %}
<footer class="card"><dl>
<dt>model</dt><dd>{{ e.model.name }}, method {{ e.model.method }}, run {{ e.model.run }}, {{ e.model.sites }} sites</dd>
<dt>privacy</dt><dd>{% if e.model.privacy %}epsilon {{ e.model.privacy.epsilon }}, delta {{ e.model.privacy.delta }} ({{ e.model.privacy.mechanism }}){% else %}none{% endif %}</dd>
<dt>features</dt><dd>{% for key, value in e.model.settings.items() %}{{ key }} = {{ value }}{{ "" if loop.last else ", " }}{% endfor %}; fingerprint {{ e.model.fingerprint[:16] }}</dd>
<dt>decision</dt><dd>{% if e.calibration.threshold %}{{ e.calibration.positive }} from probability {{ "%.4g" | format(e.calibration.threshold) }}{% else %}the most probable class{% endif %}; temperature {{ "%.4g" | format(e.calibration.temperature) }}{% if e.calibration.note %} ({{ e.calibration.note }}){% endif %}</dd>
</dl></footer>
</main>
</body>
</html>
"""
)


def page_of(facts: Mapping[str, Any]) -> str:
    """The page for the facts of an evaluation."""
    positive, classes = facts["calibration"]["positive"], list(facts["report"]["classes"])
    sizes = [row["support"] for row in facts["report"]["per_class"]]
    shown_classes = drawn_classes(sizes, classes.index(positive) if positive else None)
    alone = shown_classes[0] if len(shown_classes) == 1 else None
    words = (
        captions("", 0, 0)
        if alone is None
        else captions(classes[alone], sizes[alone], facts["report"]["records"])
    )
    curves = curve_pictures(facts["curves"], [classes[index] for index in shown_classes])
    drawn = [(title, trusted(svg), words[key]) for key, title, svg in curves]
    majority = max(sizes, default=0) / max(1, facts["report"]["records"])
    values: dict[str, Any] = {"e": facts, "r": facts["report"], "pictures": drawn}
    values |= {
        "confusion": confusion_card(classes, facts["report"]["confusion"]),
        "each_class": classes_card(facts["report"]["per_class"]),
        "undrawn": undrawn(),
        "majority": majority,
        "auroc_first": leads_with_auroc(majority),
    }
    return render_page(PAGE, values).lstrip()


def page_of_target(content: Mapping[str, Any], pictures: Pictures) -> str:
    """The page for the content of evaluation.json, and pictures as HTML by title."""
    drawn = [(title, trusted(picture)) for title, picture in pictures]
    return render_page(
        TARGET_PAGE, {"e": content, "pictures": drawn, "undrawn": undrawn()}
    ).lstrip()
