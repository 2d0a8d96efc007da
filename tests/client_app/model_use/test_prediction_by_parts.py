"""Predictions, part by part: cells by scipy, what became of each image, rows of a file in the order of
the images, and which model a person has named.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from fedsurrogate.client_app.model_use.calibration import ABSTAIN, Calibration, decided_answers
from fedsurrogate.client_app.model_use.prediction import Predictor
from fedsurrogate.client_app.model_use.store import OpenedModel
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import (
    Classifier,
    Ensemble,
    Head,
    scores_alone,
    target_of_model,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from fedsurrogate.common.signed_models.signed_model import make_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from tests.client_app.model_use.test_decisions import KEY, head, records

NAMES = ("a", "b", "c")


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([None, 0.3]),
    st.booleans(),
    st.sampled_from(["relative", "mahalanobis"]),
    st.floats(0.5, 3),
)
def test_cells_are_probabilities_a_decision_and_scores(
    seed: int, threshold: float | None, limited: bool, score: Any, temperature: float
) -> None:
    x, labels = records(seed, 20)
    gaussians, model = fit_gaussians(x, labels), head(seed)
    both = dict(zip(("mahalanobis", "relative"), gaussians.scores(x), strict=True))
    # At its limit itself a record is decided.
    limit = float(both[score].sort().values[12]) if limited else None
    chosen = Calibration(temperature, "b", threshold, score, limit)
    predictor = Predictor(model, chosen, gaussians)
    assert predictor.columns() == ["p_a", "p_b", "p_c", "decision", "mahalanobis", "relative"]
    chances = softmax(scores_alone(model, x).numpy() / temperature, axis=1)
    for at, row in enumerate(predictor.results(x)):
        texts, decided, scores = row[:3], row[3], row[4:]
        assert [float(str(each)) for each in texts] == pytest.approx(chances[at].tolist())
        assert all(repr(float(str(each))) == each for each in texts)
        if limit is not None and float(both[score][at]) > limit:
            assert decided == ABSTAIN
        elif threshold is not None and chances[at, 1] >= threshold:
            assert decided == "b"
        else:
            allowed = [0, 2] if threshold is not None else [0, 1, 2]
            assert decided == NAMES[max(allowed, key=lambda k: chances[at, k])]
        assert scores == [float(f"{float(both[k][at]):.6g}") for k in ("mahalanobis", "relative")]
    plain = Predictor(model, Calibration())
    assert plain.columns() == ["p_a", "p_b", "p_c", "decision"]
    assert [len(row) for row in plain.results(x)] == [4] * 20


def model_of(kind: str, seed: int) -> Classifier:
    """A model of 70 features, whose products are added up in another order for each shape."""
    random = torch.Generator().manual_seed(seed)
    outputs, target = NAMES, ""
    if kind == "multilabel":
        facts = {"name": kind, "columns": list(NAMES), "prevalence": [0.3, 0.1, 0.5]}
        target = json.dumps(facts)
    header = Header("fedpft", "run", "coordinator", "f" * 64, outputs)
    plain = Head(header, torch.randn(3, 70, generator=random) / 8, torch.zeros(3), target=target)
    projection = torch.randn(40, 70, generator=random) / 8
    narrow = replace(plain, weight=plain.weight[:, :40], projection=projection, clip=1.0)
    several = Ensemble((plain, narrow))
    return {"head": plain, "projection": narrow, "ensemble": several, "multilabel": plain}[kind]


@settings(max_examples=30)
@given(
    kind=st.sampled_from(["head", "projection", "ensemble", "multilabel"]),
    seed=st.integers(0, 10**6),
    order=st.permutations(range(11)),
    size=st.integers(1, 11),
)
def test_a_record_has_the_same_row_in_every_batch_and_is_decided_as_it_was_judged(
    kind: str, seed: int, order: list[int], size: int
) -> None:
    """A record whose own probability was chosen as the threshold, by an evaluation of all, has it in
    a prediction of some; one at the limit itself does not abstain.
    """
    x = torch.randn(11, 70, generator=torch.Generator().manual_seed(seed))
    model, at = model_of(kind, seed), order[0]
    gaussians = None
    if kind == "multilabel":
        answers = decided_answers(
            target_of_model(model), NAMES, scores_alone(model, x), Calibration()
        )
        chosen = Calibration(thresholds={"b": float(answers["b"][at])})
    else:
        gaussians = fit_gaussians(model.prepare(x), torch.arange(11) % 2)
        chance = Calibration().probabilities(scores_alone(model, x))[at, 1]
        limit = float(gaussians.scores(x, model)[0][at])
        chosen = Calibration(1.0, "b", float(chance), "mahalanobis", limit)
    predictor = Predictor(model, chosen, gaussians)
    whole, some = predictor.results(x), x[torch.tensor(order)]
    cut = [row for part in torch.split(some, size) for row in predictor.results(part)]
    assert cut == [whole[row] for row in order]
    columns = dict(zip(predictor.columns(), cut[0], strict=True))
    assert (columns["b present"] == 1.0) if kind == "multilabel" else (columns["decision"] == "b")


def test_a_limit_needs_gaussians_and_a_calibration_its_classes() -> None:
    with pytest.raises(ConfigError, match="abstain-above needs out-of-distribution scores"):
        Predictor(head(1), Calibration(abstain_above=1.0))
    with pytest.raises(ConfigError, match="positive = 'd': the model's classes are a, b, c"):
        Predictor(head(1), Calibration(positive="d"))


def test_what_needs_settings_of_a_site_asks_for_them() -> None:
    model = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)
    with pytest.raises(ConfigError, match="--node-config is missing; the site's records and state"):
        OpenedModel(model, None).site()
    node = NodeConfig()
    assert OpenedModel(model, node).site() is node
    assert OpenedModel(model, node).uncalibrated(1.0)
    assert not OpenedModel(model, node).uncalibrated(2.0)
    other = replace(model, classifier=replace(head(1), target='{"name": "multilabel"}'))
    assert not OpenedModel(other, node).uncalibrated(1.0)
