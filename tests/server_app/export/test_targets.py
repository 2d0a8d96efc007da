"""Exports of models of labels, numbers and times: graphs that answer as `site predict` does, and cards
that say what the answers are.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.prediction import Predictor
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.power_transform import power_for, raised, with_power
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import SignedModel, make_signed_model
from fedsurrogate.server_app.export.graph import graph_of, write_graph
from fedsurrogate.server_app.export.model_card import model_card
from fedsurrogate.strategies.counting.strategy import payload_of
from tests.server_app.export.test_export import KEY, WITH_ONNX, header, pictures, resized
from tests.strategies.counting.targets import KINDS

SIZE = 8
FACTS: dict[str, dict[str, Any]] = {
    "labels": {"prevalence": [0.2, 0.3], "left-out": {}},
    "number": {"deviation": [7.5]},
    "time": {"hazard": [0.1, 0.2, 0.05, 0.3], "spread": 1.0},
}


def signed(kind: str) -> SignedModel:
    """A model with a random head, on the images' own pixels."""
    config = parse_run(KINDS[kind] | {"backbone": "pixels:rgb", "image-size": SIZE})
    assert config.target is not None
    loaded = load_backbone("pixels:rgb", "", SIZE, "cpu")
    outputs = config.target.outputs
    weight = torch.randn(len(outputs), loaded.dim, generator=torch.Generator().manual_seed(0))
    named = replace(
        header(with_power(loaded.fingerprint, power_for("pixels:rgb"))), classes=outputs
    )
    target = json.dumps({**config.target.public, **FACTS[kind]})
    scale, bias = (300.0, 50.0) if kind == "number" else (40.0, 0.3)
    bias_of = torch.full((len(outputs),), bias)
    head = Head(named, scale * weight / loaded.dim**0.5, bias_of, clip=0.0, target=target)
    return make_signed_model(head, config, None, "1", 3, KEY)


def predicted(model: SignedModel, count: int) -> tuple[list[str], np.ndarray]:
    """Columns and cells, as `site predict` writes them."""
    backbone = load_backbone("pixels:rgb", "", SIZE, "cpu")
    batch = torch.stack([backbone.preprocess(image) for image in pictures(count)])
    features = raised(backbone.forward(batch), model.manifest.run_config().power)
    found = Predictor(model.classifier, Calibration())
    return found.columns(), np.array(found.results(features), dtype=float)


@WITH_ONNX
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_answers_as_site_predict_does(kind: str, tmp_path: Path) -> None:
    model = signed(kind)
    graph, (columns, cells) = graph_of(model), predicted(model, 20)
    assert write_graph(graph, tmp_path / "graph") <= 1e-5
    assert list(graph.module.columns) == columns
    images = torch.stack([resized(image, graph) for image in pictures(20)])
    session = importlib.import_module("onnxruntime").InferenceSession(
        str(tmp_path / "graph"), providers=["CPUExecutionProvider"]
    )
    (output,) = session.get_outputs()
    assert output.name == "answers"
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["answers"]) == columns
    assert "uint8" in facts["images"]
    own = graph.preprocessing
    assert json.loads(facts["resize"])["interpolation"] == own.interpolation
    assert json.loads(facts["normalisation in the graph"])["mean"] == list(own.mean)
    answers = session.run(None, {"images": images.numpy().round().astype(np.uint8)})[0]
    # Numbers from 0 to 1 would all be nearly black: a graph of bytes takes none.
    for scale in (1, 255):
        with pytest.raises(Exception, match="uint8"):
            session.run(None, {"images": (images / scale).numpy().astype(np.float32)})
    size = np.maximum(np.abs(cells).max(0), 1)
    assert (np.abs(answers - cells) / size).max() < 1e-5
    assert cells.std(0)[0] > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_says_what_is_answered_and_how_well(kind: str, tmp_path: Path) -> None:
    model = signed(kind)
    (tmp_path / "metrics.json").write_text(json.dumps({"sites": {"used": 3}}))
    graph = graph_of(model)
    text = model_card(model, tmp_path, graph.preprocessing)
    for column in graph.module.columns:
        assert column in text
    assert "`answers`" in text
    assert "image-classification" not in text
    assert "Nothing yet" in text
    interval = {"value": 0.75, "low": 0.5, "high": 1.0}
    content = {
        "kind": "evaluation",
        "sites": 3,
        "task": kind,
        "outputs": {"edema": {"records": interval, "auroc": interval, "mae": interval}},
        "model": payload_of(model.classifier)[1],
        "privacy": {"epsilon": 2.0, "delta": 1e-5},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    measured = model_card(model, tmp_path).replace("\\", "")
    assert "epsilon 2" in measured
    assert "75.0% (50.0% to 100.0%)" in measured
    assert "0.75 (0.5 to 1)" in measured
