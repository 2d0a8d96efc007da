"""The report of a model of another target than classes, with its measures and plots replaced: what each is
given, and what is written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.model_use import target_report as module
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.label_answers import decided_answers
from fedsurrogate.client_app.model_use.target_report import evaluate_target
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.intervals import Measure
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.making import make_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import answers_of
from tests.client_app.model_use.test_decisions import KEY, head

FACTS: dict[str, dict[str, Any]] = {
    "number": {
        "name": "number",
        "columns": ["other", "age"],
        "ranges": [[0.0, 9.0], [0.0, 100.0]],
        "deviation": [2.0],
    },
    "labels": {"name": "labels", "columns": ["mass", "lung", "edema"], "prevalence": [0.3, 0.2]},
    "time": {
        "name": "time",
        "columns": ["t", "e"],
        "edges": [0.0, 1.0, 2.5],
        "hazard": [0.3, 0.4],
        "unit": "days",
    },
}
OUTPUTS = {"number": ("age",), "labels": ("edema", "mass"), "time": ("risk",)}
VALUE, NOTHING = Measure(0.5, 0.25, 0.75, 6), Measure(None, None, None, 0)


def model(kind: str) -> Head:
    outputs = OUTPUTS[kind]
    weight = torch.tensor([[1.0, 0.5], [-0.5, 1.0]])[: len(outputs)]
    header = Header("fedpft", "", "", "f", outputs)
    return Head(header, weight, torch.zeros(len(outputs)), target=json.dumps(FACTS[kind]))


def records(kind: str) -> HeldOut:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    columns = len(FACTS[kind]["columns"])
    values = torch.arange(6.0 * columns).reshape(6, columns).double() % 2
    nothing = torch.zeros(6, dtype=torch.int64)
    return HeldOut(x, nothing, tuple("ppqqrr"), {}, "own records", 3, values)


class Judged:
    """What measures and plots were given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Any] = {}
        plots = ("predicted_against_true", "bland_altman", "forest", "calibration")
        for name in (*plots, "precision_recall", "kaplan_meier_thirds"):
            patch.setattr(module.plots, name, self.keep(name, name))
        own = SimpleNamespace(measures={"auroc": VALUE})
        labels = [SimpleNamespace(name=name, **vars(own)) for name in OUTPUTS["labels"]]
        report = SimpleNamespace(labels=labels, averages={"auroc": NOTHING}, left_out=())
        for name, answer in {
            "number_measures": {"mae": VALUE},
            "label_report": report,
            "decision_measures": {"brier": NOTHING},
            "time_measures": {"c": VALUE},
        }.items():
            patch.setattr(module, name, self.keep(name, answer))
        patch.setattr(module, "_picture", lambda figure: f"picture {figure}")

    def keep(self, name: str, answer: Any) -> Any:
        def kept(*given: Any) -> Any:
            self.given.setdefault(name, []).append(given)
            return answer

        return kept


