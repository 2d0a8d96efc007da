"""Choices about labels, over a few records and in plain loops: prevalence, thresholds, what is noted of
them, and the records that are left to be judged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, logit

from fedsurrogate.client_app.datasets.dataset import stratified_split
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.target_metrics import label_metrics
from fedsurrogate.client_app.model_use.thresholds import (
    Wish,
    calibrated_labels,
)
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.class_metrics import calibration_error
from tests.client_app.model_use.test_label_decisions import NAMES, held, model, shifted


@pytest.mark.parametrize("sensitivity", [0.0, 0.8])
@pytest.mark.parametrize("prevalence", ["", "here", "mass=0.2"])
@pytest.mark.parametrize("rare", [False, True])
def test_half_of_the_records_choose_for_each_label_that_has_ten_of_both_kinds(
    sensitivity: float, prevalence: str, rare: bool
) -> None:
    scores, values = shifted(3, 80, own=0.5)
    values[::7, 0] = torch.nan
    patients = tuple(f"p{at // 2}" for at in range(80))
    first = stratified_split(torch.zeros(80, dtype=torch.int64), 0.5, 4, patients)
    if rare:
        # Nine and ten of the others choose.
        chosen_rows = first.nonzero().flatten()
        values[chosen_rows, 1] = 0.0
        values[chosen_rows[:9], 1] = 1.0
    own = held(scores, values, patients)
    given = Calibration(thresholds={"mass": 0.3}, note="earlier")
    wish = Wish(False, sensitivity, 0.0 if sensitivity else 0.7, prevalence, seed=4)
    found, rest = calibrated_labels(model(), own, given, wish)
    assert torch.equal(rest.features, scores[~first])
    assert rest.patients == tuple(
        p for p, used in zip(patients, first.tolist(), strict=True) if not used
    )
    shares = {"here": {}, "": {}, "mass=0.2": {"mass": 0.2}}[prevalence]
    names = NAMES[:1] if rare else NAMES
    truth = values[first].numpy()
    if prevalence == "here":
        for name in names:
            column = truth[:, NAMES.index(name)]
            known = column[~np.isnan(column)]
            shares[name] = float((known.sum() + 0.5) / (len(known) + 1))
    assert found.prevalence == pytest.approx(shares)
    learned = dict(zip(NAMES, (0.3, 0.05), strict=True))
    odds = {
        name: logit(shares[name]) - logit(learned[name]) if name in shares else 0.0
        for name in NAMES
    }
    wanted = {"mass": float(expit(logit(0.3) + odds["mass"]))}
    for name in names:
        at = NAMES.index(name)
        known = ~np.isnan(truth[:, at])
        chance = expit(scores[first][:, at].numpy() + odds[name])[known]
        ill = truth[known, at] == 1
        if sensitivity:
            reached = [c for c in chance if (chance[ill] >= c).mean() >= 0.8]
            wanted[name] = max(reached)
        else:
            wanted[name] = min(c for c in chance if (chance[~ill] < c).mean() >= 0.7 - 1e-12)
    assert found.thresholds == pytest.approx(wanted)
    kind = "a sensitivity of 0.8" if sensitivity else "a specificity of 0.7"
    note = f"{'prevalence and ' if prevalence == 'here' else ''}thresholds for {kind} from "
    note += f"{int(first.sum())} records{'; not of mass, which have few' if rare else ''}"
    assert found.note == note


def test_without_a_choice_by_records_all_of_them_are_judged() -> None:
    scores, values = shifted(3, 80, own=0.5)
    own, given = held(scores, values), Calibration(thresholds={"edema": 0.25}, note="earlier")
    assert calibrated_labels(model(), own, given, Wish()) == (given, own)
    found, rest = calibrated_labels(model(), own, given, Wish(prevalence="edema=0.3"))
    assert rest is own
    # At the prevalence that the model has learned, nothing moves.
    assert found.thresholds == pytest.approx({"edema": 0.25})
    assert (found.prevalence, found.note) == ({"edema": 0.3}, "prevalence given by a person")
    assert Wish(prevalence="edema=0.3").chooses(own) is None
    for wish in (Wish(sensitivity=0.5), Wish(specificity=0.5), Wish(prevalence="here")):
        assert wish.chooses(own) is not None
    other = replace(model(), target="")
    assert calibrated_labels(other, own, given, Wish(sensitivity=0.5)) == (given, own)
    with pytest.raises(DataError, match="have no values of the model's target"):
        calibrated_labels(model(), replace(own, values=None), given, Wish(sensitivity=0.5))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("decided", [False, True])
def test_measures_of_a_decision_are_those_of_annotated_records(moved: bool, decided: bool) -> None:
    drawn = np.random.default_rng(1)
    truth = (drawn.random(60) < 0.4).astype(float)
    truth[::5] = np.nan
    before = drawn.random(60)
    after = before**2 if moved else before
    present = {"mass": (after > 0.3).astype(float)} if decided else {}

    def metric_values(truth: Any, whose: Any = None) -> Any:
        column, plain = truth[:, None], {"mass": before}
        return label_metrics(column, {"mass": after}, plain, present, whose, 5)["mass"]

    own_names = ("auroc", "average_precision", "brier", "sensitivity")
    usual = {*own_names, "calibration_slope", "calibration_intercept"}
    found = {name: each for name, each in metric_values(truth).items() if name not in usual}
    known = ~np.isnan(truth)
    ill = truth[known] == 1
    wanted = {"calibration_error": calibration_error(ill, after[known])}
    if moved:
        suffix = "_at_the_prevalence_of_the_model"
        wanted[f"calibration_error{suffix}"] = calibration_error(ill, before[known])
        wanted[f"brier{suffix}"] = float(((before[known] - ill) ** 2).mean())
    if decided:
        there = after[known] > 0.3
        wanted["sensitivity_at_the_threshold"] = float(there[ill].mean())
        wanted["specificity_at_the_threshold"] = float((~there[~ill]).mean())
    assert {name: each.value for name, each in found.items()} == pytest.approx(wanted)
    own = {"sensitivity_at_the_threshold": ill.sum(), "specificity_at_the_threshold": (~ill).sum()}
    assert {name: each.support for name, each in found.items()} == {
        name: own.get(name, 48) for name in wanted
    }
    assert {each.value for each in metric_values(np.full(60, np.nan)).values()} == {None}
    # Where patients are known, whole ones are drawn.
    whole = metric_values(truth, ["p"] * 60)
    assert {name for name, each in whole.items() if each.low is not None} <= usual - set(own_names)
    # Samples of few records have a larger calibration error than all of them.
    with_limits = {name for name, each in found.items() if each.low is not None}
    assert with_limits == {name for name in wanted if not name.startswith("calibration_error")}
    if decided:
        sound = np.where(known, 0.0, np.nan)
        none = metric_values(sound)
        assert none["sensitivity_at_the_threshold"].value is None
