"""Predictions for new images: right, streamed, continued without doing work twice, and refused
where they cannot be.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.special import softmax

from fedsurrogate.client_app.features.extraction import NOT_FINITE
from fedsurrogate.client_app.features.site_features import site_backbone
from fedsurrogate.client_app.model_use.calibration import ABSTAIN, Calibration, decided_answers
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, by_patient, predict
from fedsurrogate.client_app.model_use.store import open_model
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.errors import BackboneError, ConfigError, DataError
from fedsurrogate.common.models.classifiers import (
    Classifier,
    Ensemble,
    Head,
    scores_alone,
    target_of_model,
)
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.surrogates.surrogates import Header
from tests.client_app.model_use.hospitals import (
    CLASSES,
    federation,
    rows_of_classes,
    site,
    text,
    write_images,
)
from tests.client_app.model_use.test_decisions import head, records
from tests.dicom_files import image, save

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital after a run, and images that the run has not seen."""
    home = tmp_path_factory.mktemp("home")
    nodes, _ = federation(home)
    (home / "node.txt").write_text(text(nodes[0]))
    write_images(home / "new", rows_of_classes()[240:400], labelled=False)
    return home


def node_of(home: Path) -> NodeConfig:
    return parse_node_config(parse_overrides([(home / "node.txt").read_text()]))


def backbone_of(home: Path) -> Backbone:
    node = node_of(home)
    return site_backbone(open_model("in-use", node).manifest.run_config().settings, node)


@pytest.fixture
def node(home: Path) -> NodeConfig:
    return node_of(home)


@pytest.fixture
def model(node: NodeConfig) -> SignedModel:
    return open_model("in-use", node)


@pytest.fixture
def backbone(home: Path) -> Backbone:
    return backbone_of(home)


def rows(file: Path) -> Rows:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def predictor(model: SignedModel, **calibration: Any) -> Predictor:
    return Predictor(model.classifier, Calibration(**calibration), model.gaussians)


def test_an_interrupted_command_continues_and_does_no_work_twice(
    home: Path, model: SignedModel, backbone: Backbone, tmp_path: Path
) -> None:
    opened: list[str] = []

    class Counting:
        """Counts the images that are opened; stops at the hundredth."""

        stop = True

        def __init__(self, preprocess: Any) -> None:
            self.preprocess, self.resize = preprocess, preprocess.resize

        def __call__(self, picture: Image.Image) -> Any:
            opened.append("x")
            return self.preprocess(picture)

    calls = 0

    def forward(batch: Any) -> Any:
        nonlocal calls
        calls += len(batch)
        if calls > 100 and Counting.stop:
            raise KeyboardInterrupt
        return backbone.forward(batch)

    counted = replace(backbone, preprocess=Counting(backbone.preprocess), forward=forward)  # type: ignore[arg-type]
    inputs, out = find_inputs(str(home / "new")), tmp_path / "p.csv"
    with pytest.raises(KeyboardInterrupt):
        predict(model, predictor(model), inputs, counted, out)
    first = len(rows(out))
    assert 0 < first < len(inputs)
    with out.open("ab") as stream:
        stream.write(b"half a li")
    Counting.stop, before = False, len(opened)
    done = predict(model, predictor(model), inputs, counted, out)
    assert (done.earlier, done.written) == (first, len(inputs) - first)
    assert len(opened) - before == len(inputs) - first
    whole = tmp_path / "whole.csv"
    predict(model, predictor(model), inputs, backbone, whole)
    assert rows(out) == rows(whole)
    again = predict(model, predictor(model), inputs, backbone, out)
    assert (again.written, again.earlier) == (0, len(inputs))


def test_another_model_or_other_settings_do_not_continue_a_file(
    home: Path, model: SignedModel, backbone: Backbone, tmp_path: Path
) -> None:
    inputs, out = find_inputs(str(home / "new")), tmp_path / "p.csv"
    predict(model, predictor(model), inputs, backbone, out)
    with pytest.raises(ConfigError, match="was not begun with this model"):
        predict(model, predictor(model, temperature=2.0), inputs, backbone, out)
    shutil.copytree(home / "new", tmp_path / "other")
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="was not begun with this model, folder"):
        predict(model, predictor(model), find_inputs(str(tmp_path / "other")), backbone, out)
    assert out.read_bytes() == before
    out.write_text("other,columns\n")
    with pytest.raises(ConfigError, match="has other columns"):
        predict(model, predictor(model), inputs, backbone, out)
    foreign = tmp_path / "mine.csv"
    foreign.write_text("my own table\n")
    with pytest.raises(ConfigError, match="was not begun"):
        predict(model, predictor(model), inputs, backbone, foreign)
    assert foreign.read_text() == "my own table\n"


def test_a_backbone_of_another_fingerprint_is_refused(
    home: Path, model: SignedModel, tmp_path: Path
) -> None:
    inputs = find_inputs(str(home / "new"))
    with pytest.raises(
        BackboneError, match=r"the model is for a backbone with fingerprint .* image-size = 8"
    ):
        predict(
            model,
            predictor(model),
            inputs,
            load_backbone("pixels", image_size=9),
            tmp_path / "p.csv",
        )
    assert not (tmp_path / "p.csv").exists()


