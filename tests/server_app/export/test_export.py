"""Exports: the same probabilities as the classifier, and a card without secrets."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.power_transform import power_for, raised, with_power
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.errors import BackboneError, ConfigError, RunError
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from fedsurrogate.common.models.networks import fresh, parameters_of
from fedsurrogate.common.privacy.shares import STATED
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    make_signed_model,
    read_signed_model,
)
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.server_app.export import graph as graphs
from fedsurrogate.server_app.export.graph import (
    CHECKED,
    TOLERANCE,
    Graph,
    InferenceModel,
    check_onnx,
    graph_of,
    signed_model_of,
    write_graph,
)
from fedsurrogate.server_app.export.model_card import model_card
from tests import commands
from tests.client_app.model_use.hospitals import federation

KEY = bytes(range(32))
HAVE_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript"))
FRAME = Frame(torch.linspace(-1, 1, 64).double(), torch.linspace(1, 3, 64).double()).packed()
WITH_ONNX = pytest.mark.skipif(not HAVE_ONNX, reason="no onnx")


@pytest.fixture(scope="module")
def model() -> SignedModel:
    """A model on pixels of small images."""
    return signed("pixels", size=8)


def header(fingerprint: str, classes: int = 3) -> Header:
    return Header("fedpft", "run", "coordinator", fingerprint, tuple("abcdefgh"[:classes]))


def signed(backbone: str, weights: str = "", size: int = 0) -> SignedModel:
    """A model with a random head on a backbone."""
    config = parse_run({"backbone": backbone, "image-size": size})
    loaded = load_backbone(backbone, weights, size, "cpu")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, loaded.dim, generator=generator) * 2 / loaded.dim**0.5
    name = header(with_power(loaded.fingerprint, power_for(backbone)))
    return make_signed_model(Head(name, weight, torch.zeros(3), 0.0), config, None, "1", 3, KEY)


def probabilities(model: SignedModel, images: list[Image.Image], weights: str = "") -> Tensor:
    run = model.manifest.run_config()
    backbone = load_backbone(run.settings.backbone, weights, run.settings.image_size, "cpu")
    batch = torch.stack([backbone.preprocess(image) for image in images])
    return model.classifier.scores(raised(backbone.forward(batch), run.power)).softmax(1)


def resized(image: Image.Image, graph: Any) -> Tensor:
    """As the model card says, with the product's own crop box."""
    neutral = replace(graph.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    found: Tensor = neutral(image) * 255
    return found


def pictures(count: int, side: int = 40) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [
        Image.fromarray(generator.integers(0, 255, (side, side, 3), dtype=np.uint8))
        for _ in range(count)
    ]


@WITH_ONNX
def test_pixels_give_the_same_probabilities_in_a_graph(tmp_path: Path) -> None:
    model = signed("pixels:rgb", size=16)
    graph, images = graph_of(model), pictures(50)
    assert write_graph(graph, tmp_path / "graph") <= 1e-4
    found = graph.module(torch.stack([resized(image, graph) for image in images]))
    assert torch.allclose(found, probabilities(model, images), atol=1e-4)


@WITH_ONNX
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["more", "nan", "inf", "error"]),
    st.floats(-3, 1).map(lambda power: TOLERANCE * 10**power),
    st.integers(0, 3 * CHECKED - 1),
)
def test_a_graph_is_kept_where_every_answer_is_compared_and_within_the_tolerance(
    model: SignedModel, kind: str, more: float, cell: int
) -> None:
    """A runtime that gives one other answer, no number, or none."""

    def writer(graph: Graph, file: Path) -> Callable[[Tensor], Tensor]:
        file.touch()
        file.with_name(f"{file.name}.data").touch()

        def other(images: Tensor) -> Tensor:
            if kind == "error":
                raise RuntimeError("no memory")
            answers: Tensor = graph.module(images).clone()
            answers.view(-1)[cell] += more if kind == "more" else float(kind)
            return answers

        return other

    assume(abs(more / TOLERANCE - 1) > 0.01)
    with TemporaryDirectory() as folder, patch.object(graphs, "_onnx", writer):
        file = Path(folder) / "graph"
        if kind == "more" and more < TOLERANCE:
            assert write_graph(graph_of(model), file) <= TOLERANCE
            assert file.exists()
            return
        with pytest.raises(RuntimeError if kind == "error" else RunError):
            write_graph(graph_of(model), file)
        assert not list(file.parent.iterdir())


