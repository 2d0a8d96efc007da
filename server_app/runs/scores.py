"""How well a model of classes did on the test records of a run, with the metric first that does not
mislead, and whether it may be no better than chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.models.class_metrics import leads_with_auroc

from .state import Json, as_number, as_numbers, as_table, at

if TYPE_CHECKING:
    from fedsurrogate.common.models.class_metrics import ModelQuality


# Columns of a table, by their names.
AUROC, BALANCED, ACCURACY, MAJORITY = "auroc", "balanced accuracy", "accuracy", "majority"
OF_CLASSES = (AUROC, BALANCED, ACCURACY, MAJORITY)
# Of labels, numbers and times.
OF_TARGETS = (AUROC, "r2", "concordance")
SCORES = {name: name for name in (*OF_CLASSES, *OF_TARGETS)} | {
    AUROC: "AUROC",
    MAJORITY: "majority baseline",
    "r2": "R²",
}


def scores_of(metrics: Json) -> dict[str, float | None]:
    """Of classes the mean AUROC, balanced accuracy, accuracy, and the accuracy of the majority
    baseline; of another target the mean over its answers of the metric that says most.

    Args:
        metrics: content of metrics.json.

    Returns:
        By the names of SCORES; None where it is undefined or was not measured.

    Example:
        >>> scores_of({"accuracy": {"model": 0.9, "majority": 0.8}})["majority"]
        0.8
        >>> scores_of({"metric_values": {"all": {"age": {"r2": 0.5}, "bmi": {"r2": 0.25}}}})
        {'r2': 0.375}
    """
    answers = as_table(at(metrics, "metric_values", "all")).values()
    for name in OF_TARGETS:
        known = [own[name] for own in map(as_numbers, answers) if name in own]
        if known:
            return {name: sum(known) / len(known)}
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
    """The score that says most: AUROC where one class is so large that accuracy misleads, and that of
    another target.

    Args:
        scores: by name.

    Example:
        >>> leading({"auroc": 0.7, "accuracy": 0.9, "majority": 0.9})
        'auroc'
    """
    known = [name for name in SCORES if scores.get(name) is not None]
    if ACCURACY in known and not (AUROC in known and leads_with_auroc(scores.get(MAJORITY) or 0.0)):
        return ACCURACY
    return known[0] if known else ACCURACY


def in_words(scores: Mapping[str, float | None]) -> str:
    """Scores in one line, the leading one first; empty without any.

    Args:
        scores: by name.

    Example:
        >>> in_words({"auroc": 0.75, "accuracy": 0.9, "majority": 0.9})
        'AUROC 0.7500, accuracy 0.9000, majority baseline 0.9000'
    """
    order = dict.fromkeys((leading(scores), *SCORES))
    known = [(SCORES[name], value) for name in order if (value := scores.get(name)) is not None]
    return ", ".join(f"{words} {value:.4f}" for words, value in known)


# Of a private run without test records that may be used, as at hospitals.
UNMEASURED = (
    "nobody has measured this model, and it may be no better than chance; `coordinator evaluate RUN` "
    "measures it on held-out records of the sites"
)
# An accuracy is compared with the largest class plus this: less is within the uncertainty of some
# hundred test records.
MARGIN = 0.02


def may_be_chance(
    quality: ModelQuality | None,
    accuracy: Json,
    counts: Sequence[Mapping[str, float]],
    classes: int = 0,
) -> bool:
    """Whether nothing that was measured is above chance.

    Args:
        quality: metrics of the model; None without any.
        accuracy: "accuracy" of metrics.json.
        counts: records by class of each site that has reported them.
        classes: of the model; what an even guess reaches counts where no site has reported records.
    """
    if quality is not None:
        return at_chance(quality) != ""
    reached, largest = accuracy_of(accuracy), largest_share(accuracy, counts)
    largest = 1 / classes if largest is None and classes else largest
    return reached is not None and largest is not None and reached <= largest + MARGIN


def at_chance(quality: ModelQuality) -> str:
    """The intervals of AUROC and balanced accuracy in words, if neither is above what chance reaches.

    Args:
        quality: metrics of the model.

    Returns:
        What chance has beside each, or that nothing is known; empty for a model that is better.
    """
    classes = len(quality.classes) - len(quality.left_out)
    chances = {"macro_auroc": ("AUROC", 0.5)}
    chances["balanced_accuracy"] = ("balanced accuracy", 1 / max(1, classes))
    found = [
        (name, chance, each)
        for key, (name, chance) in chances.items()
        if (each := quality.averages.get(key)) is not None and each.low is not None
    ]
    if classes < 2 or not found:
        return "its test records are of one class, or too few to show that it tells classes apart"
    if any((each.low or 0.0) > chance for _, chance, each in found):
        return ""
    return " and ".join(
        f"that of its {name} is {each.low:.3f} to {each.high:.3f}, where chance has {chance:.3f}"
        for name, chance, each in found
    ).replace("that of", "the 95 % interval of", 1)


def answers_at_chance(task: str, answers: Mapping[str, Any]) -> str:
    """The answer of another target than classes that is best, in words, if none is above what chance alone
    reaches in 97.5 % of the cases.

    Args:
        task: of the run.
        answers: their metrics, by name.

    Returns:
        The score and what chance reaches; empty for a model that is better, or if nothing is known.

    Example:
        >>> answers_at_chance("regression", {"age": {"records": 100.0, "r2": 0.01}})
        "its answer 'age' has R² 0.010, and chance alone reaches 0.038"
        >>> answers_at_chance("regression", {"age": {"records": 1000.0, "r2": 0.01}})
        ''
    """
    from fedsurrogate.common.targets.registry import TARGETS

    if (kind := TARGETS.get(task)) is None or kind.chance is None:
        return ""
    known = {
        name: metrics for name, own in answers.items() if kind.score in (metrics := as_numbers(own))
    }
    # Of many answers, one is more often above chance by chance.
    z = NormalDist().inv_cdf(1 - 0.025 / max(1, len(known)))
    try:
        limits = {name: kind.chance(own, z) for name, own in known.items()}
    except (LookupError, ValueError, ArithmeticError):
        # Of another version, or odd.
        return ""
    best = max(known, key=lambda name: known[name][kind.score] - limits[name], default="")
    if not known or known[best][kind.score] > limits[best]:
        return ""
    return (
        f"its answer {best!r} has {SCORES[kind.score]} {known[best][kind.score]:.3f}, and chance alone "
        f"reaches {limits[best]:.3f}"
    )


def accuracy_of(accuracy: Json) -> float | None:
    """The accuracy on the test split or, without one, the mean of the accuracies at the sites.

    Args:
        accuracy: "accuracy" of metrics.json.
    """
    local = list(as_numbers(accuracy.get("per_site")).values())
    model = as_number(accuracy.get("model"))
    return model if model is not None else sum(local) / len(local) if local else None


def largest_share(accuracy: Json, counts: Sequence[Mapping[str, float]]) -> float | None:
    """Accuracy of the majority baseline.

    On the test data if the run has measured it; otherwise estimated from the records that sites
    have by class: of all sites for a global model, and as the mean over the sites where each site
    tests on its own data.

    Args:
        accuracy: "accuracy" of metrics.json.
        counts: records by class of each site that has reported them.

    Returns:
        The accuracy in [0, 1]; None if nothing is known.
    """
    shared = as_number(accuracy.get("model")) is not None
    if shared and (measured := as_number(accuracy.get("majority"))) is not None:
        return measured
    positive = [{name: max(0.0, number) for name, number in own.items()} for own in counts if own]
    total = Counter[str]()
    for each in positive:
        total.update(each)
    if not sum(total.values()):
        return None
    largest = max(total, key=lambda name: total[name])
    if shared:
        return float(total[largest] / sum(total.values()))
    shares = [
        each.get(largest, 0.0) / sum(each.values()) for each in positive if sum(each.values())
    ]
    return sum(shares) / len(shares)
