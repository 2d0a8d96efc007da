"""Hospitals whose images are in bags, from the survey and the run to predictions: a row for each bag,
which says what the model says of the mean of its images.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import fedsurrogate as fs
from fedsurrogate.client_app.model_use.inputs import Batch, find_inputs, pooled
from fedsurrogate.client_app.model_use.store import open_model, read_index, use_model
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.export.graph import graph_of
from tests import dicom_files
from tests.client_app.model_use.hospitals import CLASSES, hospital, site, text
from tests.grid import FAST, InProcessGrid, NodeConfig, events_of, metrics_of, run_federation

POWER = 0.5
RUN: dict[str, Any] = {
    "backbone": "pixels",
    "image-size": 8,
    "features.bag": "mean",
    "features.power-transform": POWER,
}
POLICY = (
    "without-dp = true\nsmallest-class = 1\nepsilon-per-run = 8.0\nepsilon-total = 80.0\n"
    "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
    "mechanisms = ['*']\n"
)


def write_bags(folder: Path, seed: int, count: int) -> list[tuple[str, list[int]]]:
    """Bags of two to four digits of one class, in a table; each has a patient."""
    digits, draw = load_digits(), np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines, bags = ["path,label,who,part"], []
    for bag in range(count):
        label = CLASSES[bag % len(CLASSES)]
        own = draw.choice(np.flatnonzero(digits.target == int(label)), draw.integers(2, 5))
        bags.append((f"bag {bag}", own.tolist()))
        for at, row in enumerate(own):
            name = f"{bag:03}-{at}.png"
            Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).save(folder / name)
            lines.append(f"{name},{label},patient {bag // 2},bag {bag}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return bags


def hospitals(home: Path) -> list[NodeConfig]:
    home.mkdir(exist_ok=True)
    nodes = []
    for number in range(3):
        node = hospital(home, f"clinic-{number}", [], **{"bag-column": "part"})
        write_bags(Path(str(node["data-dir"])), number, 60)
        nodes.append(node)
    (home / "policy.toml").write_text(POLICY)
    return nodes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital with a model of bags."""
    home = tmp_path_factory.mktemp("bags")
    nodes = hospitals(home)
    folder = run_federation(
        home, InProcessGrid(nodes), **FAST | RUN | {"classes": ",".join(CLASSES)}
    )
    assert metrics_of(folder)["sites"]["used"] == 3, events_of(folder)
    node = parse_node_config(nodes[0])
    (name,) = read_index(node).models
    use_model(node, name)
    (home / "node.txt").write_text(text(nodes[0]))
    return home


def node_of(home: Path) -> str:
    return (home / "node.txt").read_text()


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_row_for_each_bag_says_what_the_model_says_of_the_mean(
    home: Path, tmp_path: Path
) -> None:
    unseen, out = tmp_path / "unseen", tmp_path / "p.csv"
    bags = write_bags(unseen, 9, 30)
    (unseen / "003-0.png").write_bytes(b"broken")
    for file in unseen.glob("004-*.png"):
        file.write_bytes(b"broken")
    words = ("predict", "--data-dir", unseen, "--out", out, "--node-config", node_of(home))
    done = site(*words, "--patient-column", "who")
    assert done.code == 0, done.stderr
    assert "30 bags of images" in done.stdout
    assert "1 bags of images cannot be read" in done.stdout
    found = rows(out)
    assert [row["bag"] for row in found] == [name for name, _ in bags]
    assert [row["images"] for row in found] == [str(len(own)) for _, own in bags]
    assert [row["patient"] for row in found] == [f"patient {at // 2}" for at in range(30)]
    problems = [row["problem"] for row in found]
    assert problems[3] == f"1 of {len(bags[3][1])} images are not in the mean"
    assert problems[4].startswith("cannot be read")
    assert not any(problems[:3] + problems[5:])
    signed = open_model("in-use", parse_node_config(_parsed(node_of(home))))
    digits = load_digits()
    means = []
    for at, (_, own) in enumerate(bags):
        kept = own[1:] if at == 3 else own
        pixels = (digits.images[kept] * 15.9).astype(np.uint8).reshape(len(kept), -1) / 255
        means.append((pixels**POWER).mean(0))
    scores = signed.classifier.scores(torch.tensor(np.array(means)).float())
    wanted = [CLASSES[at] for at in scores.argmax(1).tolist()]
    chances = [[float(row[f"p_{name}"]) for name in CLASSES] for row in found[:4] + found[5:]]
    of_means = np.delete(scores.double().log_softmax(1).numpy(), 4, axis=0)
    floor = 1e-30  # Smaller ones are zero in single precision.
    assert np.log(np.maximum(chances, floor)) == pytest.approx(
        np.maximum(of_means, np.log(floor)), abs=0.02
    )
    assert [row["decision"] for row in found[:4] + found[5:]] == wanted[:4] + wanted[5:]
    right = np.mean([row["decision"] == CLASSES[at % 3] for at, row in enumerate(found) if at != 4])
    assert right > 0.8
    again = site(*words, "--patient-column", "who")
    assert "0 bags of images" in again.stdout
    assert "30 were there already" in again.stdout


