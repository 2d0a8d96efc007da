"""Evaluation of a model on this site's held-out records, with intervals and pictures, and whether
it is as good here as the shared surrogate promises. Nothing of it leaves the site.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.class_metrics import (
    FEWEST,
    Judged,
    ModelQuality,
    curves_of,
    drawn_classes,
    leads_with_auroc,
    report,
)
from fedsurrogate.common.models.classifiers import Classifier, Head, scores_alone, target_of_model
from fedsurrogate.common.pages.svg import (
    INTERVAL,
    captions,
    classes_card,
    confusion_card,
    curve_pictures,
    render_page,
    trusted,
    undrawn,
)
from fedsurrogate.common.signed_models.gaussians import Gaussians, fit_gaussians
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.surrogates.covariances import eigen

from ..audit.membership import attack_model
from .calibration import (
    SCORES,
    Calibration,
    Wish,
    abstain_limit,
    calibrated_classes,
    calibrated_labels,
)
from .held_out import HeldOut
from .target_report import HEADING, page_of_target, target_facts

PAGE = (
    INTERVAL
    + """\
{% macro tile(name, m) %}
{% if m %}<div class="tile"><dt>{{ name }}</dt><dd>{{ "undefined" if m.value is none else "%.3f" | format(m.value) }}</dd>
<dd class="quiet">{% if m.low is not none %}95 % interval {{ "%.3f" | format(m.low) }} to {{ "%.3f" | format(m.high) }}{% else %}no interval{% endif %}</dd></div>{% endif %}
{% endmacro %}
"""
    + HEADING
    + """\
<h1>{{ r.records }} records{% if r.units %} of {{ r.units }} patients{% endif %}:
{%- if auroc_first and r.averages.macro_auroc.value is not none %} AUROC {{ "%.3f" | format(r.averages.macro_auroc.value) }},{% endif %} accuracy {{ "%.1f" | format(100 * r.averages.accuracy.value) }} %
{%- if r.averages.balanced_accuracy and r.averages.balanced_accuracy.value is not none %}, balanced {{ "%.1f" | format(100 * r.averages.balanced_accuracy.value) }} %{% endif %}.</h1>
<p>{{ e.records | capitalize }}{% if e.left_out %}; {{ e.left_out }} more cannot be used{% endif %}.
{% if e.adapted %}The model is this site's own version of the shared one. {% endif %}
{% if e.calibrated_on %}{{ e.calibrated_on }} other records chose temperature and threshold and are not judged. {% endif %}
The majority baseline is right for {{ "%.1f" | format(100 * r.majority) }} %.
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
<section class="card promise"><h2>{% if p.verdict.startswith("worse") %}<span class="bad">{{ p.verdict | capitalize }}</span>{% else %}{{ p.verdict | capitalize }}{% endif %}</h2>
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
{% for name, a in e.get("membership", {}).items() %}<dt>attack by {{ name }}</dt><dd>AUC {{ "%.3f" | format(a.auc) }} ({{ "%.3f" | format(a.low) }} to {{ "%.3f" | format(a.high) }}): training records of this site against these; 0.5 is a guess</dd>{% endfor %}
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
    values: dict[str, Any] = {"e": facts, "r": facts["report"], "pictures": drawn}
    values |= {
        "confusion": confusion_card(classes, facts["report"]["confusion"]),
        "each_class": classes_card(facts["report"]["per_class"]),
        "undrawn": undrawn(),
        "auroc_first": leads_with_auroc(facts["report"]["majority"]),
    }
    return render_page(PAGE, values).lstrip()


SAMPLES = 20_000
# Records of a class, for each number of a logit's covariance, below which its normal distribution
# is not estimated.
RECORDS_A_NUMBER = 3


@dataclass(frozen=True)
class Promise:
    """The error (share of wrong decisions) of a model on the surrogate, with this site's shares of
    classes, and here.

    Attributes:
        promised: on the surrogate.
        error: here.
        low: lower limit of `error`, Clopper and Pearson's at 95 %.
        high: upper limit of `error`.
        distance: TV of the decisions.
        bound: promised + distance, at least `error`.
        theorem: the bound of theorem 6.1 over the logits; None with too few records.
        kept: whether the error may be as low as promised, by its limits.
        verdict: of both in words; an error on the surrogate that is not below that of the majority baseline
            here, as with much noise, promises nothing.
        classes: (name, promised, error) of each class with records.
    """

    promised: float
    error: float
    low: float
    high: float
    distance: float
    bound: float
    theorem: float | None
    kept: bool
    verdict: str
    classes: tuple[tuple[str, float, float], ...]


