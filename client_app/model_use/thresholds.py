"""What a person wishes a model to decide at a site, and the thresholds, temperature and prevalence that
half of the records choose for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.class_metrics import DRAWS, FEWEST
from fedsurrogate.common.models.classifiers import Classifier, scores_alone, target_of_model
from fedsurrogate.common.targets.metrics import facts_of

from ..datasets.dataset import stratified_split
from .calibration import (
    HERE,
    Calibration,
    Score,
    at_prevalence,
    decided_answers,
    fit_temperature,
    is_of_labels,
    threshold_for,
)
from .held_out import HeldOut


@dataclass(frozen=True)
class Wish:
    """What a person wishes.

    Attributes:
        temperature: fit one.
        sensitivity: of the positive class, or of each label, for which a threshold is chosen; 0 for
            none.
        specificity: of each label, for which a threshold is chosen; 0 for none.
        prevalence: share of positive records here, as "label=share,label=share"; HERE for that of
            half of the records; empty for that of the model.
        abstain: share of such records without a decision; 0 for none.
        score: by which the model abstains; None: as the calibration says.
        draws: of the bootstrap.
        seed: of the split and the bootstrap.

    Raises:
        ConfigError: for wishes that do not agree.
    """

    temperature: bool = False
    sensitivity: float = 0.0
    specificity: float = 0.0
    prevalence: str = ""
    abstain: float = 0.0
    score: Score | None = None
    draws: int = DRAWS
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
        if self.score is not None and not self.abstain:
            raise ConfigError(f"--score {self.score}: is the score for --abstain; give both")

    def chooses(self, held: HeldOut) -> NDArray[np.bool_] | None:
        """The half (n,) of the records, whole patients where these are known, that choose and are not
        judged: metrics on the records that chose a threshold would be too good. None where nothing
        is chosen.
        """
        chosen = self.temperature or self.sensitivity or self.specificity or self.abstain
        if not (chosen or self.prevalence == HERE):
            return None
        first = stratified_split(held.labels, 0.5, self.seed, held.patients).numpy()
        return np.asarray(first, dtype=bool)


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


def calibrated_classes(
    calibration: Calibration, wish: Wish, scores: Tensor, labels: Tensor, classes: tuple[str, ...]
) -> Calibration:
    """Choose temperature and threshold.

    Args:
        calibration: that the site has.
        wish: what to choose anew.
        scores: logits of the records that choose, (n, C).
        labels: their classes, (n,).
        classes: names of C classes.

    Raises:
        ConfigError: for a wish that does not fit.
    """
    notes = []
    if wish.temperature:
        calibration = replace(calibration, temperature=fit_temperature(scores, labels))
        notes.append(f"temperature from {len(labels)} records")
    if wish.sensitivity:
        if not calibration.positive:
            raise ConfigError("--sensitivity: name the class that it is for with --positive")
        index = classes.index(calibration.positive)
        chance, own = calibration.probabilities(scores)[:, index], labels.numpy() == index
        threshold = threshold_for(chance, own, wish.sensitivity)
        calibration = replace(calibration, threshold=threshold)
        notes.append(
            f"threshold for a sensitivity of {wish.sensitivity:g} from {own.sum()} records"
        )
    return replace(calibration, note="; ".join(notes) or calibration.note).checked(classes)


def calibrated_labels(
    classifier: Classifier, held: HeldOut, calibration: Calibration, wish: Wish
) -> tuple[Calibration, HeldOut]:
    """Choose prevalence and thresholds of each label. A label with few positive or negative records
    among those that choose keeps what it had.

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
        calibration = _at(classifier, calibration, shares, "prevalence given by a person")
    if (first := wish.chooses(held)) is None:
        return calibration, held
    if held.values is None:
        raise DataError("the held-out records have no values of the model's target")
    columns = facts_of(target)["columns"]
    truth = held.values[first][:, [columns.index(name) for name in outputs]].numpy()
    sizes = [(truth == value).sum(0) for value in (0, 1)]
    own = {
        name: truth[:, at]
        for at, name in enumerate(outputs)
        if min(sizes[0][at], sizes[1][at]) >= FEWEST
    }
    if not own:
        raise DataError(
            f"{len(held.values)} held-out records are too few to calibrate with one half and judge "
            f"with the other; a label needs {FEWEST} that are present, and as many absent, in a half"
        )
    made = []
    if wish.prevalence == HERE:
        shares = {
            name: float((np.nansum(each) + 0.5) / ((~np.isnan(each)).sum() + 1))
            for name, each in own.items()
        }
        calibration = _at(classifier, calibration, shares)
        made.append("prevalence")
    thresholds, nothing = dict(calibration.thresholds), ""
    if wish.sensitivity or wish.specificity:
        kind, wanted = (
            ("sensitivity", wish.sensitivity)
            if wish.sensitivity
            else ("specificity", wish.specificity)
        )
        made.append(f"thresholds for a {kind} of {wanted:g}")
        scores = scores_alone(classifier, held.features[first])
        answers = decided_answers(target, outputs, scores, calibration)
        for name, each in own.items():
            chance, known = answers[name].numpy()[~np.isnan(each)], each[~np.isnan(each)] == 1
            thresholds[name] = threshold_for(chance, known, wish.sensitivity, wish.specificity)
            present = chance >= thresholds[name]
            if present.all() or not present.any():
                which = "every record" if present.all() else "no record"
                nothing += f"; by this threshold {which} has {name}: its probabilities do not tell records apart"
    less = ", ".join(name for name in outputs if name not in own)
    note = f"{' and '.join(made)} from {len(truth)} records"
    note += (f"; not of {less}, which have few" if less else "") + nothing
    return replace(calibration, thresholds=thresholds, note=note), taken(
        held, ~torch.from_numpy(first)
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


def _at(
    classifier: Classifier, calibration: Calibration, shares: Mapping[str, float], note: str = ""
) -> Calibration:
    """The calibration at another prevalence. Its thresholds move with the probabilities, so that
    they decide as before.
    """
    moved = replace(calibration, prevalence=dict(shares), note=note)
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


def taken(held: HeldOut, rows: Tensor) -> HeldOut:
    """Some of the records.

    Args:
        held: the records.
        rows: which ones, (n,), bool.
    """
    at = rows.nonzero().flatten().tolist()
    return replace(
        held,
        features=held.features[rows],
        labels=held.labels[rows],
        patients=None if held.patients is None else tuple(held.patients[i] for i in at),
        groups={name: [values[i] for i in at] for name, values in held.groups.items()},
        values=None if held.values is None else held.values[rows],
    )
