"""What a model of labels answers by the prevalence and thresholds of a site."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import Classifier, target_of_model
from fedsurrogate.common.targets.answers import answers_of, facts_of
from fedsurrogate.common.targets.labels import LABELS
from fedsurrogate.common.targets.target import Facts

# Shares are kept this far from zero and one for their log odds.
LEAST_SHARE = 1e-6
PRESENT = " present"


def is_of_labels(classifier: Classifier) -> bool:
    """Whether a model answers labels."""
    return facts_of(target_of_model(classifier)).get("name") == LABELS.name


def decided_answers(
    target: str, outputs: tuple[str, ...], scores: Tensor, calibration: Calibration
) -> dict[str, Tensor]:
    """What a model says of each record, by the prevalence and thresholds of a site.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
        scores: (n, o).
        calibration: of the site.

    Returns:
        Columns by name, (n,) each, float64: what the model answers, and 1 or 0 for each label with a
        threshold.
    """
    answers = answers_of(target, outputs, at_prevalence(target, outputs, scores, calibration))
    if facts_of(target).get("name") != LABELS.name:
        return answers
    chosen = dict(calibration.thresholds)
    if calibration.threshold is not None:
        chosen[calibration.positive] = calibration.threshold
    present = {
        f"{name}{PRESENT}": (answers[name] >= chosen[name]).double()
        for name in outputs
        if name in chosen
    }
    return answers | present


def at_prevalence(
    target: str, outputs: tuple[str, ...], scores: Tensor, calibration: Calibration
) -> Tensor:
    """Log odds of labels for the prevalence of a site.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
        scores: log odds, (n, o).
        calibration: of the site; labels that its prevalence does not name stay as they are.

    Returns:
        (n, o), float64.

    Raises:
        ConfigError: for a model that says nothing of its prevalence.
    """
    if not calibration.prevalence:
        return scores.double()
    learned = learned_shares(facts_of(target), outputs)
    own = [calibration.prevalence.get(name, learned[name]) for name in outputs]
    shares = torch.tensor([list(learned.values()), own], dtype=torch.float64)
    odds = torch.logit(shares.clamp(LEAST_SHARE, 1 - LEAST_SHARE))
    return scores.double() + odds[1] - odds[0]


def learned_shares(facts: Facts, outputs: tuple[str, ...]) -> dict[str, float]:
    """The prevalence of each label that a model has learned.

    Args:
        facts: that the model carries.
        outputs: its labels.

    Raises:
        ConfigError: for a model that does not say.
    """
    shares = facts.get("prevalence")
    if not isinstance(shares, list) or len(shares) != len(outputs):
        raise ConfigError("prevalence: the model does not say which it has learned")
    return dict(zip(outputs, map(float, shares), strict=True))