def check_promise(
    classifier: Classifier, gaussians: Gaussians | None, features: Tensor, labels: Tensor
) -> Promise | None:
    """Compare the error of a linear head on the surrogate's Gaussians with its error on own
    records.

    Args:
        classifier: the shared model.
        gaussians: of the surrogate; None for a model without.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        The comparison; None without Gaussians of every class, for other models, or without records.

    Source: FedPFT, theorem 6.1 (Beitollahi et al. 2024). Differs: the error on the surrogate plus the
    distance in total variation (the theorem's form is never smaller); this distance by Bretagnolle &
    Huber 1979 instead of Pinsker, over the logits instead of the features.
    """
    from scipy.stats import binomtest

    names = classifier.header.classes
    if (
        not isinstance(classifier, Head)
        or gaussians is None
        or len(gaussians.means) != len(names)
        or not len(labels)
    ):
        return None
    with torch.no_grad():
        own = classifier.scores(features).double()
    means, covariance = _logits(classifier, gaussians)
    promised = torch.stack([_decisions(mean, covariance) for mean in means])
    sizes = torch.bincount(labels, minlength=len(names)).double()
    decisions = torch.zeros_like(promised)
    decisions.index_put_(
        (labels, own.argmax(1)), torch.ones(len(labels), dtype=torch.float64), accumulate=True
    )
    kept = (sizes > 0).nonzero().flatten()
    shares, here = sizes[kept] / sizes.sum(), decisions[kept] / sizes[kept, None]
    expected, error = 1 - promised[kept, kept], 1 - here[torch.arange(len(kept)), kept]
    distances = (here - promised[kept]).abs().sum(1) / 2
    wrong = float((shares * error).sum())
    limits_here = binomtest(round(wrong * len(labels)), len(labels)).proportion_ci(method="exact")
    low, high = float(limits_here.low), float(limits_here.high)
    total, distance = float((shares * expected).sum()), float((shares * distances).sum())
    divergences = [
        _bretagnolle_huber(own[labels == c], means[c], covariance) for c in kept.tolist()
    ]
    theorem = None
    if all(each is not None for each in divergences):
        limits = torch.tensor([each or 0.0 for each in divergences], dtype=torch.float64)
        theorem = float((shares * (expected + limits).clamp_max(1)).sum())
    rows = tuple(
        (names[c], float(p), float(e))
        for c, p, e in zip(kept.tolist(), expected.tolist(), error.tolist(), strict=True)
    )
    verdict = "as good here as promised" if low <= total else "worse here than promised"
    if total >= 1 - float(shares.max()) > 0:
        verdict = "nothing was promised"
    bound = min(1.0, total + distance)
    return Promise(total, wrong, low, high, distance, bound, theorem, low <= total, verdict, rows)


def _logits(head: Head, gaussians: Gaussians) -> tuple[Tensor, Tensor]:
    """Means (C, C) and covariance (C, C) of the logits of the surrogate's Gaussians."""
    weight, within = head.weight.double(), gaussians.within
    across = weight @ within.directions.double().T
    rest = float(within.rest)
    spread = (within.variances.double() - rest) * across
    # The Gaussians are of features that the head has prepared.
    means = head.scores_of_prepared(gaussians.means.double())
    return means, spread @ across.T + rest * weight @ weight.T


def _decisions(mean: Tensor, covariance: Tensor) -> Tensor:
    """Share of each decision (C,) for normal logits."""
    values, vectors = eigen(covariance)
    # The same draws for every class and at every call.
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(SAMPLES, len(mean), generator=generator, dtype=torch.float64)
    logits = mean + (draws * values.clamp_min(0).sqrt()) @ vectors.T
    return torch.bincount(logits.argmax(1), minlength=len(mean)).double() / SAMPLES


