"""The graph that `coordinator export` writes, on files of every kind: what its card says of reading
them gives the answers of `site predict` and of Python.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsurrogate._model import ImageModel
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, predict
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.signed_models.signed_model import SignedModel, save_signed_model
from tests import commands
from tests.data_kinds.images.corpus import Array, Kind, deep_kinds, shallow_kinds
from tests.server_app.export.test_export import signed

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
BACKBONE, SIDE = "pixels:rgb", 8
# Features are rounded to 16 bits at a site, and not in a graph.
ROUNDING = 2e-3
READ = [*deep_kinds(), *shallow_kinds()]


def answer(graph: Any, pixels: Array) -> Array:
    """Probabilities (3,) of an image (height, width, 3) uint8, resized as the card says."""
    small = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    found: Array = graph(np.array(small).transpose(2, 0, 1)[None])[0]
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, SignedModel]:
    """A graph in its own runtime, its card, and the model."""
    home, model = tmp_path_factory.mktemp("exported"), signed(BACKBONE, size=SIDE)
    run = home / "run"
    run.mkdir()
    (run / "model.fedsurrogate").write_bytes(save_signed_model(model))
    (run / "manifest.json").write_text('{"config": {}}')
    (run / "metrics.json").write_text("{}")
    file = home / "model.onnx"
    with pytest.MonkeyPatch.context() as patch:
        words = ("--format", "onnx", "--out", file)
        assert commands.coordinator(patch, "export", run, *words) == 0
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def graph(images: Array) -> Any:
        return session.run(None, {"images": images})[0]

    return graph, (home / "model.onnx.md").read_text(), model


def test_a_graph_answers_as_the_site_and_python_for_every_kind_of_file(
    exported: tuple[Any, str, SignedModel], tmp_path: Path
) -> None:
    graph, _, model = exported
    folder, table = tmp_path / "new", tmp_path / "p.csv"
    folder.mkdir()
    for kind in READ:
        (folder / kind.name).write_bytes(kind.content)
    predictor = Predictor(model.classifier, Calibration())
    backbone = load_backbone(BACKBONE, image_size=SIDE)
    predict(model, predictor, find_inputs(str(folder)), backbone, table)
    rows = {row["file"]: row for row in csv.DictReader(table.open())}
    assert rows.keys() == {kind.name for kind in READ}
    names, own = model.classifier.header.classes, ImageModel(model)
    wrong = []
    for kind in READ:
        assert kind.expected is not None
        wanted = answer(graph, kind.expected)
        of_site = np.array([float(rows[kind.name][f"p_{name}"]) for name in names])
        of_python = own.predict_proba([folder / kind.name])[0]
        if max(abs(wanted - of_site).max(), abs(wanted - of_python).max()) > ROUNDING:
            wrong.append(kind.name)
    assert wrong == []


def mistaken(kind: Kind) -> Array:
    """What Pillow's plain conversion makes of a file."""
    with Image.open(io.BytesIO(kind.content)) as opened:
        return np.asarray(opened.convert("RGB"))


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_the_card_names_what_a_plain_conversion_would_get_wrong(
    exported: tuple[Any, str, SignedModel], kind: Kind
) -> None:
    graph, card, _ = exported
    assert kind.expected is not None
    if np.array_equal(mistaken(kind), kind.expected):
        return
    away = abs(answer(graph, mistaken(kind)) - answer(graph, kind.expected)).max()
    # Turning and inverting decide; a low byte hardly does.
    assert away > ROUNDING or abs(mistaken(kind).astype(int) - kind.expected).max() <= 1
    reason = (
        "Exif orientation"
        if kind.name.startswith("turned") and "deep" not in kind.name
        else "white-is-zero"
        if "white" in kind.name
        else "floating point"
        if "float" in kind.name
        else "high byte"
    )
    assert reason in card