def test_a_broken_image_has_a_row_with_a_problem(
    home: Path, model: SignedModel, backbone: Backbone, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    shutil.copytree(home / "new", folder)
    (folder / "broken.png").write_bytes(b"no image")
    out = tmp_path / "p.csv"
    done = predict(model, predictor(model), find_inputs(str(folder)), backbone, out)
    assert done.unreadable == 1
    (row,) = (row for row in rows(out) if row["file"] == "broken.png")
    assert (row["problem"], row["decision"], row["p_1"]) == ("cannot be read", "", "")


@settings(max_examples=15, deadline=None)
@given(broken=st.dictionaries(st.integers(0, 19), st.sampled_from([math.nan, math.inf, -math.inf])))
def test_images_whose_features_are_not_numbers_have_a_row_with_a_problem(
    home: Path, broken: dict[int, float]
) -> None:
    node = node_of(home)
    model, backbone = open_model("in-use", node), backbone_of(home)
    inputs = find_inputs(str(home / "new"))
    few = replace(inputs, names=inputs.names[:20])
    opened = few.dataset(range(20)).open_image
    own = {
        number: backbone.forward(backbone.preprocess(opened(number))[None])[0] for number in broken
    }

    def forward(batch: torch.Tensor) -> torch.Tensor:
        features = backbone.forward(batch).clone()
        for row, number in itertools.product(range(len(batch)), broken):
            if torch.allclose(features[row], own[number]):
                features[row, number] = broken[number]
        return features

    with TemporaryDirectory() as folder:
        honest, out = Path(folder, "honest.csv"), Path(folder, "p.csv")
        predict(model, predictor(model), few, backbone, honest)
        predict(model, predictor(model), few, replace(backbone, forward=forward), out)
        for number, (row, wanted) in enumerate(zip(rows(out), rows(honest), strict=True)):
            if number in broken:
                assert (row["problem"], row["decision"], row["p_1"]) == (NOT_FINITE, "", "")
            else:
                assert row == wanted


@pytest.mark.parametrize("more", [-1, 1])
def test_features_of_another_dimension_are_refused(
    home: Path, model: SignedModel, backbone: Backbone, tmp_path: Path, more: int
) -> None:
    def forward(batch: torch.Tensor) -> torch.Tensor:
        features = backbone.forward(batch)
        return torch.nn.functional.pad(features, (0, more))

    other, inputs = replace(backbone, forward=forward), find_inputs(str(home / "new"))
    with pytest.raises(DataError, match=f"the images give {64 + more} features.* takes 64"):
        predict(model, predictor(model), inputs, other, tmp_path / "p.csv")


def test_dicom_rows_name_image_study_and_patient(
    node: NodeConfig, model: SignedModel, backbone: Backbone, tmp_path: Path
) -> None:
    generator, wanted = np.random.default_rng(0), []
    for number in range(6):
        dataset = image(
            generator.integers(0, 255, (8, 8), dtype=np.uint8), PatientID=f"P{number // 2}"
        )
        save(tmp_path / "studies" / f"d{number}" / "image", dataset)
        wanted.append(
            (str(dataset.SOPInstanceUID), str(dataset.StudyInstanceUID), f"P{number // 2}")
        )
    out, together = tmp_path / "p.csv", tmp_path / "patients.csv"
    ready = predictor(model)
    predict(model, ready, find_inputs(str(tmp_path / "studies")), backbone, out)
    found = rows(out)
    assert [
        (row["SOPInstanceUID"], row["StudyInstanceUID"], row["patient"]) for row in found
    ] == wanted
    assert by_patient(out, together, ready.calibration, CLASSES) == 3
    for row in rows(together):
        own = [float(each["p_7"]) for each in found if each["patient"] == row["patient"]]
        assert row["images"] == "2"
        assert float(row["p_7"]) == pytest.approx(np.mean(own), abs=1e-5)


def test_folders_without_images_and_outputs_among_the_data_are_refused(
    home: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "text.txt").write_text("x")
    node = (home / "node.txt").read_text()
    done = site(
        "predict", "--data-dir", str(empty), "--out", str(tmp_path / "p.csv"), "--node-config", node
    )
    assert done.code == 1
    assert "no DICOM image among" in done.stderr
    inside = ("--out", str(home / "new" / "p.csv"), "--node-config", node)
    done = site("predict", "--data-dir", str(home / "new"), *inside)
    assert "lies in --data-dir" in done.stderr
    done = site(
        "predict", "none", "--data-dir", str(empty), "--out", "p.csv", "--node-config", node
    )
    assert "keeps no model 'none'" in done.stderr


def test_scores_take_no_threads_from_the_extraction_of_features(
    home: Path,
    model: SignedModel,
    backbone: Backbone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads of scores next to two of features halved the rate on two cores."""
    seen, honest = [], Predictor.results

    def results(self: Predictor, features: torch.Tensor) -> list[list[str]]:
        seen.append(torch.get_num_threads())
        return honest(self, features)

    monkeypatch.setattr(Predictor, "results", results)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        predict(
            model, predictor(model), find_inputs(str(home / "new")), backbone, tmp_path / "p.csv"
        )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


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
