"""Predictions, part by part: cells by scipy, what became of each image, rows of a file in the order of
the images, and which model a person has named.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
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
from fedsurrogate.client_app.model_use.bag_batches import Batch
from fedsurrogate.client_app.model_use.calibration import ABSTAIN, Calibration
from fedsurrogate.client_app.model_use.inputs import Inputs, _frames_of
from fedsurrogate.client_app.model_use.label_answers import decided_answers
from fedsurrogate.client_app.model_use.opened import OpenedModel, opened
from fedsurrogate.client_app.model_use.prediction import Predictor, check_backbone, predict
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import BackboneError, ConfigError, DataError
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


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["a,1", '"x\ny",2', '"say ""so""",3', "é,4", ""]), max_size=5))
def test_a_file_ends_with_its_last_whole_row(rows: list[str]) -> None:
    content = "".join(f"{row}\n" for row in rows).encode()
    for size in range(len(content) + 1):
        ends, at = [0], 0
        for row in rows:
            at += len(row.encode()) + 1
            ends.append(at)
        whole = max(end for end in ends if end <= size)
        assert prediction._whole_rows(BytesIO(content[:size])) == whole


def test_parts_are_joined_and_what_is_not_finite_is_broken() -> None:
    inf = torch.tensor([[1.0, 2.0], [torch.inf, 0.0], [3.0, 4.0]], dtype=torch.float16)
    parts = [
        Part([0, 1, 2], None, [], inf),
        Part([], None, [(3, "OSError: no image"), (4, "DataError: several images")]),
        Part([5], None, [(6, "xDataError: x")], torch.tensor([[torch.nan, 1.0]])),
        Part([7], None, [], torch.tensor([[5.0, 6.0]])),
    ]
    found = prediction._joined(parts)
    assert found.rows == [0, 2, 7]
    assert found.features is not None
    assert found.features.dtype == torch.float32
    assert found.features.tolist() == [[1, 2], [3, 4], [5, 6]]
    unreadable = prediction.UNREADABLE
    assert found.broken == [
        (3, unreadable),
        (4, f"{unreadable}: several images"),
        (6, unreadable),
        (1, prediction.NOT_FINITE),
        (5, prediction.NOT_FINITE),
    ]
    nothing = prediction._joined(parts[1:2])
    assert (nothing.rows, nothing.features, len(nothing.broken)) == ([], None, 2)


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


class Run:
    """Predictions whose features come from a table: of each file its number, or none."""

    def __init__(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        self.model = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)
        self.predictor = Predictor(self.model.classifier, Calibration(positive="b"))
        self.home, self.out, self.width = home, home / "p.csv", 6
        self.asked: list[list[int]] = []
        patch.setattr(prediction, "check_backbone", lambda model, backbone: None)
        patch.setattr(prediction, "_batches", self.batches)

    def batches(self, inputs: Inputs, rows: Sequence[int], backbone: Any) -> Iterator[Batch]:
        self.asked.append(list(rows))
        # A batch holds two images, the later one first.
        for start in range(0, len(rows), 2):
            own = list(range(start, min(start + 2, len(rows))))[::-1]
            good = [at for at in own if "broken" not in inputs.names[rows[at]]]
            x = torch.stack([self.x(rows[at]) for at in good]) if good else None
            bad = [(at, "cannot be read") for at in own if at not in good]
            yield Batch(good, x, bad, {at: "a note" for at in good if rows[at] == 2})

    def x(self, row: int) -> torch.Tensor:
        return torch.arange(float(self.width)) - row

    def write(self, names: Sequence[str], bags: Sequence[str] | None = None, **more: Any) -> Any:
        patients = [f"p{at}" for at in range(len(names))] if bags is None else ["p"] * len(names)
        inputs = Inputs(self.home, False, names, {"patient": patients}, bags=bags)
        backbone: Any = None
        return predict(self.model, self.predictor, inputs, backbone, self.out, **more)

    def rows(self) -> list[dict[str, str]]:
        with self.out.open(newline="") as stream:
            return list(csv.DictReader(stream))


