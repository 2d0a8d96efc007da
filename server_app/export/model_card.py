"""A model card in the format of Hugging Face: Markdown with YAML metadata. It names no site, nor
its number of records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import for_markdown, for_terminal
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.privacy.mechanism import NOT_COVERED
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.targets.metrics import IN_WORDS, answer_columns, facts_of, metric_text
from fedsurrogate.strategies.counting.strategy import payload_of

from ..report.counts_view import view_of
from ..runs.state import Json, as_list, as_number, as_numbers, as_table, at, clean, read_json


@dataclass(frozen=True)
class Measured:
    """Results for a card.

    Attributes:
        data: what was tested on.
        accuracy: in [0, 1]; None without one.
        metric: what `accuracy` is, with its interval.
        words: Markdown lines.
    """

    data: str
    accuracy: float | None
    metric: str
    words: list[str]


def evaluated(model: SignedModel, run: Path) -> Measured | None:
    """The evaluation in a run folder.

    Args:
        model: a signed model.
        run: the run folder.

    Returns:
        The results; None if the folder has no evaluation of this model.
    """
    try:
        content = clean(read_json(run, "evaluation.json"))
    except RunError:
        return None
    other = (
        content.get("kind") != "evaluation"
        or content.get("model") != payload_of(model.classifier)[1]
    )
    # A card names no site.
    shown = {key: each for key, each in content.items() if key not in ("per_site", "exact")}
    if other or (view := view_of(shown)) is None:
        return None
    accuracy = content.get("accuracy")
    value, low, high = (as_number(at(accuracy, key)) for key in ("value", "low", "high"))
    limits = "" if low is None or high is None else f" (95 % interval {low:.3f} to {high:.3f})"
    lines = [f"{for_markdown(view.title)}.", ""]
    lines += [f"| {' | '.join(map(for_markdown, row))} |" for row in (view.columns, *view.rows)]
    lines.insert(3, "|---" * len(view.columns) + "|")
    data = f"held-out records of {view.sites}"
    return Measured(data, value, f"accuracy{limits}", [*lines, "", *map(for_markdown, view.words)])


# Licences of published weights, as far as this project knows them. Others must be looked up.
LICENCES = {"torchvision": ("bsd-3-clause", "torchvision's weights, BSD-3-Clause; trained on ImageNet-1k, whose terms are "
            "non-commercial"), "pixels": ("apache-2.0", "no pretrained weights")}  # fmt: skip
NOT_MEASURED = (
    "Nothing yet: no `coordinator evaluate` of this run, and no test data of a simulation. Each "
    "site evaluates the model on its own records (`site evaluate`)."
)
CALIBRATED = (
    "- Probabilities need calibration at each site (`site evaluate --temperature --store`)."
)
LIMITS_OF_TARGETS = {
    "multilabel": ["- Probabilities hold for records with the labels as frequent as at the sites together."],
    "regression": ["- An interval holds 95 % of new records where errors are normal, and records are like those "
                   "of the sites.",
               "- Values beyond the range were learned as its ends."],
    "survival": ["- Risks are relative: a log hazard of zero is that of a record with mean features.",
             "- Nothing is known of the time beyond the horizon."],
}  # fmt: skip
KINDS = {
    "multilabel": "A model of labels",
    "regression": "A model of numbers",
    "survival": "A model of the time to an event",
}
READING = (
    "The sites read files as RGB with 8 bits in this way; an image that is read otherwise, as by "
    'Pillow\'s `convert("RGB")`, has other answers:',
    "",
    "- The Exif orientation is applied, and white-is-zero inverted.",
    "- Of deeper integers the high byte counts, of the bits that the file states or 16. Values of "
    "floating point lie in 0 to 1, and are multiplied by 255; NaN is black.",
    "- DICOM is shown by its window or look-up table.",
    "- A file of several images, or with less than a quarter of its range, has no answer.",
)
UNKNOWN = ("other", "look up the licence of these weights before you pass the model on")


def model_card(model: SignedModel, run: Path, preprocessing: Preprocessing | None = None) -> str:
    """The card of a run's model.

    Args:
        model: the signed model.
        run: the run folder.
        preprocessing: of the images of a graph; None for a card without a graph.

    Returns:
        Markdown with YAML metadata.
    """
    facts, metrics = model.manifest, read_json(run, "metrics.json")
    backbone = str(facts.settings["backbone"])
    licence, words = LICENCES.get(backbone.partition(":")[0], UNKNOWN)
    target, outputs = target_of_model(model.classifier), model.classifier.header.classes
    measured = evaluated(model, run) or _simulated(metrics)
    size = str(facts.settings["image-size"] or "of the backbone")
    title = METHODS[facts.method].title if facts.method in METHODS else facts.method
    lines = [
        "---",
        f"license: {licence}",
        "library_name: fedsurrogate",
        *(["pipeline_tag: image-classification"] if not target else []),
        "tags:",
        "- federated-learning",
        *(["- differential-privacy"] if facts.privacy else []),
        f"- {_quoted(facts.method)}",
        *_index(facts.name, measured),
        "---",
        "",
        f"# {for_markdown(facts.name)}",
        "",
        f"{_what(target)} that {facts.sites} sites learned together with {for_markdown(title)}. No image "
        "left a site.",
        "",
        *_answered(target, outputs),
        "",
        "## Features",
        "",
        f"Backbone {for_markdown(backbone)}, image size {for_markdown(size)}, "
        f"power {facts.settings['features.power-transform']:g}, dimension {facts.dimension}, fingerprint "
        f"{for_markdown(facts.fingerprint)}.",
        f"Licence of the backbone's weights: {words}.",
        *_resizing(preprocessing, answer_columns(target, outputs) if target else ()),
        "",
        "## Data",
        "",
        f"{facts.sites} sites; how many records each has, and who they are, is not part of this "
        "card.",
        "",
        "## Measured",
        "",
        *(measured.words if measured is not None else [NOT_MEASURED]),
        "",
        "## Privacy",
        "",
        *_privacy(model),
        "",
        "## Limits",
        "",
        "- For research. It is no medical device, and no one has tested it for decisions about "
        "patients.",
        "- It is right only for images like those of the sites: use the out-of-distribution "
        "scores of `site predict`, and evaluate it where it is to be used.",
        *_without_records(metrics),
        *([CALIBRATED] if not target else LIMITS_OF_TARGETS.get(facts_of(target)["name"], [])),
        f"- {'It has' if model.gaussians is not None else 'It has no'} Gaussians for "
        "out-of-distribution "
        f"scores{'' if model.gaussians is not None else ': ' + for_markdown(facts.gaussians)}.",
        "",
        f"Made by fedsurrogate in run {for_markdown(facts.run)} on {facts.created}, signed by key "
        f"{model.signer}....",
        "",
    ]
    return "\n".join(lines)


def _without_records(metrics: Mapping[str, Any]) -> list[str]:
    """Classes that the model answers and has not learned."""
    card = as_table(metrics.get("card"))
    names = ", ".join(map(str, as_list(card.get("without_records"))))
    noisy = card.get("records_by_class") == "noisy"
    line = (
        f"- {'Perhaps no' if noisy else 'No'} site had a training record of {for_markdown(names)}."
    )
    return [line] if names else []


def _what(target: str) -> str:
    return KINDS.get(facts_of(target)["name"], "A model") if target else "An image classifier"


def _answered(target: str, outputs: tuple[str, ...]) -> list[str]:
    """What the model answers, and in which range or unit."""
    if not target:
        return ["## Classes", "", ", ".join(map(for_markdown, outputs))]
    facts = facts_of(target)
    lines = ["## Answers", "", ", ".join(map(for_markdown, answer_columns(target, outputs)))]
    if "ranges" in facts:
        ranges = zip(facts["columns"], facts["ranges"], strict=True)
        shown = [f"{for_markdown(str(name))} {low:g} to {high:g}" for name, (low, high) in ranges]
        lines += ["", f"Range: {', '.join(shown)}."]
    if "edges" in facts:
        unit = for_markdown(str(facts.get("unit", "")))
        words = f"{facts['edges'][-1]:g} {unit}".strip()
        lines += ["", f"Horizon: {words}, in {len(facts['edges']) - 1:d} parts."]
    if left := facts.get("left-out"):
        lines += ["", "Labels without a model: " + ", ".join(map(for_markdown, left)) + "."]
    return lines


def _simulated(metrics: Json) -> Measured | None:
    rows = as_table(at(metrics, "metric_values", "all"))
    if rows:
        listed = ["On the test data of the simulation. It says little about other hospitals.", ""]
        for name, own in rows.items():
            shown = ", ".join(
                f"{for_markdown(IN_WORDS.get(key, key))} {metric_text(key, value)}"
                for key, value in as_numbers(own).items()
            )
            listed.append(f"- {for_markdown(name)}: {shown}")
        return Measured("test data of the simulation", None, "", listed)
    accuracy = as_number(at(metrics, "accuracy", "model"))
    if accuracy is None:
        return None
    words = (
        f"Accuracy on the test data of the simulation: {accuracy:.4f}. A simulation says "
        "little about other hospitals."
    )
    return Measured("test data of the simulation", accuracy, "accuracy", [words])


def _index(name: str, measured: Measured | None) -> list[str]:
    if measured is None or measured.accuracy is None:
        return []
    metric = {"type": "accuracy", "value": round(measured.accuracy, 4), "name": measured.metric}
    return [
        "model-index:",
        f"- name: {_quoted(name)}",
        "  results:",
        "  - task: {type: image-classification}",
        f"    dataset: {{name: {_quoted(measured.data)}, type: private}}",
        f"    metrics: [{json.dumps(metric)}]",
    ]


def _quoted(text: str) -> str:
    """A text in YAML, in double quotes as in JSON, but without pairs of escapes, which YAML reads as
    two characters.
    """
    return json.dumps(for_terminal(text), ensure_ascii=False)


def _resizing(preprocessing: Preprocessing | None, columns: Sequence[str]) -> list[str]:
    if preprocessing is None:
        return []
    side = preprocessing.crop
    how = (
        "the whole image is resized to"
        if preprocessing.squash
        else f"the shorter side is resized to {preprocessing.resize} px "
        f"({preprocessing.interpolation}), the centre cut to"
    )
    return [
        "",
        f"Input of the graph: `images`, float32, (n, 3, {side}, {side}), RGB values 0 to 255; "
        f"{how} {side} x {side}. Output: {_output(columns)}. Normalisation, backbone and "
        "head are in the graph.",
        "",
        *READING,
    ]


def _output(columns: Sequence[str]) -> str:
    if not columns:
        return "`probabilities` (n, classes)"
    return f"`answers` (n, {len(columns):d}), in the order of the answers above"


def _privacy(model: SignedModel) -> list[str]:
    claim = model.manifest.privacy
    if claim is None:
        return ["None: no differential privacy protects single records."]
    covered = (
        f"Each site's release has ({claim.epsilon:g}, {claim.delta:g}) differential privacy "
        f"({for_markdown(claim.mechanism)}). Neighbouring relation: "
        f"{for_markdown(claim.relation or 'not stated')}."
    )
    return [covered, "", "Not covered:", "", *(f"- {each}" for each in NOT_COVERED)]
