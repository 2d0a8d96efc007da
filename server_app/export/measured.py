"""What a run's model has reached at its sites, as a model card shows it: the run's stored
evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.escapes import for_markdown
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.server_app.report.counts_view import view_of
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.json_values import as_number, at, clean
from fedsurrogate.strategies.counting.strategy import payload_of


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
