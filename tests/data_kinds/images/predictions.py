"""The rows of `site predict` for a folder."""

from __future__ import annotations

import csv
from pathlib import Path

from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, predict
from fedsurrogate.client_app.node_config import Frames
from fedsurrogate.common.backbones.backbones import load_backbone
from tests.attacks.sites.test_hostile_names import model_of


def predicted(folder: Path, out: Path, frames: Frames = "refuse") -> list[dict[str, str]]:
    """The rows of `site predict`."""
    signed = model_of(["a", "b", "c"])
    inputs = find_inputs(str(folder), "auto", "", frames)
    predictor = Predictor(signed.classifier, Calibration())
    predict(signed, predictor, inputs, load_backbone("pixels", image_size=8), out)
    with out.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