def _parsed(node: str) -> dict[str, Any]:
    return dict(parse_overrides([node]))


def test_without_a_column_each_image_is_a_bag_and_the_command_says_so(
    home: Path, tmp_path: Path
) -> None:
    unseen, out = tmp_path / "unseen", tmp_path / "p.csv"
    write_bags(unseen, 9, 3)
    (unseen / "table.csv").unlink()
    node = node_of(home).replace('bag-column="part"', 'bag-column=""')
    done = site("predict", "--data-dir", unseen, "--out", out, "--node-config", node)
    assert done.code == 0, done.stderr
    assert "each image is one of its own" in done.stdout
    assert len(rows(out)) == len(list(unseen.glob("*.png")))


def test_an_evaluation_judges_bags(home: Path, tmp_path: Path) -> None:
    for words, count in (((), 0), (("--data-dir", tmp_path / "new"), 24)):
        write_bags(tmp_path / "new", 11, 24)
        page = tmp_path / "page"
        done = site("evaluate", *words, "--out", page, "--node-config", node_of(home))
        assert done.code == 0, done.stderr
        facts = json.loads((page / "evaluation.json").read_text())
        assert facts["records"].endswith("each a bag of images")
        assert facts["report"]["records"] == (count or facts["report"]["records"])
        assert facts["report"]["averages"]["accuracy"]["value"] > 0.8


def test_a_doctor_and_a_survey_count_bags(home: Path) -> None:
    settings = 'features.bag="mean" image-size=8 classes="1,2,7"'
    done = site("doctor", "--node-config", node_of(home), "--run-config", settings)
    assert "images in 60 bags, of 2 to 4 each" in " ".join((done.stdout + done.stderr).split())
    nodes = hospitals(home / "survey")
    folder = run_federation(
        home / "survey",
        InProcessGrid(nodes),
        **FAST | RUN | {"classes": ",".join(CLASSES), "counting.kind": "survey"},
    )
    counted = metrics_of(folder)["card"]["records"]
    assert counted == {f"clinic-{number}": 60 for number in range(3)}


@pytest.mark.parametrize(("column", "frames", "bags"), [("study", "first", 2), ("", "all", 3)])
def test_dicom_files_are_in_bags_by_their_headers_or_each_with_its_images(
    column: str, frames: Any, bags: int, tmp_path: Path
) -> None:
    for at, study in enumerate((1, 1, 2)):
        volume = np.full((3, 4, 4), 20 * (at + 1), np.uint8)
        image = dicom_files.image(volume, PatientID="1", StudyInstanceUID=f"1.2.{study}")
        dicom_files.save(tmp_path / f"{at}.dcm", image)
    inputs = find_inputs(str(tmp_path), frames=frames, bag_column=column)
    units, members = inputs.in_bags()
    assert len(units) == len(members) == bags
    assert sum(map(len, members)) == (3 if frames == "first" else 9)
    assert units.columns["images"] == [str(len(own)) for own in members]


def test_a_bag_leaves_as_soon_as_its_images_have_come_and_one_sum_is_kept() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    batches = [
        Batch([0, 1], x[:2], []),
        Batch([3], x[3:4], [(2, "torn")]),
        Batch([4, 5], x[4:], []),
    ]
    bags = [[0], [0, 0, 0], [0, 0]]
    found = list(pooled(iter(batches), bags, 1.0))
    assert [batch.rows for batch in found] == [[0], [1], [2]]
    assert found[1].notes == {1: "1 of 3 images are not in the mean"}
    means = torch.cat([batch.features for batch in found if batch.features is not None])
    torch.testing.assert_close(means, torch.stack([x[0], x[[1, 3]].mean(0), x[4:].mean(0)]))


def test_what_answers_single_images_refuses_a_model_of_bags(home: Path) -> None:
    signed = open_model("in-use", parse_node_config(_parsed(node_of(home))))
    with pytest.raises(ConfigError, match="a graph answers single images"):
        graph_of(signed)
    (file,) = home.glob("clinic-0-state/models/*.fedsurrogate")
    loaded = fs.load(file)
    assert isinstance(loaded, fs.Model)
    with pytest.raises(ConfigError, match="learned from bags"):
        loaded.predict([Image.new("L", (8, 8))])
    assert loaded.predict(np.zeros((2, 64))).shape == (2,)
