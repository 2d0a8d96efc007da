"""An evaluation of a model of another target than classes: each output is judged on its own values, by what
the site decides, and all of it is written.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sksurv.util import Surv

from fedsurrogate.client_app.model_use.calibration import Calibration, Wish, decided_answers
from fedsurrogate.client_app.model_use.evaluation import evaluate
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.target_metrics import (
    label_metrics,
    number_metrics,
    time_metrics,
)
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.class_metrics import Metric
from fedsurrogate.common.models.classifiers import Head, scores_alone
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import SignedModel, make_signed_model
from fedsurrogate.common.targets.metrics import IN_WORDS, answers_of, metric_text
from tests.client_app.model_use.test_adaptation import FACTS, OUTPUTS, head, records
from tests.client_app.model_use.test_decisions import KEY
from tests.client_app.model_use.test_decisions import head as of_classes

MetricValues = dict[str, dict[str, Metric]]
TITLES = {
    "regression": 2 * len(OUTPUTS["regression"]),
    "multilabel": 3,
    "survival": 1,
}


def signed(model: Head) -> SignedModel:
    made = make_signed_model(of_classes(1), parse_run({}), None, "1", 2, KEY)
    return replace(made, classifier=model)


def metric_values(kind: str, model: Head, held: HeldOut, own: Calibration) -> MetricValues:
    assert held.values is not None
    names, values = OUTPUTS[kind], held.values.numpy()
    scores = scores_alone(model, held.features)
    answers, plain = (
        {name: column.numpy() for name, column in each.items()}
        for each in (
            decided_answers(model.target, names, scores, own),
            answers_of(model.target, names, scores),
        )
    )
    places = [FACTS[kind]["columns"].index(name) for name in names if kind != "survival"]
    if kind == "regression":
        return {
            name: number_metrics(
                values[:, at],
                answers[name],
                [answers[f"{name} low"], answers[f"{name} high"]],
                held.patients,
                20,
            )
            for name, at in zip(names, places, strict=True)
        }
    if kind == "multilabel":
        present = {name: answers[f"{name} present"] for name in own.thresholds}
        chosen = {name: answers[name] for name in names}
        return label_metrics(values[:, places], chosen, plain, present, held.patients, 20)
    # At the horizon no record is left to compare.
    curves = np.stack([answers["survival 1"], answers["survival 2"]], 1)
    observed = Surv.from_arrays(values[:, 1] == 1, values[:, 0])
    curve = np.array([1.0, 2.0]), curves
    return {"risk": time_metrics(observed, answers["risk"], 4.0, curve, held.patients, 20)}


@pytest.mark.parametrize("kind", TITLES)
@pytest.mark.parametrize("adapted", [False, True])
def test_values_of_the_outputs_are_judged_and_written(
    tmp_path: Path, kind: str, adapted: bool
) -> None:
    model, held = head(kind), replace(records(kind, "shared", 40, 1, copies=2), left_out=3)
    own = replace(model, bias=model.bias + 0.1) if adapted else None
    chosen = Calibration(note="why")
    if kind == "multilabel":
        chosen = replace(chosen, thresholds={"mass": 0.5}, prevalence={"edema": 0.4})
    made = evaluate(signed(model), held, chosen, Wish(draws=20), own)
    facts, page = made.write(tmp_path / "new" / "out")
    found: dict[str, Any] = json.loads(facts.read_text())
    wanted = {
        name: {key: asdict(each) for key, each in own_metrics.items()}
        for name, own_metrics in metric_values(kind, own or model, held, chosen).items()
    }
    assert found["metric_values"] == json.loads(json.dumps(wanted))
    assert (found["schema"], found["count"], found["patients"]) == (1, 80, True)
    assert (found["records"], found["left_out"], found["adapted"]) == ("own records", 3, adapted)
    assert found["calibration"]["note"] == chosen.note
    assert (made.report, made.gaussians, made.calibration) == (None, None, chosen)
    shown = page.read_text()
    assert shown.startswith("<!")
    assert shown.count("<figure") == TITLES[kind]
    assert ("own version of the shared one" in shown) is adapted
    assert "whole patients drawn" in " ".join(shown.split())
    rows = re.findall(r'<tr><td data-name="answer">(.*?)</td>(.*?)</tr>', shown, re.DOTALL)
    assert [name for name, _ in rows] == list(wanted)
    for (_, cells), of_answer in zip(rows, wanted.values(), strict=True):
        texts = re.findall(r'data-name="([^"]*)">(.*?)</td>', cells, re.DOTALL)
        words = {name: re.sub("<[^>]*>", " ", text).split() for name, text in texts}
        most = max(each["support"] for each in of_answer.values())
        assert words.pop("records") == [str(most)]
        for key, each in of_answer.items():
            name = key.removeprefix("macro_")
            value, *below = words.pop(IN_WORDS.get(name, name.replace("_", " ")))
            assert value == (
                "undefined" if each["value"] is None else metric_text(key, each["value"])
            )
            if each["low"] is not None:
                low, _, high = " ".join(below).partition(",")[0].split()
                assert (low, high) == (
                    metric_text(key, each["low"]),
                    metric_text(key, each["high"]),
                )
            assert ("n" in below) == (each["support"] != most)
        assert not any(words.values()), "a cell of another answer's metric is empty"


def test_records_without_values_are_refused() -> None:
    held = replace(records("survival", "shared", 30, 1), values=None)
    with pytest.raises(DataError, match="have no values of the model's target"):
        evaluate(signed(head("survival")), held)
