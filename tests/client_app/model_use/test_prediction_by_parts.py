"""Predictions, part by part: cells by scipy, what became of each image, rows of a file in the order of
the images, and which model a person has named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from fedsurrogate.client_app.features.parts import Part
from fedsurrogate.client_app.model_use import opened as opening
from fedsurrogate.client_app.model_use import prediction
from fedsurrogate.client_app.model_use.calibration import ABSTAIN, Calibration, decided_answers
from fedsurrogate.client_app.model_use.inputs import Inputs
from fedsurrogate.client_app.model_use.opened import OpenedModel, opened
from fedsurrogate.client_app.model_use.prediction import Predictor, check_backbone
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import BackboneError, ConfigError
from fedsurrogate.common.models.classifiers import (
    Classifier,
    Ensemble,
    Head,
    scores_alone,
    target_of_model,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from fedsurrogate.common.signed_models.making import make_signed_model
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
    if kind == "labels":
        facts = {"name": kind, "columns": list(NAMES), "prevalence": [0.3, 0.1, 0.5]}
        target = json.dumps(facts)
    header = Header("fedpft", "run", "coordinator", "f" * 64, outputs)
    plain = Head(header, torch.randn(3, 70, generator=random) / 8, torch.zeros(3), target=target)
    projection = torch.randn(40, 70, generator=random) / 8
    narrow = replace(plain, weight=plain.weight[:, :40], projection=projection, clip=1.0)
    several = Ensemble((plain, narrow))
    return {"head": plain, "projection": narrow, "ensemble": several, "labels": plain}[kind]


@settings(max_examples=30)
@given(
    kind=st.sampled_from(["head", "projection", "ensemble", "labels"]),
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
    if kind == "labels":
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
    assert (columns["b present"] == 1.0) if kind == "labels" else (columns["decision"] == "b")


def test_a_limit_needs_gaussians_and_a_calibration_its_classes() -> None:
    with pytest.raises(ConfigError, match="abstain-above needs out-of-distribution scores"):
        Predictor(head(1), Calibration(abstain_above=1.0))
    with pytest.raises(ConfigError, match="positive = 'd': the model's classes are a, b, c"):
        Predictor(head(1), Calibration(positive="d"))


def test_a_model_is_for_backbones_of_its_fingerprint_and_power() -> None:
    model = make_signed_model(head(1), parse_run({"seed": 4}), None, "1", 2, KEY)
    asked: list[int] = []

    def backbone(own: str) -> Any:
        return SimpleNamespace(
            name="pixels", fingerprint_at=lambda dimension: (asked.append(dimension), own)[1]
        )

    check_backbone(model, backbone("f" * 64))
    assert asked == [6]
    with pytest.raises(
        BackboneError, match=r"fingerprint f{16}, but 'pixels' here has e{16}; .*seed = 4"
    ):
        check_backbone(model, backbone("e" * 64))


@pytest.mark.parametrize("stopped", [False, True])
def test_images_are_answered_some_at_a_time_and_what_is_computed_is_never_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    sizes, asked, steps = [(2, 1), (1, 0), (0, 3), (1, 0), (3, 1), (1, 0)], list[Any](), list[int]()

    def parts(opener: Any, shards: Any, backbone: Any, size: int) -> Iterator[Part]:
        asked.append(([list(each) for each in shards], size))
        at = 0
        for good, bad in sizes:
            rows = list(range(at, at + good))
            broken = [(row, "OSError: x") for row in range(at + good, at + good + bad)]
            yield Part(rows, None, broken, torch.ones(good, 2) if good else None)
            at += good + bad
        if stopped:
            raise KeyboardInterrupt

    @contextmanager
    def progress(what: str, count: int) -> Iterator[Any]:
        asked.append((what, count))
        yield steps.append

    monkeypatch.setattr(prediction, "in_parts", parts)
    monkeypatch.setattr(prediction, "progress", progress)
    monkeypatch.setattr(prediction, "TOGETHER", 4)
    inputs = Inputs(tmp_path, False, [str(at) for at in range(20)], {})
    found: list[list[int]] = []
    rows = list(range(3, 16))
    backbone: Any = None
    try:
        for batch in prediction._batches(inputs, rows, backbone):
            found.append(sorted([*batch.rows, *(row for row, _ in batch.broken)]))
    except KeyboardInterrupt:
        assert stopped
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]
    assert steps == [3, 1, 3, 1, 4, 1]
    assert asked == [("predict", 13), ([list(range(13))], 64)]
    assert list(prediction._batches(inputs, [], backbone)) == []


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("node", [None, NodeConfig(site="north"), NodeConfig(data="digits")])
def test_a_run_folder_is_opened_with_its_own_settings_and_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, simulated: bool, node: NodeConfig | None
) -> None:
    model, run = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY), parse_run({})
    for name, answer in {
        "is_simulated": lambda folder: simulated,
        "settings_of_run": lambda folder: run,
        "own_model": lambda folder: model,
        "open_model": lambda name, node: (name, node),
    }.items():
        monkeypatch.setattr(opening, name, answer)
    with pytest.raises(ConfigError, match=r"is a folder without manifest\.json, so it is no run"):
        opened(str(tmp_path), node)
    (tmp_path / "manifest.json").write_text("{}")
    found = opened(str(tmp_path), node)
    assert (found.model, found.run) == (model, tmp_path)
    assert found.node == (node or NodeConfig(state_dir=str(tmp_path / "site")))
    has_data = node is not None and bool(node.data)
    assert found.simulated is (run if simulated and not has_data else None)
    assert found.note == f"model of {tmp_path}, your own folder: used as it is, without a " + (
        "coordinator's key"
    )
    found.check_records("folder")
    if simulated or has_data:
        found.check_records("")
    else:
        with pytest.raises(ConfigError, match="is a run between hospitals, so its records are not"):
            found.check_records("")
    monkeypatch.chdir(tmp_path.parent)
    for name in ("in-use", str(tmp_path / "manifest.json"), "unknown"):
        other = opened(name, node)
        assert (other.model, other.node, other.run, other.note) == ((name, node), node, None, "")
        other.check_records("")


def test_what_needs_settings_of_a_site_asks_for_them() -> None:
    model = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)
    with pytest.raises(ConfigError, match="--node-config is missing; the site's records and state"):
        OpenedModel(model, None).site()
    node = NodeConfig()
    assert OpenedModel(model, node).site() is node
    assert OpenedModel(model, node).uncalibrated(1.0)
    assert not OpenedModel(model, node).uncalibrated(2.0)
    other = replace(model, classifier=replace(head(1), target='{"name": "labels"}'))
    assert not OpenedModel(other, node).uncalibrated(1.0)