def test_rows_stand_in_the_order_of_a_batch_and_none_is_written_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path)
    names = ["0.png", "1.broken.png", "2.png", "3.png", "4.png"]
    with monkeypatch.context() as patch:
        clock = iter([10.0, 12.0])
        patch.setattr(prediction.time, "perf_counter", lambda: next(clock))
        found = run.write(names)
    assert (found.written, found.earlier, found.unreadable) == (5, 0, 1)
    assert found.rate == 2.5
    rows = run.rows()
    assert list(rows[0]) == ["file", "patient", "p_a", "p_b", "p_c", "decision", "problem"]
    assert [row["file"] for row in rows] == names
    assert [row["patient"] for row in rows] == [f"p{at}" for at in range(5)]
    assert [row["problem"] for row in rows] == ["", "cannot be read", "a note", "", ""]
    for at in (0, 2, 3, 4):
        (cells,) = run.predictor.results(run.x(at)[None])
        assert [rows[at][name] for name in ("p_a", "p_b", "p_c", "decision")] == cells
    assert [rows[1][name] for name in ("p_a", "p_b", "p_c", "decision")] == [""] * 4
    side = json.loads((tmp_path / "p.csv.json").read_text())
    assert (tmp_path / "p.csv.json").read_text() == json.dumps(side, indent=2) + "\n"
    assert side["model"] == run.model.manifest.name
    assert side["tensors"] == run.model.manifest.tensors
    assert side["folder"] == str(tmp_path.absolute())
    assert side["calibration"]["positive"] == "b"
    arrays = run.model.classifier.arrays().values()
    assert float(side["classifier"]) == pytest.approx(sum(float(each.sum()) for each in arrays))
    # A last row that was cut is written again, and new images are added.
    run.out.write_bytes(run.out.read_bytes()[:-3])
    again = run.write([*names, "5.png"])
    assert (again.written, again.earlier, again.unreadable) == (2, 4, 0)
    assert run.asked == [[0, 1, 2, 3, 4], [4, 5]]
    assert [row["file"] for row in run.rows()] == [*names, "5.png"]
    anew = run.write(names[:2], overwrite=True)
    assert (anew.written, anew.earlier, len(run.rows())) == (2, 0, 2)


def test_a_file_of_other_settings_or_columns_is_not_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path)
    run.write(["0.png"])
    header, side = run.out.read_bytes(), tmp_path / "p.csv.json"
    run.out.write_bytes(b"x" + header)
    with pytest.raises(ConfigError, match="has other columns than this command writes"):
        run.write(["0.png"])
    run.out.write_bytes(header)
    settings_ = side.read_text()
    for content in ("{}", "{", None):
        if content is None:
            side.unlink()
        else:
            side.write_text(content)
        with pytest.raises(ConfigError, match="exists and was not begun with this model, folder"):
            run.write(["0.png"])
    side.write_text(settings_)
    run.predictor = Predictor(run.model.classifier, Calibration(positive="c"))
    with pytest.raises(ConfigError, match="exists and was not begun with this model, folder"):
        run.write(["0.png"])
    run.predictor = Predictor(run.model.classifier, Calibration(positive="b"))
    run.width = 5
    with pytest.raises(DataError, match=r"^the images give 5 features, the model takes 6; they"):
        run.write(["0.png", "1.png"])


def test_a_bag_has_the_mean_of_its_images_and_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path)
    names = ["0.png", "1.png", "2.broken.png", "3.png", "4.broken.png"]
    found = run.write(names, bags=["x", "y", "x", "x", "z"])
    assert (found.written, found.unreadable) == (3, 1)
    rows = run.rows()
    assert list(rows[0])[:3] == ["bag", "images", "patient"]
    assert [(row["bag"], row["images"]) for row in rows] == [("x", "3"), ("y", "1"), ("z", "1")]
    (cells,) = run.predictor.results(((run.x(0) + run.x(3)) / 2)[None])
    assert [rows[0][name] for name in ("p_a", "p_b", "p_c", "decision")] == cells
    assert [row["problem"] for row in rows] == [
        "1 of 3 images are not in the mean",
        "",
        "cannot be read",
    ]
    # The images of a bag come one after the other.
    assert run.asked == [[0, 2, 3, 1, 4]]


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


@pytest.mark.parametrize(
    ("count", "frames", "several", "taken"),
    [
        (1, "refuse", False, [0]),
        (1, "middle", False, [0]),
        (7, "first", True, [0]),
        (7, "middle", True, [3]),
        (8, "middle", False, [4]),
        (7, "refuse", False, [-1]),
        (7, "all", False, [-1]),
        (7, "all", True, [0, 1, 2, 3, 4, 5, 6]),
        (0, "all", True, [-1]),
    ],
)
def test_frames_of_a_file_are_the_first_the_middle_or_all_or_none(
    count: int, frames: Any, several: bool, taken: list[int]
) -> None:
    assert list(_frames_of(count, frames, several)) == taken


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
