"""Evaluation of a model on this site's held-out records. Nothing of it leaves the site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsurrogate.client_app.datasets.dataset import stratified_split
from fedsurrogate.client_app.model_use.calibration import (
    SCORES,
    Calibration,
    Score,
    abstain_limit,
    fit_temperature,
    threshold_for,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.promise import Promise, check_promise
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.class_measures import FEWEST, Judged, Report, curves_of, report
from fedsurrogate.common.models.classifiers import Classifier, check_of_classes, scores_alone
from fedsurrogate.common.signed_models.gaussians import Gaussians, fit_gaussians
from fedsurrogate.common.signed_models.signed_model import SignedModel

MOST_GROUPS = 20
QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Wish:
    """What a person wishes.

    Attributes:
        temperature: fit one.
        sensitivity: of the positive class; 0 for none.
        abstain: share of such records without a decision; 0 for none.
        score: by which the model abstains; None: as the calibration says.
        draws: of the bootstrap.
        seed: of the split and the bootstrap.

    Raises:
        ConfigError: for a score without `abstain`.
    """

    temperature: bool = False
    sensitivity: float = 0.0
    abstain: float = 0.0
    score: Score | None = None
    draws: int = 1000
    seed: int = 0

    @property
    def calibrates(self) -> bool:
        """Whether a part of the records is used to calibrate."""
        return self.temperature or bool(self.sensitivity or self.abstain)

    def __post_init__(self) -> None:
        if self.score is not None and not self.abstain:
            raise ConfigError(f"--score {self.score}: is the score for --abstain; give both")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        model: the shared one.
        calibration: by which it decided.
        held: the records.
        report: measures.
        groups: measures by group; of a small group only its number of records.
        curves: of each class.
        calibrated_on: number of records that calibrated and were not judged.
        ood: quantiles of the out-of-distribution scores, by score, whose Gaussians they are
            against, and the share of judged records beyond the limit.
        gaussians: to store, for a model that has none.
        adapted: whether the model is the site's own version.
        promise: of the shared surrogate, if the model has its Gaussians.
    """

    model: SignedModel
    calibration: Calibration
    held: HeldOut
    report: Report
    groups: Mapping[str, Mapping[str, Report | int]]
    curves: Mapping[str, Mapping[str, Any]]
    calibrated_on: int
    ood: Mapping[str, Any]
    gaussians: Gaussians | None
    adapted: bool
    promise: Promise | None = None


def evaluate(
    model: SignedModel,
    classifier: Classifier,
    held: HeldOut,
    calibration: Calibration,
    wish: Wish = Wish(),
    own: Gaussians | None = None,
) -> Evaluation:
    """Judge a model on held-out records.

    With a wish, half of the records (whole patients) calibrate, and only the other half is judged:
    measures on the records that chose a threshold would be too good.

    Args:
        model: the shared one.
        classifier: the shared one, or the site's own version.
        held: the records.
        calibration: by which it decides.
        wish: what to choose anew.
        own: Gaussians that this site has stored for a model without any.

    Raises:
        ConfigError: for a wish or a calibration that does not fit.
        DataError: for too few records.
    """
    check_of_classes(classifier, "an evaluation by classes")
    classes = tuple(model.manifest.classes)
    calibration = calibration.checked(classes)
    scores = scores_alone(classifier, held.features)
    judged_rows = np.ones(len(held.labels), bool)
    if wish.calibrates:
        first = stratified_split(held.labels, 0.5, wish.seed, held.patients).numpy()
        if min(first.sum(), (~first).sum()) < FEWEST:
            raise DataError(
                f"{len(held.labels)} held-out records are too few to calibrate with one half and "
                f"judge with the other; {FEWEST} are needed in each"
            )
        calibration = _calibrated(calibration, wish, scores[first], held.labels[first], classes)
        judged_rows = ~first
    # A limit that is stored already holds for the Gaussians that it was chosen with.
    kept = own if calibration.abstain_above is not None and not wish.abstain else None
    gaussians = _gaussians(
        model, classifier, held, judged_rows if wish.abstain else np.ones_like(judged_rows), kept
    )
    if wish.abstain:
        chosen = held.features[~judged_rows]
        found = None if gaussians is None else gaussians.scores(chosen, classifier)
        calibration = _abstaining(calibration, wish, found)
    chance = calibration.probabilities(scores)
    every = Judged(
        held.labels.numpy(), chance, calibration.decisions(chance, classes), held.patients
    )
    judged = every.take(judged_rows)
    return Evaluation(
        model,
        calibration,
        held,
        report(judged, classes, wish.draws, wish.seed),
        _by_group(every, judged_rows, held, classes, wish),
        {name: curves_of(judged, index) for index, name in enumerate(classes)},
        int((~judged_rows).sum()),
        _ood(model, classifier, held, gaussians, calibration, judged_rows),
        None if model.gaussians is not None else gaussians,
        classifier is not model.classifier,
        # Of the shared model and its own decisions: a threshold is this site's choice.
        check_promise(
            model.classifier, model.gaussians, held.features[judged_rows], held.labels[judged_rows]
        ),
    )