@WITH_ONNX
@settings(max_examples=3, deadline=None)
@given(st.lists(st.sampled_from([-1.0, -1e-8, 1e-8, 1.0]), min_size=3, max_size=3))
def test_weights_at_the_end_of_the_numbers_give_probabilities_or_no_graph(
    model: SignedModel, signs: list[float]
) -> None:
    assert isinstance(model.classifier, Head)
    weight = 3e38 * torch.tensor(signs)[:, None].expand_as(model.classifier.weight)
    config = model.manifest.run_config()
    hostile = make_signed_model(replace(model.classifier, weight=weight), config, None, "1", 3, KEY)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "graph"
        try:
            write_graph(graph_of(hostile), file)
        except RunError:
            assert not file.exists()
        else:
            session = importlib.import_module("onnxruntime").InferenceSession(str(file))
            images = torch.randint(256, (9, 3, 8, 8), dtype=torch.uint8).numpy()
            assert np.allclose(session.run(None, {"images": images})[0].sum(1), np.ones(9))


def every_classifier() -> list[Classifier]:
    generator = torch.Generator().manual_seed(0)
    heads = tuple(
        Head(header("f"), torch.randn(3, 64, generator=generator), torch.randn(3)) for _ in range(3)
    )
    mlp = parameters_of(fresh("mlp", 64, 3, 8, 1))
    convnet = parameters_of(fresh("convnet", 64, 3, 8, 1))
    whiteners = torch.randn(3, 64, 64, generator=generator) / 8
    return [
        heads[0],
        Head(header("f"), heads[0].weight, heads[0].bias, 1.0, torch.ones(64)),
        *(
            Head(header("f"), heads[0].weight, heads[0].bias, 0.0, mean_over_columns=each)
            for each in STATED.values()
        ),
        Head(
            header("f"),
            heads[0].weight[:, :8],
            heads[0].bias,
            1.0,
            torch.ones(64),
            torch.randn(8, 64),
        ),
        Ensemble(heads),
        Ensemble(heads, highest=True),
        Head(replace(header("f"), frame=FRAME), heads[0].weight, heads[0].bias),
        Quadratic(header("f"), torch.randn(3, 64), torch.rand(3, 64), torch.zeros(3)),
        Quadratic(header("f"), torch.randn(3, 64), whiteners, torch.zeros(3)),
        Network(header("f"), "mlp", 64, mlp),
        Network(header("f"), "convnet", 64, convnet),
    ]


@WITH_ONNX
@pytest.mark.parametrize("classifier", every_classifier(), ids=lambda each: type(each).__name__)
def test_every_classifier_answers_in_a_graph_as_it_does(
    classifier: Classifier, tmp_path: Path
) -> None:
    own, size = Preprocessing(8, 8), torch.Generator().manual_seed(1)
    module = InferenceModel(graphs._Pixels(True), own, classifier, 1.0).eval()
    images = torch.randint(256, (20, 3, 8, 8), generator=size, dtype=torch.uint8)
    assert write_graph(Graph(module, own, images[:2]), tmp_path / "graph") <= TOLERANCE
    features = module.backbone((images / 255 - module.mean) / module.std)
    wanted = classifier.scores(features).softmax(1)
    torch.testing.assert_close(module(images), wanted, rtol=0, atol=1e-4)