def _bretagnolle_huber(own: Tensor, mean: Tensor, covariance: Tensor) -> float | None:
    """Bound of TV between own logits (n, C), taken as normal, and the surrogate's; None with too
    few records.
    """
    base = torch.cat([-torch.ones(len(mean) - 1, 1), torch.eye(len(mean) - 1)], 1).double()
    k = len(base)
    if len(own) <= RECORDS_A_NUMBER * k * (k + 3) / 2:
        return None
    points = own @ base.T
    try:
        here = MultivariateNormal(points.mean(0), torch.cov(points.T).reshape(k, k))
        promised = MultivariateNormal(base @ mean, base @ covariance @ base.T)
    except ValueError:
        # A covariance without an inverse.
        return None
    divergence = float(kl_divergence(here, promised))
    return math.sqrt(1 - math.exp(-max(0.0, divergence)))


MOST_GROUPS = 20
QUANTILES = (0.5, 0.9, 0.95, 0.99)
PLAIN, NOTHING = Calibration(), Wish()
Facts = dict[str, Any]
Rows = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        content: of evaluation.json.
        page: of evaluation.html.
        calibration: by which the model decided.
        gaussians: to store, for a model of classes that has none.
        report: of a model of classes; None for another target.
    """

    content: Facts
    page: str
    calibration: Calibration
    gaussians: Gaussians | None = None
    report: ModelQuality | None = None

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write evaluation.json and evaluation.html.

        Args:
            folder: of the files.

        Returns:
            Both files.

        Raises:
            OSError: if they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        facts, page = folder / "evaluation.json", folder / "evaluation.html"
        facts.write_text(json.dumps(self.content, indent=2, allow_nan=False) + "\n")
        page.write_text(self.page, encoding="utf-8", newline="\n")
        return facts, page


def evaluate(
    model: SignedModel,
    held: HeldOut,
    calibration: Calibration = PLAIN,
    wish: Wish = NOTHING,
    own: Classifier | None = None,
    gaussians: Gaussians | None = None,
    trained: HeldOut | None = None,
) -> Evaluation:
    """Judge a model on held-out records.

    With a wish, half of the records (whole patients) choose, and only the other half is judged.

    Args:
        model: the shared one.
        held: the records.
        calibration: by which it decides.
        wish: what to choose anew.
        own: the site's own version of the model; None for the shared one.
        gaussians: that this site has stored for a model without any.
        trained: records that the shared model has learned from; given, it is attacked.

    Raises:
        ConfigError: for a wish or a calibration that does not fit.
        DataError: for too few records, or records without values of the target.
        PackageError: without a library that computes a metric.
    """
    classifier = own or model.classifier
    content: Facts = {
        "schema": 1,
        "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "model": model.manifest.model_dump(),
        "adapted": own is not None,
        "records": held.where,
        "left_out": held.left_out,
    }
    if target_of_model(classifier):
        calibration, rest = calibrated_labels(classifier, held, calibration, wish)
        facts, pictures = target_facts(classifier, rest, calibration, wish.draws)
        content |= facts | {"calibration": asdict(calibration)}
        return Evaluation(content, page_of_target(content, pictures), calibration)

    calibration = calibration.checked(tuple(model.manifest.classes))
    facts, found, calibration, fitted = _of_classes(
        model, classifier, held, calibration, wish, gaussians
    )
    content |= facts | {"calibration": asdict(calibration)}
    if trained is not None:
        sides = ((each.features, each.labels) for each in (trained, held))
        found_by = attack_model(model.classifier, *sides)
        content["membership"] = {name: asdict(each) for name, each in found_by.items()}
    return Evaluation(content, page_of(content), calibration, fitted, found)


def _of_classes(
    model: SignedModel,
    classifier: Classifier,
    held: HeldOut,
    calibration: Calibration,
    wish: Wish,
    own: Gaussians | None,
) -> tuple[Facts, ModelQuality, Calibration, Gaussians | None]:
    classes = tuple(model.manifest.classes)
    scores = scores_alone(classifier, held.features)
    judged_rows = np.ones(len(held.labels), dtype=bool)
    if (first := wish.chooses(held)) is not None:
        if min(first.sum(), (~first).sum()) < FEWEST:
            raise DataError(
                f"{len(held.labels)} held-out records are too few to calibrate with one half and "
                f"judge with the other; {FEWEST} are needed in each"
            )
        labels, judged_rows = held.labels[first], ~first
        calibration = calibrated_classes(calibration, wish, scores[first], labels, classes)
    gaussians = model.gaussians
    # A limit that is stored already holds for the Gaussians that it was chosen with.
    if gaussians is None and calibration.abstain_above is not None and not wish.abstain:
        gaussians = own
    if gaussians is None:
        rows = torch.from_numpy(judged_rows if wish.abstain else np.ones_like(judged_rows))
        # Of records that calibrate nothing; without two of a class there are none.
        with suppress(ValueError):
            x = classifier.prepare(held.features[rows]).float()
            gaussians = fit_gaussians(x, held.labels[rows])
    distances = {}
    if gaussians is not None:
        found = (each.numpy() for each in gaussians.scores(held.features, classifier))
        distances = dict(zip(SCORES, found, strict=True))
    if wish.abstain:
        calibration = _abstaining(calibration, wish, distances, ~judged_rows)
    chance = calibration.probabilities(scores)
    every = Judged(
        held.labels.numpy(), chance, calibration.decisions(chance, classes), held.patients
    )
    judged = every.take(judged_rows)
    metric_values = report(judged, classes, wish.draws, wish.seed)
    # Of the shared model and its own decisions: a threshold is this site's choice.
    promise = check_promise(
        model.classifier, model.gaussians, held.features[judged_rows], held.labels[judged_rows]
    )
    facts: Facts = {
        "calibrated_on": int((~judged_rows).sum()),
        "report": asdict(metric_values),
        "groups": _by_group(every, judged_rows, held.groups, classes, wish),
        "curves": {
            name: curves_of(judged.labels == index, judged.probabilities[:, index])
            for index, name in enumerate(classes)
        },
        "out_of_distribution": _ood(model, distances, calibration, judged_rows),
        "promise": promise and asdict(promise),
    }
    return facts, metric_values, calibration, None if model.gaussians is not None else gaussians


def _by_group(
    judged: Judged, rows: Rows, columns: Mapping[str, Any], classes: tuple[str, ...], wish: Wish
) -> Facts:
    """A report for each value of each column; of values with fewer than ten records only their
    number.
    """
    reports: Facts = {}
    for column, values in columns.items():
        kinds = sorted(set(values))
        if len(kinds) > MOST_GROUPS:
            raise ConfigError(
                f"--by {column!r} has {len(kinds)} different values; at most {MOST_GROUPS} can be "
                "compared"
            )
        reports[column] = {}
        for kind in kinds:
            part = judged.take(rows & (np.array(values) == kind))
            reports[column][kind] = count = len(part.labels)
            if count >= FEWEST:
                reports[column][kind] = asdict(report(part, classes, wish.draws, wish.seed))
    return reports


def _abstaining(
    calibration: Calibration, wish: Wish, distances: Mapping[str, NDArray[np.float32]], rows: Rows
) -> Calibration:
    """The calibration with a limit of an out-of-distribution score, from those of these records."""
    if not distances:
        raise DataError(
            "--abstain: no Gaussians for an out-of-distribution score; no class has two held-out "
            "records"
        )
    score = wish.score or calibration.score
    limit = abstain_limit(torch.from_numpy(distances[score][rows]), wish.abstain)
    note = (
        f"{score} score above {limit:.4g} abstains, for a share of {wish.abstain:g} from "
        f"{rows.sum()} records"
    )
    note = f"{calibration.note}; {note}".removeprefix("; ")
    return replace(calibration, score=score, abstain_above=limit, note=note)


def _ood(
    model: SignedModel,
    distances: Mapping[str, NDArray[np.float32]],
    calibration: Calibration,
    judged: Rows,
) -> Facts:
    if not distances:
        return {}
    quantiles: Facts = {
        name: {f"{level:g}": float(np.quantile(column, level)) for level in QUANTILES}
        for name, column in distances.items()
    }
    limit, beyond = calibration.abstain_above, None
    if limit is not None:
        beyond = float((distances[calibration.score][judged] > limit).mean())
    against = "the sites' surrogates" if model.gaussians is not None else "records of this site"
    return quantiles | {"against": against, "abstained": beyond}