def _calibrated(
    calibration: Calibration,
    wish: Wish,
    scores: torch.Tensor,
    labels: torch.Tensor,
    classes: tuple[str, ...],
) -> Calibration:
    notes = []
    if wish.temperature:
        calibration = replace(calibration, temperature=fit_temperature(scores, labels))
        notes.append(f"temperature from {len(labels)} records")
    if wish.sensitivity:
        if not calibration.positive:
            raise ConfigError("--sensitivity: name the class that it is for with --positive")
        index = classes.index(calibration.positive)
        chance = calibration.probabilities(scores)[:, index]
        threshold = threshold_for(chance, labels.numpy() == index, wish.sensitivity)
        calibration = replace(calibration, threshold=threshold)
        notes.append(
            f"threshold for a sensitivity of {wish.sensitivity:g} from "
            f"{int((labels == index).sum())} records"
        )
    return replace(calibration, note="; ".join(notes) or calibration.note).checked(classes)


def _by_group(
    judged: Judged, rows: np.ndarray[Any, Any], held: HeldOut, classes: tuple[str, ...], wish: Wish
) -> dict[str, dict[str, Report | int]]:
    """A report for each value of each column; of values with fewer than ten records only their
    number.
    """
    reports: dict[str, dict[str, Report | int]] = {}
    for column, values in held.groups.items():
        kinds = sorted(set(values))
        if len(kinds) > MOST_GROUPS:
            raise ConfigError(
                f"--by {column!r} has {len(kinds)} different values; at most {MOST_GROUPS} can be "
                "compared"
            )
        reports[column] = {}
        for kind in kinds:
            part = judged.take(rows & (np.array(values) == kind))
            count = len(part.labels)
            reports[column][kind] = (
                report(part, classes, wish.draws, wish.seed) if count >= FEWEST else count
            )
    return reports


def _gaussians(
    model: SignedModel,
    classifier: Classifier,
    held: HeldOut,
    rows: np.ndarray[Any, Any],
    own: Gaussians | None,
) -> Gaussians | None:
    """The model's Gaussians, else the site's own ones, else those of these rows, which calibrate
    nothing.
    """
    if model.gaussians is not None or own is not None:
        return model.gaussians or own
    try:
        return fit_gaussians(classifier.prepare(held.features[rows]).float(), held.labels[rows])
    except ValueError:
        return None


def _abstaining(
    calibration: Calibration, wish: Wish, found: tuple[torch.Tensor, ...] | None
) -> Calibration:
    """The calibration with a limit of an out-of-distribution score, from those of records, (n,) each."""
    if found is None:
        raise DataError(
            "--abstain: no Gaussians for an out-of-distribution score; no class has two held-out "
            "records"
        )
    score = wish.score or calibration.score
    scores = found[SCORES.index(score)]
    limit = abstain_limit(scores, wish.abstain)
    note = (
        f"{score} score above {limit:.4g} abstains, for a share of {wish.abstain:g} from "
        f"{len(scores)} records"
    )
    return replace(
        calibration,
        score=score,
        abstain_above=limit,
        note=f"{calibration.note}; {note}".removeprefix("; "),
    )


def _ood(
    model: SignedModel,
    classifier: Classifier,
    held: HeldOut,
    gaussians: Gaussians | None,
    calibration: Calibration,
    judged: np.ndarray[Any, Any],
) -> dict[str, Any]:
    if gaussians is None:
        return {}
    columns = dict(zip(SCORES, gaussians.scores(held.features, classifier), strict=True))
    quantiles: dict[str, Any] = {
        name: {f"{level:g}": float(np.quantile(column.numpy(), level)) for level in QUANTILES}
        for name, column in columns.items()
    }
    limit = calibration.abstain_above
    beyond = (
        None
        if limit is None
        else float((columns[calibration.score][judged] > limit).double().mean())
    )
    against = "the sites' surrogates" if model.gaussians is not None else "records of this site"
    return quantiles | {"against": against, "abstained": beyond}


def facts_of(evaluation: Evaluation) -> dict[str, Any]:
    """Everything in the evaluation as JSON values."""

    def of_report(each: Report) -> dict[str, Any]:
        return asdict(each) | {"confusion": each.confusion.tolist()}

    return {
        "schema": 1,
        "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "model": evaluation.model.manifest.model_dump(),
        "adapted": evaluation.adapted,
        "records": evaluation.held.where,
        "left_out": evaluation.held.left_out,
        "calibration": asdict(evaluation.calibration),
        "calibrated_on": evaluation.calibrated_on,
        "report": of_report(evaluation.report),
        "groups": {
            column: {
                kind: each if isinstance(each, int) else of_report(each)
                for kind, each in kinds.items()
            }
            for column, kinds in evaluation.groups.items()
        },
        "curves": evaluation.curves,
        "out_of_distribution": evaluation.ood,
        "promise": evaluation.promise and asdict(evaluation.promise),
    }


def write_evaluation(evaluation: Evaluation, folder: Path) -> tuple[Path, Path]:
    """Write evaluation.json and evaluation.html.

    Args:
        evaluation: to write.
        folder: of the files.

    Returns:
        Both files.

    Raises:
        OSError: if they cannot be written.
    """
    from fedsurrogate.client_app.model_use.page import page_of

    folder.mkdir(parents=True, exist_ok=True)
    facts, page = folder / "evaluation.json", folder / "evaluation.html"
    content = facts_of(evaluation)
    facts.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    page.write_text(page_of(content), encoding="utf-8", newline="\n")
    return facts, page
