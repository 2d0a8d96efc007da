"""What a run's model has reached at its sites, as a model card shows it: the run's stored
evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import for_markdown
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.server_app.report.counts_view import HIDDEN, IN_WORDS, measure_text, where_noise
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.json_values import Json, as_number, as_table, at, clean
from fedsurrogate.strategies.counting.evaluated import payload_of

MEASURES = {"sensitivity": "sensitivity", "specificity": "specificity", "auroc": "AUROC"}


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
    classes, outputs = (as_table(content.get(key)) for key in ("classes", "outputs"))
    if (
        content.get("kind") != "evaluation"
        or not (classes or outputs)
        or content.get("model") != payload_of(model.classifier)[1]
    ):
        return None
    if outputs:
        return _of_target(content, outputs)
    sites, accuracy = int(as_number(content.get("sites")) or 0), content.get("accuracy")
    data = f"held-out records of {sites} sites"
    limits = _limits(accuracy)
    lines = [
        f"On {_shown(content.get('records'), '.0f')} {data}, {_privacy(content)}. In brackets: 95 "
        "% intervals, which include this noise and the sampling of records; those of numbers of "
        "records, the noise alone.",
        "",
        f"Accuracy: {_shown(accuracy)}.",
        "",
        f"| class | records | {' | '.join(MEASURES.values())} |",
        "|---|---|---|---|---|",
    ]
    for name, row in classes.items():
        cells = (_shown(as_table(row).get(key)) for key in MEASURES)
        lines.append(
            f"| {for_markdown(name)} | {_shown(as_table(row).get('records'), '.0f')} | {' | '.join(cells)} |"
        )
    metric = (
        "accuracy"
        if limits is None
        else f"accuracy (95 % interval {limits[0]:.3f} to {limits[1]:.3f})"
    )
    return Measured(data, as_number(at(accuracy, "value")), metric, lines)


def _of_target(content: Json, outputs: Json) -> Measured:
    """Of labels, numbers or times, at all sites together."""
    sites = int(as_number(content.get("sites")) or 0)
    data = f"held-out records of {sites} sites"
    names = list(dict.fromkeys(key for row in outputs.values() for key in as_table(row)))
    titles = (for_markdown(IN_WORDS.get(key, key)) for key in names)
    lines = [
        f"On {data}, {_privacy(content)}. In brackets: 95 % intervals, which include this noise.",
        "",
        f"| answer | {' | '.join(titles)} |",
        "|---" * (1 + len(names)) + "|",
    ]
    for name, row in outputs.items():
        cells = (measure_text(key, as_table(row).get(key)) for key in names)
        lines.append(f"| {for_markdown(name)} | {' | '.join(cells)} |")
    return Measured(data, None, "", lines)


def _privacy(content: Json) -> str:
    epsilon, delta = (as_number(at(content, "privacy", key)) for key in ("epsilon", "delta"))
    if not epsilon:
        return "from counts without noise"
    return f"from noisy counts: epsilon {epsilon:g}, delta {delta or 0:g} {where_noise(content)}"


def _limits(value: Any) -> tuple[float, float] | None:
    low, high = (as_number(at(value, key)) for key in ("low", "high"))
    return None if low is None or high is None else (low, high)


def _shown(value: Any, form: str = ".3f") -> str:
    number, limits = as_number(at(value, "value")), _limits(value)
    if number is None or limits is None:
        return HIDDEN
    return f"{number:{form}} ({limits[0]:{form}} to {limits[1]:{form}})"
