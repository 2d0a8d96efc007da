"""Thresholds of labels and their prevalence at a hospital, against closed forms and in the commands."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import stratified_split
from fedsurrogate.client_app.model_use.calibration import (
    Calibration,
    Wish,
    calibrated_labels,
    decided_answers,
    shares_in,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.store import read_index, use_model
from fedsurrogate.client_app.model_use.target_metrics import label_metrics
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.class_metrics import calibration_error
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from tests.client_app.model_use.hospitals import site, text, write_images
from tests.client_app.model_use.test_targets_at_work import KINDS, RUN, hospitals, write_table
from tests.grid import FAST, InProcessGrid, run_federation

NAMES = ("edema", "mass")
FACTS = json.dumps({"name": "multilabel", "columns": list(NAMES), "prevalence": [0.3, 0.05]})
share = st.floats(0.01, 0.99)


def model() -> Head:
    """The log odds of both labels are the features."""
    header = Header("run", "coordinator", "f", "b", NAMES)
    return Head(header, torch.eye(2), torch.zeros(2), target=FACTS)


def held(features: Tensor, labels: Tensor, patients: tuple[str, ...] | None = None) -> HeldOut:
    nothing = torch.zeros(len(features), dtype=torch.int64)
    return HeldOut(features, nothing, patients, {}, "made up", values=labels)


def shifted(seed: int, count: int, own: float) -> tuple[Tensor, Tensor]:
    """Log odds that are right where 30 % are positive, of records of which `own` are; both labels."""
    draw = torch.Generator().manual_seed(seed)
    positive = torch.rand(count, 2, generator=draw, dtype=torch.float64) < own
    x = torch.randn(count, 2, generator=draw, dtype=torch.float64) + 1.5 * positive
    prior = torch.tensor([0.3, 0.05]).double().logit()
    return 1.5 * x - 1.5**2 / 2 + prior, positive.double()


@pytest.mark.parametrize(("wish", "which"), [("sensitivity", "every"), ("specificity", "no")])
def test_a_threshold_that_decides_nothing_is_named(wish: str, which: str) -> None:
    """All records have one probability, as where noise hid a label."""
    scores, labels = shifted(0, 400, own=0.3)
    scores[:, 1] = -0.5
    chosen, _ = calibrated_labels(
        model(), held(scores.float(), labels), Calibration(), Wish(**{wish: 0.9})
    )
    assert f"by this threshold {which} record has mass" in chosen.note
    assert "has edema" not in chosen.note


@st.composite
def labelled_models(draw: st.DrawFn) -> tuple[tuple[str, ...], Head]:
    """The columns of a run, and a model of some of them, in another order."""
    columns = tuple(draw(st.permutations(["edema", "mass", "scar", "nodule"])))
    outputs = tuple(draw(st.permutations(columns))[: draw(st.integers(1, 4))])
    learned = draw(st.lists(share, min_size=len(outputs), max_size=len(outputs)))
    facts = {"name": "multilabel", "columns": columns, "prevalence": learned}
    header, many = Header("run", "coordinator", "f", "b", outputs), len(outputs)
    return columns, Head(header, torch.eye(many), torch.zeros(many), target=json.dumps(facts))


@settings(max_examples=40, deadline=None)
@given(made=labelled_models(), data=st.data())
def test_thresholds_decide_alike_at_every_prevalence_that_is_asked_in_turn(
    made: tuple[tuple[str, ...], Head], data: st.DataObject
) -> None:
    """Whatever prevalence was in force before: none, the model's, or that of another time."""
    _, chosen_model = made
    outputs = chosen_model.header.classes
    some = st.dictionaries(st.sampled_from(outputs), share)
    scores = torch.linspace(-8, 8, 41, dtype=torch.float64)[:, None].expand(-1, len(outputs))
    records = held(scores.float(), torch.zeros(41, 4))
    calibration = Calibration(thresholds=data.draw(some), prevalence=data.draw(some))
    first = decided_answers(chosen_model.target, outputs, scores, calibration)
    for _ in range(2):
        shares = data.draw(some)
        asked = ",".join(f"{name}={value}" for name, value in shares.items())
        if not asked:
            continue
        wish = Wish(prevalence=asked)
        calibration, _ = calibrated_labels(chosen_model, records, calibration, wish)
        found = decided_answers(chosen_model.target, outputs, scores, calibration)
        assert found.keys() == first.keys()
        # What is not named is as frequent as the model has learned.
        assert calibration.prevalence == shares
        for name in calibration.thresholds:
            unsure = (found[name] - calibration.thresholds[name]).abs() < 1e-9
            same = found[f"{name} present"] == first[f"{name} present"]
            assert (same | unsure).all(), name


