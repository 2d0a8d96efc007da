"""An evaluation, part by part: which records calibrate and which are judged, against which Gaussians,
and what is written of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from fedsurrogate.client_app.datasets.dataset import stratified_split
from fedsurrogate.client_app.model_use.calibration import (
    SCORES,
    Calibration,
    Wish,
    abstain_limit,
    fit_temperature,
    threshold_for,
)
from fedsurrogate.client_app.model_use.evaluation import Evaluation, check_promise, evaluate
from fedsurrogate.client_app.model_use.held_out import HeldOut, _grouped
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.class_metrics import Judged, report
from fedsurrogate.common.models.classifiers import scores_alone
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.gaussians import Gaussians, fit_gaussians
from fedsurrogate.common.signed_models.signed_model import SignedModel, make_signed_model
from tests.client_app.model_use.test_decisions import KEY, head, records

NAMES = ("a", "b", "c")
DRAWS = 3


@pytest.fixture(scope="module")
def model() -> SignedModel:
    return make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)


def held(count: int = 60, patients: Sequence[str] | None = None, **groups: list[str]) -> HeldOut:
    x, labels = records(4, count)
    whose = None if patients is None else tuple(patients)
    return HeldOut(x, labels, whose, groups, "own records", left_out=7)


def wanted_report(model: SignedModel, own: HeldOut, found: Evaluation, rows: Any) -> Any:
    """The report of these records, with decisions by the calibration of an evaluation, as JSON."""
    chance = found.calibration.probabilities(scores_alone(model.classifier, own.features))
    decided = found.calibration.decisions(chance, NAMES)
    judged = Judged(own.labels.numpy(), chance, decided, own.patients).take(rows)
    made = report(judged, NAMES, DRAWS, 5)
    return json.loads(json.dumps(asdict(made)))


def as_json(found: Any) -> Any:
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("patients", [False, True])
def test_half_of_the_records_calibrate_and_the_other_half_is_judged(
    model: SignedModel, patients: bool
) -> None:
    own = held(60, [f"p{at // 2}" for at in range(60)] if patients else None)
    wish = Wish(True, 0.8, abstain=0.2, score="mahalanobis", draws=DRAWS, seed=5)
    given = Calibration(positive="b", note="earlier")
    found = evaluate(model, own, given, wish)
    first = stratified_split(own.labels, 0.5, 5, own.patients)
    scores, labels = model.classifier.scores(own.features)[first], own.labels[first]
    temperature = fit_temperature(scores, labels)
    chance = softmax(scores.double().numpy() / temperature, axis=1)[:, 1]
    # Of a model without Gaussians, those of the records that calibrate nothing.
    gaussians = fit_gaussians(own.features[~first], own.labels[~first])
    limit = abstain_limit(gaussians.scores(own.features[first])[0], 0.2)
    count, ill = int(first.sum()), int((labels == 1).sum())
    assert found.calibration == Calibration(
        temperature=pytest.approx(temperature),
        positive="b",
        threshold=pytest.approx(threshold_for(chance, labels.numpy() == 1, 0.8)),
        score="mahalanobis",
        abstain_above=pytest.approx(limit),
        note=(
            f"temperature from {count} records; threshold for a sensitivity of 0.8 from {ill} "
            f"records; mahalanobis score above {limit:.4g} abstains, for a share of 0.2 from "
            f"{count} records"
        ),
    )
    assert found.content["calibrated_on"] == count
    report_wanted = wanted_report(model, own, found, (~first).numpy())
    assert as_json(found.content["report"]) == report_wanted
    ood = found.content["out_of_distribution"]
    for name, column in zip(SCORES, gaussians.scores(own.features), strict=True):
        levels = (("0.5", 0.5), ("0.9", 0.9), ("0.95", 0.95), ("0.99", 0.99))
        assert ood[name] == {
            text: pytest.approx(float(np.quantile(column.numpy(), level))) for text, level in levels
        }
    beyond = gaussians.scores(own.features[~first])[0] > limit
    assert ood["abstained"] == pytest.approx(float(beyond.double().mean()))
    assert ood["against"] == "records of this site"


def test_without_a_wish_all_records_are_judged_and_nothing_is_chosen(model: SignedModel) -> None:
    own, given = held(30), Calibration(2.0, "b", 0.3, note="earlier")
    found = evaluate(model, own, given, Wish(draws=DRAWS, seed=5))
    assert found.calibration == given
    assert found.content["calibrated_on"] == 0
    wanted = wanted_report(model, own, found, np.ones(30, bool))
    assert as_json(found.content["report"]) == wanted
    assert found.content["out_of_distribution"]["abstained"] is None
    assert not found.content["adapted"]
    assert found.content["promise"] is None
    other = evaluate(model, own, given, Wish(draws=DRAWS), head(2))
    assert other.content["adapted"]
    again = evaluate(model, own, given, Wish(abstain=0.2, draws=DRAWS))
    assert again.calibration.note.startswith("earlier; relative score above ")
    plain = evaluate(model, own, wish=Wish(abstain=0.2, draws=DRAWS))
    assert plain.calibration.note.startswith("relative score above ")


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("abstain", [0.0, 0.2])
def test_gaussians_are_the_models_or_those_of_a_stored_limit_or_new_ones(
    model: SignedModel, stored: bool, limit: float | None, abstain: float
) -> None:
    own, given = held(30), Calibration(abstain_above=limit)
    kept = fit_gaussians(*records(8)) if stored else None
    wish = Wish(abstain=abstain, draws=DRAWS, seed=5)

    def same(one: Gaussians | None, other: Gaussians) -> bool:
        assert one is not None
        return torch.equal(one.means, other.means)

    found = evaluate(model, own, given, wish, gaussians=kept)
    rows = torch.ones(30, dtype=torch.bool)
    if abstain:
        rows = ~stratified_split(own.labels, 0.5, 5, None)
    fresh = fit_gaussians(own.features[rows], own.labels[rows])
    reused = kept if limit is not None and not abstain else None
    assert same(found.gaussians, reused or fresh)
    with_own = replace(model, gaussians=fit_gaussians(*records(9)))
    found = evaluate(with_own, own, given, wish, gaussians=kept)
    assert found.gaussians is None
    assert found.content["out_of_distribution"]["against"] == "the sites' surrogates"
    wanted = check_promise(
        with_own.classifier, with_own.gaussians, own.features[rows], own.labels[rows]
    )
    assert wanted is not None
    assert found.content["promise"] == asdict(wanted)


def test_each_half_needs_ten_records(model: SignedModel) -> None:
    wish, smallest = Wish(temperature=True, draws=DRAWS), set()
    for count in range(18, 24):
        first = stratified_split(held(count).labels, 0.5, 0, None)
        less = min(int(first.sum()), int((~first).sum()))
        smallest.add(less)
        if less >= 10:
            found = evaluate(model, held(count), wish=wish)
            assert found.content["calibrated_on"] == int(first.sum())
            continue
        with pytest.raises(DataError, match=rf"^{count} held-out .*; 10 are needed in each$"):
            evaluate(model, held(count), wish=wish)
    assert {9, 10} <= smallest
    # All records of a patient are in one half.
    uneven = held(28, ["large"] * 20 + [f"p{at}" for at in range(8)])
    with pytest.raises(DataError, match=r"^28 held-out records are too few"):
        evaluate(model, uneven, wish=wish)


def test_records_without_two_of_a_class_have_no_gaussians(model: SignedModel) -> None:
    found = evaluate(model, held(3), wish=Wish(draws=DRAWS))
    assert (found.content["out_of_distribution"], found.gaussians) == ({}, None)


def test_a_sensitivity_is_for_a_named_class_and_a_score_for_a_share(model: SignedModel) -> None:
    with pytest.raises(ConfigError, match="name the class that it is for with --positive"):
        evaluate(model, held(), wish=Wish(sensitivity=0.9))
    with pytest.raises(
        ConfigError, match="--score relative: is the score for --abstain; give both"
    ):
        Wish(score="relative").check(model.classifier, {})


def test_groups_of_ten_judged_records_have_a_report_and_smaller_ones_their_number(
    model: SignedModel,
) -> None:
    kinds = ["y"] * 9 + ["x"] * 10 + ["z"] * 11
    own = held(30, kind=kinds)
    found = evaluate(model, own, wish=Wish(draws=DRAWS, seed=5))
    groups = found.content["groups"]["kind"]
    assert list(groups) == ["x", "y", "z"]
    assert groups["y"] == 9
    for kind in ("x", "z"):
        wanted = wanted_report(model, own, found, np.array(kinds) == kind)
        assert as_json(groups[kind]) == wanted
    # Of records that calibrate, none is judged.
    halves = evaluate(
        model, held(60, kind=kinds * 2), wish=Wish(temperature=True, draws=DRAWS)
    ).content
    sizes = [
        each if isinstance(each, int) else each["records"]
        for each in halves["groups"]["kind"].values()
    ]
    assert sum(sizes) == 60 - halves["calibrated_on"]


@pytest.mark.parametrize(("kinds", "allowed"), [(20, True), (21, False)])
def test_at_most_twenty_groups_are_compared(model: SignedModel, kinds: int, allowed: bool) -> None:
    own = held(42, ward=[f"w{at % kinds}" for at in range(42)])
    if allowed:
        found = evaluate(model, own, wish=Wish(draws=DRAWS))
        assert len(found.content["groups"]["ward"]) == 20
        return
    with pytest.raises(ConfigError, match="--by 'ward' has 21 different values; at most 20"):
        evaluate(model, own, wish=Wish(draws=DRAWS))


def test_an_evaluation_is_written_as_values_and_as_a_page(
    model: SignedModel, tmp_path: Path
) -> None:
    with_own = replace(model, gaussians=fit_gaussians(*records(9)))
    own = held(30, kind=["x"] * 9 + ["y"] * 21)
    found = evaluate(with_own, own, wish=Wish(draws=DRAWS))
    facts = found.content
    assert facts["schema"] == 1
    assert facts["made"].endswith("Z")
    assert (facts["records"], facts["left_out"], facts["adapted"]) == ("own records", 7, False)
    assert facts["calibration"] == asdict(found.calibration)
    assert list(facts["curves"]) == list(NAMES)
    assert facts["model"]["classes"] == list(NAMES)
    text, page = found.write(tmp_path / "new" / "folder")
    assert found.write(tmp_path / "new" / "folder") == (text, page)
    assert json.loads(text.read_text()) == as_json(facts)
    assert text.read_text() == json.dumps(json.loads(text.read_text()), indent=2) + "\n"
    assert page.read_text() == found.page
    assert not re.search(r"(src|href)=[\"']?https?:|<script|@import", found.page)
    assert found.page.count("<svg") == 3
    assert "stays at this site" in found.page
    accuracy = facts["report"]["averages"]["accuracy"]["value"]
    assert f"accuracy {100 * accuracy:.1f} %" in page.read_text()


@pytest.mark.parametrize("count", [12, 13, 40])
def test_more_than_twelve_numbers_become_four_groups_of_about_equal_size(count: int) -> None:
    values = [f"{(7 * at) % count + 0.5:g}" for at in range(count)]
    found = _grouped(values)
    if count == 12:
        assert found == values
        return
    quarters = np.quantile([float(each) for each in values], [0, 0.25, 0.5, 0.75, 1])
    names = [f"{low:g} to {high:g}" for low, high in pairwise(quarters)]
    for value, name in zip(values, found, strict=True):
        at = next(at for at in range(4) if float(value) <= quarters[at + 1])
        assert name == names[at]
    assert max(map(found.count, names)) - min(map(found.count, names)) <= 1
    texts = [*values[:-1], "text"]
    assert _grouped(texts) == texts