def test_a_graph_with_other_weights_is_refused() -> None:
    model = signed("pixels", size=8)
    other = model.manifest.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(BackboneError, match="the model is for a backbone with fingerprint 0000"):
        graph_of(SignedModel(model.classifier, other, None, model.signature, model.key))
    settings = {**model.manifest.settings, "image-size": 0}
    changes = {
        "settings": settings,
        "fingerprint": load_backbone("pixels", "", 0, "cpu").fingerprint_at(
            model.manifest.dimension
        ),
    }
    any_size = replace(model, manifest=model.manifest.model_copy(update=changes))
    with pytest.raises(ConfigError, match="images of one size"):
        graph_of(any_size)


@pytest.mark.skipif(HAVE_ONNX, reason="onnx is installed")
def test_without_onnx_the_command_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'fedsurrogate\[onnx\]'"):
        check_onnx()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federation(tmp_path_factory.mktemp("run"))[1]


def export(monkeypatch: pytest.MonkeyPatch, run: Path, kind: str, out: Path) -> int:
    return commands.coordinator(monkeypatch, "export", run, "--format", kind, "--out", out)


def test_the_command_writes_file_card_and_graph(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (
        ("fedsurrogate", "m.fedsurrogate"),
        ("card", "README.md"),
        *([("onnx", "m.onnx")] if HAVE_ONNX else []),
    ):
        assert export(monkeypatch, run, kind, tmp_path / name) == 0
    assert (
        read_signed_model(tmp_path / "m.fedsurrogate").manifest
        == read_signed_model(run / "model.fedsurrogate").manifest
    )
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    for words in ("1, 2, 7", "(8, 1e-05) differential privacy", "2 sites", "no medical device"):
        assert words in card
    assert "clinic" not in card
    if HAVE_ONNX:
        assert "(n, 3, 8, 8)" in (tmp_path / "m.onnx.md").read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 1.0, "fedpft.covariance": "spherical"},
        {"epsilon": 0.5},
        {"epsilon": 8.0, "fedpft.covariance": "diag"},
    ],
    ids=str,
)
def test_the_model_of_a_private_run_has_the_same_gaussians_signed_at_its_end_or_later(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    _, folder = federation(tmp_path, decided=False, **settings)
    at_the_end = folder / "model.fedsurrogate"
    first = read_signed_model(at_the_end)
    at_the_end.unlink()
    later = signed_model_of(folder)
    assert first.gaussians is not None
    assert later.gaussians is not None
    points = torch.randn(20, first.classifier.dimension)
    for one, other in zip(
        first.gaussians.scores(points), later.gaussians.scores(points), strict=True
    ):
        torch.testing.assert_close(one, other)
    shutil.rmtree(folder / "surrogates")
    assert signed_model_of(folder).gaussians is None, "nothing is left to draw from"


def test_a_run_that_is_not_signed_is_signed_at_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = tmp_path / "runs" / "unsigned"
    unsigned.mkdir(parents=True)
    for name in ("manifest.json", "metrics.json", "model.safetensors"):
        (unsigned / name).write_bytes((run / name).read_bytes())
    assert export(monkeypatch, unsigned, "fedsurrogate", tmp_path / "m.fedsurrogate") == 0
    made = read_signed_model(tmp_path / "m.fedsurrogate")
    assert made.gaussians is None
    assert made.key.hex() == (tmp_path / "runs" / "signing" / "coordinator.pub").read_text().strip()


@pytest.mark.parametrize(
    ("known", "words"), [("exact", "- No site"), ("noisy", "- Perhaps no site")]
)
def test_a_model_card_names_classes_that_were_not_learned(
    known: str, words: str, tmp_path: Path
) -> None:
    model = signed("pixels", size=8)
    missing = f"{words} had a training record of "
    for names, line in (([], ""), (["b", "|c|"], f"{missing}b, \\|c\\|.")):
        card = {"without_records": names, "records_by_class": known}
        (tmp_path / "metrics.json").write_text(json.dumps({"card": card}))
        text = model_card(model, tmp_path)
        assert [each for each in text.splitlines() if "training record of" in each] == [
            line
        ] * bool(line)