@settings(max_examples=30, deadline=None)
@given(
    made=labelled_models(),
    seed=st.integers(0, 99),
    wish=st.sampled_from(
        [{"prevalence": "here"}, {"sensitivity": 0.8}, {"specificity": 0.8, "prevalence": "here"}]
    ),
)
def test_what_is_chosen_for_a_label_comes_from_its_own_column(
    made: tuple[tuple[str, ...], Head], seed: int, wish: dict[str, Any]
) -> None:
    columns, chosen_model = made
    outputs = chosen_model.header.classes
    draw = torch.Generator().manual_seed(seed)
    truth = {
        name: (torch.rand(200, generator=draw) < 0.2 * (at + 1)).double()
        for at, name in enumerate(sorted(columns))
    }
    scores = torch.stack(
        [truth[name] + torch.randn(200, generator=draw, dtype=torch.float64) for name in outputs], 1
    )
    records = held(scores, torch.stack([truth[name] for name in columns], 1))
    found, _ = calibrated_labels(chosen_model, records, Calibration(), Wish(**wish))
    learned = json.loads(chosen_model.target)["prevalence"]
    for at, name in enumerate(outputs):
        # A model of this label alone, of a run of this label alone.
        facts = json.dumps({"name": "multilabel", "columns": [name], "prevalence": [learned[at]]})
        header = replace(chosen_model.header, classes=(name,))
        alone = Head(header, torch.ones(1, 1), torch.zeros(1), target=facts)
        own = held(scores[:, at : at + 1], truth[name][:, None])
        wanted, _ = calibrated_labels(alone, own, Calibration(), Wish(**wish))
        assert found.prevalence.get(name) == pytest.approx(wanted.prevalence.get(name))
        assert found.thresholds.get(name) == pytest.approx(wanted.thresholds.get(name))


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"prevalence": "edema=2"}, "between 0 and 1"),
        ({"prevalence": "edema"}, "label=share"),
        ({"prevalence": "heart=0.1"}, "no label 'heart'"),
        ({"sensitivity": 0.9, "specificity": 0.9}, "one threshold"),
        ({"specificity": 1.5}, "at most 1"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(wish: dict[str, Any], said: str) -> None:
    scores, labels = shifted(4, 100, own=0.3)
    with pytest.raises(ConfigError, match=said):
        calibrated_labels(model(), held(scores, labels), Calibration(), Wish(**wish))
    with pytest.raises(DataError, match="too few to calibrate"):
        calibrated_labels(
            model(), held(scores[:8], labels[:8]), Calibration(), Wish(specificity=0.9)
        )
    with pytest.raises(ConfigError, match="thresholds"):
        Calibration(thresholds={"heart": 0.5}).checked(NAMES)
    silent = json.dumps({"name": "multilabel", "columns": list(NAMES)})
    with pytest.raises(ConfigError, match="does not say"):
        decided_answers(silent, NAMES, scores, Calibration(prevalence={"mass": 0.5}))
    assert shares_in("", NAMES) == {}


@pytest.mark.parametrize("target", ["multilabel", "regression", "survival"])
@pytest.mark.parametrize(
    "option",
    ["--temperature", "--abstain", "--score", "--positive", "--threshold", "--known-only"],
)
def test_what_only_classes_have_is_refused_by_name(target: str, option: str) -> None:
    other = replace(model(), target=json.dumps({"name": target, "columns": list(NAMES)}))
    with pytest.raises(ConfigError, match=f"{option}: for models of classes only"):
        Wish().check(other, {option: True, "--other": False})
    Wish().check(replace(other, target=""), {option: True})
    if target != "multilabel":
        for wish in ({"sensitivity": 0.9}, {"specificity": 0.9}):
            with pytest.raises(ConfigError, match="and this is none"):
                Wish(**wish).check(other, {})


@pytest.mark.slow
def test_a_hospital_stores_thresholds_and_prevalence_and_predicts_with_them(tmp_path: Path) -> None:
    nodes = hospitals(tmp_path)
    run_federation(tmp_path, InProcessGrid(nodes), **FAST | RUN | KINDS["labels"])
    node = parse_node_config(nodes[0])
    (name,) = read_index(node).models
    use_model(node, name)
    own = ("--node-config", text(nodes[0]))
    # Most even digits are missing here.
    rows = [row for row in range(900, 1500) if row % 10 == 0 or row % 2]
    labelled = write_images(tmp_path / "labelled", rows, labelled=False)
    write_table(labelled, rows)
    wish = ("--specificity", "0.8", "--prevalence", "here", "--store")
    done = site("evaluate", "--data-dir", labelled, "--out", tmp_path / "page", *wish, *own)
    assert done.code == 0, done.stderr
    found = json.loads((tmp_path / "page" / "evaluation.json").read_text())
    thresholds = found["calibration"]["thresholds"]
    assert set(thresholds) == {"even", "large"}
    assert found["count"] < len(rows)
    metric_values = found["metric_values"]["even"]
    assert metric_values["specificity_at_the_threshold"]["value"] == pytest.approx(0.8, abs=0.12)
    assert {"calibration_error", "brier_at_the_prevalence_of_the_model"} <= metric_values.keys()
    unseen = write_images(tmp_path / "unseen", range(1500, 1560), labelled=False)
    file = tmp_path / "answers.csv"
    done = site("predict", "--data-dir", unseen, "--out", file, *own)
    assert done.code == 0, done.stderr
    with file.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    for line in lines:
        for label, threshold in thresholds.items():
            assert float(line[f"{label} present"]) == (float(line[label]) >= threshold)
    given = site(
        "predict",
        "--data-dir",
        unseen,
        "--out",
        file,
        "--overwrite",
        *own,
        "--positive",
        "even",
        "--threshold",
        "0.000001",
    )
    assert given.code == 0, given.stderr
    with file.open(newline="") as stream:
        assert all(float(line["even present"]) == 1 for line in csv.DictReader(stream))
    for wrong in (("--temperature",), ("--prevalence", "heart=0.5")):
        refused = site("evaluate", "--data-dir", labelled, "--out", tmp_path / "no", *wrong, *own)
        assert refused.code != 0


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

    own_names = ("auroc", "average_precision", "brier", "sensitivity_at_specificity")
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
