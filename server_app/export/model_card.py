"""A model card in the format of Hugging Face: Markdown with YAML metadata. It names no site, nor
its number of records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import for_markdown, for_terminal
from fedsurrogate.common.files import read_json
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.pages.svg import render_page, trusted
from fedsurrogate.common.privacy.mechanism import NOT_COVERED
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.targets.metrics import IN_WORDS, answer_columns, facts_of, metric_text
from fedsurrogate.strategies.counting.strategy import payload_of

from ..report.counts_view import CountsView, view_of
from ..runs.state import Json, as_list, as_number, as_numbers, as_table, at, clean


@dataclass(frozen=True)
class Measured:
    """Results for a card.

    Attributes:
        data: what was tested on.
        accuracy: in [0, 1]; None without one.
        metric: what `accuracy` is, with its interval.
        view: counts at sites; None for a simulation.
        answers: metrics in words of each answer of a simulation of another target than classes.
    """

    data: str
    accuracy: float | None = None
    metric: str = ""
    view: CountsView | None = None
    answers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


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
    return Measured(
        f"held-out records of its classes at {view.sites}", value, f"accuracy{limits}", view
    )


TEMPLATES = Path(__file__).parent / "templates"
# Licences of published weights, as far as this project knows them. Others must be looked up.
LICENCES = {"torchvision": ("bsd-3-clause", "torchvision's weights, BSD-3-Clause; trained on ImageNet-1k, whose terms are "
            "non-commercial"), "pixels": ("apache-2.0", "no pretrained weights")}  # fmt: skip
UNKNOWN_LICENCE = ("other", "look up the licence of these weights before you pass the model on")


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
    licence, words = LICENCES.get(
        str(facts.settings["backbone"]).partition(":")[0], UNKNOWN_LICENCE
    )
    target, outputs = target_of_model(model.classifier), model.classifier.header.classes
    card = as_table(metrics.get("card"))
    values = {
        "facts": facts,
        "licence": licence,
        "licence_in_words": words,
        "title": METHODS[facts.method].title if facts.method in METHODS else facts.method,
        "target": facts_of(target),
        "outputs": outputs,
        "columns": answer_columns(target, outputs),
        "preprocessing": preprocessing,
        "measured": evaluated(model, run) or _simulated(metrics),
        "not_covered": NOT_COVERED,
        "without_records": ", ".join(map(str, as_list(card.get("without_records")))),
        "noisy": card.get("records_by_class") == "noisy",
        "gaussians": model.gaussians is not None,
        "signer": model.signer,
    }
    filters: dict[str, Callable[..., str]] = {"quoted": _quoted, "short": _short}
    return render_page("model_card.md.j2.md", values, TEMPLATES, filters, _as_markdown) + "\n"


def _simulated(metrics: Json) -> Measured | None:
    data = "test data of the simulation"
    if rows := as_table(at(metrics, "metric_values", "all")):
        answers = {
            name: {
                IN_WORDS.get(key, key): metric_text(key, value)
                for key, value in as_numbers(own).items()
            }
            for name, own in rows.items()
        }
        if ranks := at(metrics, "metric_values", "ranks"):
            data = f"test records of each site. {ranks}"
        return Measured(data, answers=answers)
    accuracy = as_number(at(metrics, "accuracy", "model"))
    return None if accuracy is None else Measured(data, accuracy, "accuracy")


def _as_markdown(text: str) -> str:
    return trusted(for_markdown(text))


def _quoted(text: str) -> str:
    """A text in YAML, in double quotes as in JSON, but without pairs of escapes, which YAML reads as
    two characters.
    """
    return trusted(json.dumps(for_terminal(text), ensure_ascii=False))


def _short(number: float, digits: int = 6, form: str = "g") -> str:
    return trusted(f"{number:.{digits}{form}}")
