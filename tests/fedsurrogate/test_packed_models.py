"""The model in Python, the one in a file, and the one that sites receive: equal to the bit where
that is promised, at 16 bits where that is.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import fedsurrogate as fs
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, predict
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.models.classifiers import (
    Classifier,
    Ensemble,
    Head,
    Quadratic,
    scores_alone,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import make_signed_model, save_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier

KEY = bytes(range(32))
SIDE = 6


@st.composite
def classifiers(draw: st.DrawFn) -> Classifier:
    """Classifiers of pixels, whose numbers need more than 16 bits."""
    classes, generator = (
        draw(st.integers(2, 4)),
        torch.Generator().manual_seed(draw(st.integers(0, 9999))),
    )
    name = load_backbone("pixels", image_size=SIDE).fingerprint_at(SIDE**2)
    header = Header("fedpft", "run", "coordinator", name, tuple(map(str, range(classes))))

    def head(clip: float | None = None) -> Head:
        weight = 4 * torch.randn(classes, SIDE**2, generator=generator)
        return Head(header, weight, torch.randn(classes, generator=generator), clip)

    whiteners = torch.rand(classes, SIDE**2, generator=generator) + 0.5
    means = torch.rand(classes, SIDE**2, generator=generator)
    bias = torch.randn(classes, generator=generator)
    kinds = [
        head(draw(st.sampled_from([None, 0.0]))),
        Ensemble((head(), head())),
        Quadratic(header, means, whiteners, bias),
    ]
    return draw(st.sampled_from(kinds))


@given(classifiers())
@settings(max_examples=25)
def test_a_saved_model_is_the_model_to_the_last_bit(classifier: Classifier) -> None:
    model, x = fs.Model(classifier), np.random.default_rng(0).random((8, SIDE**2))
    with tempfile.TemporaryDirectory() as home:
        loaded = fs.load(model.save(Path(home) / "model.safetensors"))
    assert isinstance(loaded, fs.Model)
    arrays = loaded.classifier.arrays()
    for name, tensor in classifier.arrays().items():
        assert torch.equal(arrays[name], tensor), name
    if not isinstance(classifier, Ensemble):
        assert (loaded.predict_proba(x) == model.predict_proba(x)).all()
    scores = scores_alone(classifier, torch.tensor(x, dtype=torch.float32))
    assert (model.predict_proba(x) == scores.softmax(1).float().numpy()).all()


def images(seed: int, folder: Path) -> list[Path]:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, SIDE, SIDE), dtype=np.uint8)
    files = [folder / f"{number}.png" for number in range(6)]
    for file, each in zip(files, pixels, strict=True):
        Image.fromarray(each).save(file)
    return files


@given(classifiers(), st.integers(0, 1000))
@settings(max_examples=12)
def test_python_and_the_command_give_a_signed_model_the_same_probabilities(
    classifier: Classifier, seed: int
) -> None:
    """Features at 16 bits in both, and weights as large as here show one that has more."""
    config = parse_run({"backbone": "pixels", "image-size": SIDE})
    made = make_signed_model(classifier, config, None, "1", 2, KEY)
    backbone = load_backbone("pixels", image_size=SIDE)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "new"
        folder.mkdir()
        files, file = images(seed, folder), Path(home) / "model.fedsurrogate"
        file.write_bytes(save_signed_model(made))
        loaded = fs.load(file)
        assert isinstance(loaded, fs.ImageModel)
        predictor, out = Predictor(made.classifier, Calibration()), Path(home) / "p.csv"
        predict(made, predictor, find_inputs(str(folder)), backbone, out)
        with out.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        found = [[float(row[f"p_{name}"]) for name in made.manifest.classes] for row in rows]
        assert np.abs(loaded.predict_proba(files) - found).max() < 5e-6
        pixels = torch.stack([torch.from_numpy(np.array(Image.open(each))) for each in files])
        at_16_bits = (pixels.flatten(1).float() / 255).half().float()
        assert (loaded.predict_proba(files) == loaded.predict_proba(at_16_bits)).all()
        sent = loaded.classifier.arrays()
        for name, tensor in unpack_classifier(pack_classifier(classifier)).arrays().items():
            assert torch.equal(sent[name], tensor), name
