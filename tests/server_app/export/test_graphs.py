"""Graphs that `coordinator export` writes, in their own runtime: the product's probabilities on 200
photographs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    read_signed_model,
    save_signed_model,
)
from fedsurrogate.server_app.export.graph import graph_of
from tests import commands
from tests.client_app.model_use.hospitals import hospital
from tests.grid import FAST, InProcessGrid, run_federation
from tests.samples import Samples
from tests.server_app.export.test_export import WITH_ONNX, resized, signed

TRAIN, TEST = (f"data/pacs/photo-{part}.parquet" for part in ("train", "test"))
COUNT, TOGETHER = 200, 25
TRAINED = "torchvision:mobilenet_v2"
pytestmark = pytest.mark.slow


def timm_weights(home: Path) -> Path:
    """Random weights of a small residual network."""
    import timm

    return _saved(timm.create_model("resnet10t", num_classes=0), home)


@pytest.fixture(scope="module", autouse=True)
def _few_blocks() -> Iterator[None]:
    """The vision transformer with three blocks instead of twelve, and one of text: the same graph,
    a quarter of the time.
    """
    from open_clip.factory import _MODEL_CONFIGS

    whole = _MODEL_CONFIGS["ViT-B-32"]
    _MODEL_CONFIGS["ViT-B-32"] = whole | {
        "vision_cfg": whole["vision_cfg"] | {"layers": 3},
        "text_cfg": whole["text_cfg"] | {"layers": 1},
    }
    yield
    _MODEL_CONFIGS["ViT-B-32"] = whole


def clip_weights(home: Path) -> Path:
    """Random weights of a vision transformer."""
    import open_clip

    return _saved(open_clip.create_model("ViT-B-32").visual, home)


def _saved(module: Any, home: Path) -> Path:
    file = home / "weights.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in module.state_dict().items()}, file)
    return file


BACKBONES: dict[str, Callable[[Path], Path]] = {
    "timm:resnet10t": timm_weights,
    "open_clip:ViT-B-32/openai": clip_weights,
}


@dataclass(frozen=True, eq=False)
class Made:
    """A run with a backbone: its folder, weights and model, images as the card resizes them, and
    their probabilities.
    """

    run: Path
    weights: Path
    model: SignedModel
    images: Tensor
    wanted: Tensor


def photographs(
    file: Path, count: int, labels: Collection[int] = range(7)
) -> list[tuple[Image.Image, int]]:
    """The first photographs of these classes, with their labels."""
    import pyarrow.parquet as pq

    table = pq.read_table(file, columns=["image", "label"]).to_pylist()
    # The files are in the order of the classes.
    rows = [table[int(row)] for row in np.random.default_rng(0).permutation(len(table))]
    kept = [row for row in rows if row["label"] in labels][:count]
    return [
        (Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB"), row["label"]) for row in kept
    ]


@pytest.fixture(scope="module", params=[TRAINED, *BACKBONES])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, samples: Samples
) -> Made:
    torch.manual_seed(0)
    home, pictures = tmp_path_factory.mktemp("graphs"), photographs(samples(TEST), COUNT)
    if request.param == TRAINED:
        weights = samples("weights/mobilenet_v2-imagenet.safetensors")
        run = learned(home, request.param, weights, samples(TRAIN))
    else:
        weights = BACKBONES[request.param](home)
        run = drawn(home, request.param, weights)
    model = read_signed_model(run / "model.fedsurrogate")
    config, images = model.manifest.run_config(), [image for image, _ in pictures]
    settings = config.settings
    backbone = load_backbone(settings.backbone, str(weights), settings.image_size, "cpu")
    graph = graph_of(model, str(weights))
    with torch.no_grad():
        features = [
            backbone.forward(
                torch.stack([backbone.preprocess(image) for image in images[k : k + TOGETHER]])
            )
            for k in range(0, COUNT, TOGETHER)
        ]
        wanted = model.classifier.scores(raised(torch.cat(features), config.power)).softmax(1)
    return Made(
        run, weights, model, torch.stack([resized(image, graph) for image in images]), wanted
    )


def learned(home: Path, backbone: str, weights: Path, train: Path) -> Path:
    """A run of one hospital over other photographs of three classes."""
    for number, (image, label) in enumerate(photographs(train, 400, {0, 1, 2})[:120]):
        file = home / "images" / "abc"[label] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    node = hospital(home, "clinic", [], **{"weights-path": str(weights)}) | {
        "data-dir": str(home / "images")
    }
    return run_federation(
        home, InProcessGrid([node]), **FAST, classes="a,b,c", backbone=backbone, report=False
    )


def drawn(home: Path, backbone: str, weights: Path) -> Path:
    """The folder of a run with a random head."""
    (home / "model.fedsurrogate").write_bytes(save_signed_model(signed(backbone, str(weights))))
    for name in ("manifest.json", "metrics.json"):
        (home / name).write_text("{}")
    return home


def answers(file: Path) -> Callable[[Tensor], Any]:
    """The written graph in its own runtime, with nothing of this project."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy().round().astype(np.uint8)})[0]


@WITH_ONNX
def test_a_written_graph_gives_the_same_probabilities_on_200_photographs(
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    written = tmp_path / "made" / "model.graph"
    written.parent.mkdir()
    words = ("--format", "onnx", "--out", written, "--weights-path", made.weights)
    assert commands.coordinator(monkeypatch, "export", made.run, *words) == 0
    # A graph is one file, which a person can move.
    assert sorted(file.name for file in written.parent.iterdir()) == [
        "model.graph",
        "model.graph.md",
    ]
    moved = written.rename(tmp_path / "moved.onnx")
    run = answers(moved)
    with torch.no_grad():
        parts = [
            torch.as_tensor(run(made.images[k : k + TOGETHER])) for k in range(0, COUNT, TOGETHER)
        ]
    found = torch.cat(parts)
    apart = float((found - made.wanted).abs().max())
    spread = float(made.wanted.std(0).max())
    # For benchmarks/exported_graphs.py.
    record_property("graph", (str(made.model.manifest.settings["backbone"]), "onnx", apart, spread))
    assert apart <= 1e-4
    # The images are not all alike to the model, so that equal probabilities mean something.
    assert spread > 1e-4
    assert isinstance(made.model.classifier, Head)
