"""How well a model of classes did on the test records of a run, by the numbers in metrics.json, with
the one first that does not mislead.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsurrogate.common.models.class_measures import leads_with_auroc
from fedsurrogate.server_app.runs.json_values import Json, as_number, as_table

# Columns of a table, by their names.
AUROC, BALANCED, ACCURACY, MAJORITY = "auroc", "balanced accuracy", "accuracy", "majority"
SCORES = {
    AUROC: "AUROC",
    BALANCED: "balanced accuracy",
    ACCURACY: "accuracy",
    MAJORITY: "largest class alone",
}


def scores_of(metrics: Json) -> dict[str, float | None]:
    """Mean AUROC over classes, balanced accuracy, accuracy, and the accuracy of always giving the
    largest class.

    Args:
        metrics: content of metrics.json.

    Returns:
        By the names of SCORES; None where it is undefined or was not measured.

    Example:
        >>> scores_of({"accuracy": {"model": 0.9, "majority": 0.8}})["majority"]
        0.8
    """
    averages = as_table(as_table(metrics.get("quality")).get("averages"))
    accuracy = as_table(metrics.get("accuracy"))

    def value(name: str) -> float | None:
        return as_number(as_table(averages.get(name)).get("value"))

    return {
        AUROC: value("macro_auroc"),
        BALANCED: value("balanced_accuracy"),
        ACCURACY: as_number(accuracy.get("model")),
        MAJORITY: as_number(accuracy.get("majority")),
    }


def leading(scores: Mapping[str, float | None]) -> str:
    """The score that says most: AUROC where one class is so large that accuracy misleads.

    Args:
        scores: by name.

    Example:
        >>> leading({"auroc": 0.7, "accuracy": 0.9, "majority": 0.9})
        'auroc'
    """
    unequal = leads_with_auroc(scores.get(MAJORITY) or 0.0)
    return AUROC if unequal and scores.get(AUROC) is not None else ACCURACY


def in_words(scores: Mapping[str, float | None]) -> str:
    """Scores in one line, the leading one first; empty without any.

    Args:
        scores: by name.

    Example:
        >>> in_words({"auroc": 0.75, "accuracy": 0.9, "majority": 0.9})
        'AUROC 0.7500, accuracy 0.9000, largest class alone 0.9000'
    """
    order = dict.fromkeys((leading(scores), *SCORES))
    known = [(SCORES[name], value) for name in order if (value := scores.get(name)) is not None]
    return ", ".join(f"{words} {value:.4f}" for words, value in known)
