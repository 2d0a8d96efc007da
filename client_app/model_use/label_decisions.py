"""What a site decides about a model of labels: how frequent each label is here, and from which
probability on it counts as present.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import stratified_split
from fedsurrogate.client_app.model_use.calibration import (
    Calibration,
    threshold_at,
    threshold_for,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.label_answers import (
    PRESENT,
    at_prevalence,
    decided_answers,
    is_of_labels,
)
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.class_measures import FEWEST, calibration_error
from fedsurrogate.common.models.classifiers import Classifier, scores_alone, target_of_model
from fedsurrogate.common.models.intervals import (
    Array,
    Measure,
    bootstrap_weights,
    means_of,
    units_of,
    with_interval,
)
from fedsurrogate.common.targets.answers import facts_of

# The prevalence is that of the calibrating records.
HERE = "here"


@dataclass(frozen=True)
class LabelWish:
    """What a person wishes to know of each label.

    Attributes:
        sensitivity: for which a threshold is chosen; 0 for none.
        specificity: for which a threshold is chosen; 0 for none.
        prevalence: share of positive records here, as "label=share,label=share"; HERE for that of
            half of the records; empty for that of the model.
        seed: of the split.

    Raises:
        ConfigError: for a sensitivity and a specificity.
    """

    sensitivity: float = 0.0
    specificity: float = 0.0
    prevalence: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sensitivity and self.specificity:
            raise ConfigError("--sensitivity and --specificity: one threshold has one of them")
        for name in ("sensitivity", "specificity"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name} {getattr(self, name):g}: must be above 0, at most 1")

    def check(self, classifier: Classifier, of_classes: Mapping[str, object]) -> None:
        """Refuse what a model cannot have.

        Args:
            classifier: the model.
            of_classes: what a person also wishes that only models of classes have, by option.

        Raises:
            ConfigError: for such a wish.
        """
        if not is_of_labels(classifier) and (self.specificity or self.prevalence):
            raise ConfigError(
                "--specificity and --prevalence are for models of labels, and this is none; leave "
                "them out"
            )
        if target_of_model(classifier) and self.sensitivity and not is_of_labels(classifier):
            raise ConfigError(
                "--sensitivity is for models of classes and labels, and this is none; leave it out"
            )
        check_of_classes(classifier, of_classes)

    @property
    def calibrates(self) -> bool:
        """Whether a part of the records is used to choose."""
        return bool(self.sensitivity or self.specificity) or self.prevalence == HERE


def check_of_classes(classifier: Classifier, given: Mapping[str, object]) -> None:
    """Refuse options that only models of classes have.

    Args:
        classifier: the model.
        given: by option, something true where a person gave it.

    Raises:
        ConfigError: for a model of another target with such an option.
    """
    named = [option for option, value in given.items() if value]
    if target_of_model(classifier) and named:
        raise ConfigError(
            f"{' and '.join(named)}: for models of classes only, and this one has another target; "
            "leave it out"
        )


def shares_in(text: str, labels: Sequence[str]) -> dict[str, float]:
    """The shares in a text such as "edema=0.1,mass=0.02".

    Raises:
        ConfigError: for another text, label or share.

    Example:
        >>> shares_in("edema=0.1, mass=0.02", ["edema", "mass"])
        {'edema': 0.1, 'mass': 0.02}
    """
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, number = part.rpartition("=")
        name = name.strip()
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not (equals and 0 < share < 1):
            raise ConfigError(
                f"--prevalence {part[:60]!r}: write label=share, with a share between 0 and 1, or "
                f"{HERE!r}"
            )
        if name not in labels:
            raise ConfigError(
                f"--prevalence: the model has no label {name[:60]!r}; it has {', '.join(labels)}"
            )
        found[name] = share
    return found


def calibrated_labels(
    classifier: Classifier, held: HeldOut, calibration: Calibration, wish: LabelWish
) -> tuple[Calibration, HeldOut]:
    """Choose prevalence and thresholds of each label.

    What records decide comes from half of them (whole patients), and the other half is left to be
    judged. A label with few positive or negative records among them keeps what it had.

    Args:
        classifier: of a target; only one of labels has anything to choose.
        held: the records.
        calibration: that the site has.
        wish: what to choose anew.

    Returns:
        The calibration, and the records that did not choose it.

    Raises:
        ConfigError: for a wish that does not fit.
        DataError: for too few records.
    """
    outputs, target = classifier.header.classes, target_of_model(classifier)
    if not is_of_labels(classifier):
        return calibration, held
    if wish.prevalence and wish.prevalence != HERE:
        shares = shares_in(wish.prevalence, outputs)
        moved = _at(classifier, calibration, shares)
        calibration = replace(moved, note="prevalence given by a person")
    if not wish.calibrates:
        return calibration, held
    if held.values is None:
        raise DataError("the held-out records have no values of the model's target")
    # A first half, of whole patients where these are known.
    alike = torch.zeros(len(held.values), dtype=torch.int64)
    first = stratified_split(alike, 0.5, wish.seed, held.patients)
    columns = facts_of(target)["columns"]
    truth = held.values[first][:, [columns.index(name) for name in outputs]].numpy()
    enough = [
        name
        for at, name in enumerate(outputs)
        if min((truth[:, at] == value).sum() for value in (0, 1)) >= FEWEST
    ]
    if not enough:
        raise DataError(
            f"{len(held.values)} held-out records are too few to calibrate with one half and judge "
            f"with the other; a label needs {FEWEST} that are present, and as many absent, in a half"
        )
    if wish.prevalence == HERE:
        shares = {}
        for name in enough:
            own = truth[:, outputs.index(name)]
            positive, known = (own == 1).sum(), (~np.isnan(own)).sum()
            shares[name] = float((positive + 0.5) / (known + 1))
        calibration = _at(classifier, calibration, shares)
    scores = scores_alone(classifier, held.features[first])
    answers = decided_answers(target, outputs, scores, calibration)
    thresholds = dict(calibration.thresholds)
    decides_nothing: dict[str, str] = {}
    for name in enough if wish.sensitivity or wish.specificity else ():
        own = truth[:, outputs.index(name)]
        known_rows = ~np.isnan(own)
        chance, positive_rows = answers[name].numpy()[known_rows], own[known_rows] == 1
        thresholds[name] = (
            threshold_for(chance, positive_rows, wish.sensitivity)
            if wish.sensitivity
            else threshold_at(chance, positive_rows, wish.specificity)
        )
        present = chance >= thresholds[name]
        if present.all() or not present.any():
            decides_nothing[name] = "every record" if present.all() else "no record"
    note = _note(wish, len(truth), [name for name in outputs if name not in enough])
    note += "".join(
        f"; by this threshold {which} has {name}: its probabilities do not tell records apart"
        for name, which in decides_nothing.items()
    )
    chosen = replace(calibration, thresholds=thresholds, note=note)
    return chosen, taken(held, (~first).nonzero().flatten())


def _at(
    classifier: Classifier, calibration: Calibration, shares: Mapping[str, float]
) -> Calibration:
    """The calibration at another prevalence. Its thresholds move with the probabilities, so that
    they decide as before.
    """
    moved = replace(calibration, prevalence=dict(shares))
    outputs, target = classifier.header.classes, target_of_model(classifier)
    nothing = torch.zeros(1, len(outputs), dtype=torch.float64)
    shifts = at_prevalence(target, outputs, nothing, moved) - at_prevalence(
        target, outputs, nothing, calibration
    )
    odds = {name: float(shift) for name, shift in zip(outputs, shifts[0], strict=True)}
    thresholds = {
        name: float(torch.sigmoid(torch.tensor(value).double().logit() + odds[name]))
        for name, value in calibration.thresholds.items()
    }
    return replace(moved, thresholds=thresholds)


def _note(wish: LabelWish, records: int, left_out: Sequence[str]) -> str:
    parts = []
    if wish.prevalence == HERE:
        parts.append("prevalence")
    for name in ("sensitivity", "specificity"):
        if wanted := getattr(wish, name):
            parts.append(f"thresholds for a {name} of {wanted:g}")
    less = f"; not of {', '.join(left_out)}, which have few" if left_out else ""
    return f"{' and '.join(parts)} from {records} records{less}"


def taken(held: HeldOut, rows: Tensor) -> HeldOut:
    """Some of the records.

    Args:
        held: the records.
        rows: their indices, (m,).
    """
    at = rows.tolist()
    return replace(
        held,
        features=held.features[rows],
        labels=held.labels[rows],
        patients=None if held.patients is None else tuple(held.patients[i] for i in at),
        groups={name: [values[i] for i in at] for name, values in held.groups.items()},
        values=None if held.values is None else held.values[rows],
    )


def decision_measures(
    truth: Array,
    before: Array,
    answers: Mapping[str, Array],
    name: str,
    patients: Sequence[str] | None,
    draws: int,
) -> dict[str, Measure]:
    """Calibration of a label before and after a site's prevalence, and rates of its decisions.

    Args:
        truth: 1 and 0, and NaN where a record is not annotated, (n,).
        before: probabilities with the prevalence of the model, (n,).
        answers: of the model, by name, (n,) each; see `decided_answers`.
        name: of the label.
        patients: of each record, if known.
        draws: number of samples for the intervals.
    """
    from sklearn.metrics import brier_score_loss, recall_score

    known = np.flatnonzero(~np.isnan(truth))
    positive: NDArray[np.bool_] = truth[known] == 1
    chances = {"": answers[name][known]}
    if not np.array_equal(before[known], chances[""]):
        chances["_at_the_prevalence_of_the_model"] = before[known]
    decided = answers.get(f"{name}{PRESENT}")
    present = None if decided is None else decided[known] == 1
    owners = None if patients is None else [patients[row] for row in known.tolist()]
    if not len(known):
        return {}
    weights, every = (
        bootstrap_weights(len(known), owners, draws, 0),
        np.ones(len(known), dtype=bool),
    )
    found: dict[str, Measure] = {}
    for when, chance in chances.items():
        error = calibration_error(positive, chance)
        found[f"calibration_error{when}"] = Measure(error, None, None, len(known))
        if when:
            brier = float(brier_score_loss(positive, chance, pos_label=True))
            found[f"brier{when}"] = with_interval(
                brier,
                means_of(np.square(chance - positive), weights),
                len(known),
                units_of(every, owners),
            )
    if present is not None:
        rates = recall_score(
            positive, present, labels=[True, False], average=None, zero_division=np.nan
        )
        for kind, group, value in zip(
            ("sensitivity", "specificity"), (positive, ~positive), rates, strict=True
        ):
            found[f"{kind}_at_the_threshold"] = with_interval(
                float(value),
                means_of((present == positive)[group], weights[:, group]),
                int(group.sum()),
                units_of(group, owners),
                share=True,
            )
    return found
