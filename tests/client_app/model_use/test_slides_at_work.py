"""Slides from a simulation, or a run of hospitals, to predictions and a judgement of new slides."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsurrogate.client_app.model_use.store import open_model, read_index, use_model
from fedsurrogate.client_app.node_config import parse_node_config
from tests.client_app.model_use.hospitals import site, text
from tests.commands import coordinator
from tests.grid import FAST, InProcessGrid, NodeConfig, events_of, metrics_of, run_federation
from tests.grid import run_folders as folders_of
from tests.slides import Slide, slides, write

POLICY = (
    "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
    "exact-runs-may-differ = true\n"
)
RUN = {"features.bag": "mean", "features.power-transform": 1.0, "classes": "benign,tumour"}


def hospitals(home: Path, tool: str) -> list[NodeConfig]:
    (home / "policy.toml").write_text(POLICY)
    nodes: list[NodeConfig] = []
    for at, name in enumerate(("north", "south", "east")):
        write(home / name, tool, slides(40, at, prefix=name))
        nodes.append(
            {
                "site": name,
                "data": "slides",
                "data-dir": str(home / name),
                "patient-column": "case",
                "policy": str(home / "policy.toml"),
                "state-dir": str(home / f"state-{name}"),
                "cache-dir": str(home / f"cache-{name}"),
            }
        )
    return nodes


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def check_predicted(found: list[dict[str, str]], new: list[Slide]) -> None:
    assert [row["bag"].partition(".A")[0] for row in found] == [each.name[:-2] for each in new]
    assert not any(row["problem"] for row in found)
    assert np.mean([a["decision"] == b.label for a, b in zip(found, new, strict=True)]) > 0.9


@pytest.mark.parametrize("tool", ["clam-pt", "clam", "trident"])
def test_hospitals_learn_predict_and_judge(tool: str, tmp_path: Path) -> None:
    nodes = hospitals(tmp_path, tool)
    folder = run_federation(tmp_path / "run", InProcessGrid(nodes), **FAST | RUN)
    assert metrics_of(folder)["sites"]["used"] == 3, events_of(folder)
    own = parse_node_config(nodes[0])
    (name,) = read_index(own).models
    use_model(own, name)
    node, new = text(nodes[0]), slides(20, 9, prefix="new")
    write(tmp_path / "new", tool, new)
    words = ("--data-dir", tmp_path / "new", "--node-config", node)
    done = site("predict", *words, "--patient-column", "case", "--out", tmp_path / "p.csv")
    assert done.code == 0, done.stderr
    found = rows(tmp_path / "p.csv")
    check_predicted(found, new)
    assert [row["patient"] for row in found] == [each.patient for each in new]
    signed = open_model("in-use", own).classifier
    means = np.stack([each.patches.mean(0) for each in new]).astype(np.float32)
    chances = signed.scores(torch.from_numpy(means)).softmax(1)[:, 1]
    np.testing.assert_allclose([float(row["p_tumour"]) for row in found], chances, atol=1e-5)
    done = site("evaluate", *words, "--out", tmp_path / "page")
    assert done.code == 0, done.stderr
    facts = json.loads((tmp_path / "page" / "evaluation.json").read_text())
    assert facts["report"]["records"] == 20
    assert facts["report"]["averages"]["accuracy"]["value"] > 0.9
    checked = site("doctor", "--node-config", node)
    assert "FAIL  data" not in checked.stdout
    assert "40 bags" in " ".join(checked.stdout.split())


def test_a_broken_slide_has_a_row_that_says_so(tmp_path: Path) -> None:
    nodes = hospitals(tmp_path, "trident")
    run_federation(tmp_path / "run", InProcessGrid(nodes), **FAST | RUN)
    own = parse_node_config(nodes[0])
    use_model(own, next(iter(read_index(own).models)))
    new = slides(6, 9, prefix="new")
    new[4].patches[:] = np.nan
    write(tmp_path / "new", "trident", new)
    files = sorted((tmp_path / "new" / "features_uni_v1").glob("*.h5"))
    files[0].write_bytes(b"broken")
    files[1].unlink()
    words = ("--data-dir", tmp_path / "new", "--node-config", text(nodes[0]))
    done = site("predict", *words, "--out", tmp_path / "p.csv")
    assert done.code == 0, done.stderr
    problems = [row["problem"] for row in rows(tmp_path / "p.csv")]
    assert [bool(each) for each in problems] == [True, True, False, False, True, False]
    # A bag of both slides of a patient has the patches that can be read.
    bags = ("--bag-column", "case", "--out", tmp_path / "q.csv")
    assert site("predict", *words, *bags).code == 0
    found = rows(tmp_path / "q.csv")
    n = len(new[4].patches)
    assert [row["problem"] for row in found[1:]] == ["", f"{n} patches are not in the mean"]
    # Files without a table are slides by themselves.
    shutil.move(tmp_path / "new" / "cases.csv", tmp_path / "cases.csv")
    assert site("predict", *words, "--out", tmp_path / "r.csv").code == 0
    assert [row["bag"] for row in rows(tmp_path / "r.csv")] == [
        file.relative_to(tmp_path / "new").as_posix() for file in files if file != files[1]
    ]


def test_slides_of_another_model_of_pathology_are_refused(tmp_path: Path) -> None:
    nodes = hospitals(tmp_path, "trident")
    run_federation(tmp_path / "run", InProcessGrid(nodes), **FAST | RUN)
    own = parse_node_config(nodes[0])
    use_model(own, next(iter(read_index(own).models)))
    write(tmp_path / "new", "trident", slides(4, 9), "conch_v1")
    words = ("--data-dir", tmp_path / "new", "--node-config", text(nodes[0]))
    for command, out in (("predict", tmp_path / "p.csv"), ("evaluate", tmp_path / "page")):
        done = site(command, *words, "--out", out)
        assert done.code == 1
        assert "conch_v1" in done.stderr


@pytest.mark.parametrize("tool", ["clam", "trident"])
def test_a_simulation_learns_from_slides_and_its_model_answers_new_ones(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data", tool, slides(80, 0))
    write(tmp_path / "new", tool, new := slides(20, 9, prefix="new"))
    settings = (
        f'data="slides" data-dir="{tmp_path}/data" features.bag="mean" features.power-transform=1.0 '
        f'patient-column="case" output-dir="{tmp_path}/out" head.min-steps=20 head.epochs=1'
    )
    words = ("simulate", "--engine", "local", "--sites", "3", "-c", settings)
    assert coordinator(monkeypatch, *words) == 0
    (folder,) = folders_of(tmp_path / "out")
    assert metrics_of(folder)["sites"]["used"] == 3
    done = site("predict", folder, "--data-dir", tmp_path / "new", "--out", tmp_path / "p.csv")
    assert done.code == 0, done.stderr
    check_predicted(rows(tmp_path / "p.csv"), new)
    done = site("evaluate", folder, "--out", tmp_path / "page")
    assert done.code == 0, done.stderr