def answered(kind: str, held: HeldOut, calibration: Calibration) -> dict[str, Tensor]:
    own = model(kind)
    return decided_answers(own.target, OUTPUTS[kind], own.scores(held.features), calibration)


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize("adapted", [False, True])
def test_values_of_the_outputs_are_judged_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, adapted: bool
) -> None:
    judged, held = Judged(monkeypatch), records(kind)
    chosen = (
        Calibration(note="why", thresholds={"mass": 0.5}) if kind == "labels" else Calibration()
    )
    signed = replace(
        make_signed_model(head(1), parse_run({}), None, "1", 2, KEY), classifier=model(kind)
    )
    own = model(kind) if adapted else None
    facts, page = evaluate_target(signed, held, tmp_path / "new" / "out", 7, chosen, own)
    assert evaluate_target(signed, held, tmp_path / "new" / "out", 7, chosen, own) == (facts, page)
    assert held.values is not None
    values, columns = held.values.numpy(), answered(kind, held, chosen)
    given = {name: each[0] for name, each in judged.given.items()}
    if kind == "number":
        seen, draws = given["number_measures"]
        assert draws == 7
        assert seen.patients == held.patients
        parts = {"age": seen.predicted, "age low": seen.low, "age high": seen.high}
        assert seen.true.tolist() == values[:, 1].tolist()
        for name, part in parts.items():
            assert part.tolist() == pytest.approx(columns[name].tolist())
        assert given["predicted_against_true"] == given["bland_altman"] == (seen,)
        measures = {"age": {"mae": VALUE}}
        titles = ["age: predicted against true", "age: differences (Bland and Altman)"]
    elif kind == "labels":
        truth, chance, names, patients, draws = given["label_report"]
        assert (names, patients, draws) == (("edema", "mass"), held.patients, 7)
        assert truth.tolist() == values[:, [2, 0]].tolist()
        for at, name in enumerate(names):
            assert chance[:, at].tolist() == pytest.approx(columns[name].tolist())
            column, before, answers, label, whose, count = judged.given["decision_measures"][at]
            assert (label, whose, count) == (name, held.patients, 7)
            assert column.tolist() == truth[:, at].tolist()
            plain = answers_of(model(kind).target, names, model(kind).scores(held.features))
            assert before.tolist() == pytest.approx(plain[name].tolist())
            assert set(answers) == {"edema", "mass", "mass present"}
        areas = {name: {"this site": VALUE} for name in names}
        assert given["forest"] == (areas, "AUROC", 0.5)
        for name in ("calibration", "precision_recall"):
            assert [np.asarray(each).tolist() for each in given[name][:2]] == [
                truth.tolist(),
                chance.tolist(),
            ]
            assert given[name][2] == ["edema", "mass"]
        both = {"auroc": VALUE, "brier": NOTHING}
        measures = {"edema": both, "mass": both, "all labels": {"auroc": NOTHING}}
        titles = ["Area under the ROC curve", "Calibration", "Precision and recall"]
    else:
        seen, horizon, survival, draws = given["time_measures"]
        assert (horizon, draws, seen.patients) == (2.5, 7, held.patients)
        assert [seen.times.tolist(), seen.events.tolist()] == [
            values[:, 0].tolist(),
            (values[:, 1] == 1).tolist(),
        ]
        assert seen.risks.tolist() == pytest.approx(columns["risk"].tolist())
        # At the horizon no record is left to compare.
        assert survival.times.tolist() == [1.0]
        assert survival.chances[:, 0].tolist() == pytest.approx(columns["survival 1"].tolist())
        assert survival.chances.shape == (6, 1)
        assert given["kaplan_meier_thirds"] == (seen, 2.5, "days")
        measures, titles = {"risk": {"c": VALUE}}, ["Survival by third of the risk"]
    text = facts.read_text()
    found = json.loads(text)
    assert text == json.dumps(found, indent=2) + "\n"
    wanted = {name: {key: asdict(m) for key, m in each.items()} for name, each in measures.items()}
    assert found["measures"] == wanted
    assert (found["schema"], found["count"], found["patients"]) == (1, 6, True)
    assert (found["records"], found["left_out"], found["adapted"]) == ("own records", 3, adapted)
    assert found["calibration"]["note"] == chosen.note
    assert found["made"].endswith("Z")
    shown = page.read_text()
    assert shown.startswith("<!")
    assert [shown.count(f'alt="{title}"') for title in titles] == [1] * len(titles)
    assert "0.5</td>" in shown
    assert ("undefined" in shown) is (kind == "labels")
    assert ("own version of the shared one" in shown) is adapted
    assert "whole patients drawn" in " ".join(shown.split())


def test_records_without_values_are_refused(tmp_path: Path) -> None:
    signed = replace(
        make_signed_model(head(1), parse_run({}), None, "1", 2, KEY), classifier=model("time")
    )
    with pytest.raises(DataError, match="have no values of the model's target"):
        evaluate_target(signed, replace(records("time"), values=None), tmp_path)
