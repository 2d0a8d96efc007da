"""Three hospitals with pictures and a table of values, from the run to predictions at one of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from sklearn.datasets import load_digits

from fedsurrogate.client_app.model_use.store import read_index, use_model
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.common.targets.metrics import IN_WORDS, metric_text
from fedsurrogate.common.targets.registry import TARGETS
from tests.client_app.model_use.hospitals import hospital, site, text, write_images
from tests.grid import FAST, InProcessGrid, NodeConfig, events_of, metrics_of, run_federation

RUN: dict[str, Any] = {"backbone": "pixels", "image-size": 8, "deadline": 60.0}
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
SUM: dict[str, Any] = {"secure-aggregation": True, "dropouts": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "number": {"task": "regression", "value-columns": "ink", "target-range": "0.3,0.7"},
    "labels": {"task": "multilabel", "label-columns": "even,large"},
    "time": {
        "task": "survival",
        "time-column": "months",
        "event-column": "died",
        "time-unit": "months",
        "horizon": 12.0,
        "bins": 3,
    },
}
POLICY = (
    "without-dp = true\nsmallest-class = 1\nepsilon-per-run = 8.0\nepsilon-total = 80.0\n"
    "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
    "mechanisms = ['*']\n"
)
COLUMNS = "ink,even,large,months,died"


def above(image: Any) -> float:
    """Share of the ink in the upper half of a picture."""
    return float(image[:4].sum() / image.sum())


def write_table(folder: Path, rows: Any) -> None:
    """Values of each digit, of which every seventh is not annotated for one label."""
    digits, draw = load_digits(), np.random.default_rng(0)
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", *COLUMNS.split(",")])
        for row in rows:
            number = int(digits.target[row])
            months = draw.exponential(3.0 * (1 + (number < 5)))
            seen = draw.uniform(1, 15)
            table.writerow(
                [
                    f"{row:04}.png",
                    f"{above(digits.images[row]):.3f}",
                    "" if row % 7 == 0 else int(number % 2 == 0),
                    float(number > 4),
                    f"{min(months, seen):.3f}",
                    int(months <= seen),
                ]
            )


def hospitals(home: Path, count: int = 3, **more: Any) -> list[NodeConfig]:
    nodes = []
    for number in range(count):
        name, rows = f"clinic-{number}", range(number, 900, count)
        node = hospital(home, name, [], **{"target-columns": COLUMNS} | more)
        (home / "policy.toml").write_text(POLICY)
        folder = write_images(Path(str(node["data-dir"])), rows, labelled=False)
        write_table(folder, rows)
        nodes.append(node)
    return nodes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("number", PRIVATE | SUM, id="number both"),
        pytest.param("labels", PRIVATE | SUM, id="labels both"),
        pytest.param("time", PRIVATE, id="time noise"),
        pytest.param("labels", SUM, id="labels sum"),
        pytest.param("time", SUM, id="time sum"),
    ],
)
def test_a_hospital_predicts_with_what_the_run_has_learned(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    nodes = hospitals(tmp_path)
    settings = RUN | KINDS[kind] | more
    if kind == "labels" and "epsilon" not in more:
        settings["label-sets"] = "; ".join(f"{node['site']}=even,large" for node in nodes)
    folder = run_federation(tmp_path, InProcessGrid(nodes), **FAST | settings)
    metrics = metrics_of(folder)
    assert metrics["sites"]["used"] == 3, events_of(folder)
    if "epsilon" in more:
        assert metrics["privacy"]["epsilon"] == pytest.approx(8.0)
        # Rows of a code, such as cells of time and event, are no classes that are missing.
        assert metrics["privacy"]["dropped_classes"] == []
    (signed,) = folder.glob(f"*{SUFFIX}")
    facts = read_signed_model(signed).manifest
    with safe_open(folder / "model.safetensors", "pt") as content:
        assert content.metadata()["target"] == facts.form["target"]
    node = parse_node_config(nodes[0])
    (name,) = read_index(node).models
    use_model(node, name)
    unseen, out = (
        write_images(tmp_path / "unseen", range(1000, 1200), labelled=False),
        "answers.csv",
    )
    done = site(
        "predict", "--data-dir", unseen, "--out", tmp_path / out, "--node-config", text(nodes[0])
    )
    assert done.code == 0, done.stderr
    with (tmp_path / out).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    digits = load_digits()
    at = [int(Path(row["file"]).stem) for row in rows]
    if kind == "number":
        true = np.array([above(digits.images[row]) for row in at])
        answers = np.array([float(row["ink"]) for row in rows])
        within = np.mean(
            [
                float(row["ink low"]) <= t <= float(row["ink high"])
                for row, t in zip(rows, true, strict=True)
            ]
        )
        assert np.corrcoef(true, answers)[0, 1] > 0.6
        assert within > 0.8
    elif kind == "labels":
        chances = np.array([float(row["even"]) for row in rows])
        even = digits.target[at] % 2 == 0
        assert chances[even].mean() > chances[~even].mean() + 0.1
    else:
        risk = np.array([float(row["risk"]) for row in rows])
        assert risk[digits.target[at] > 4].mean() > risk[digits.target[at] < 5].mean()
        curve = np.array([[float(row[f"survival {t}"]) for t in (4, 8, 12)] for row in rows])
        assert (np.diff(curve) <= 0).all()
    # Few, because concordances of samples take the time of all pairs of records.
    unseen = write_images(tmp_path / "judged", range(1200, 1260), labelled=False)
    write_table(unseen, range(1200, 1260))
    page, node = tmp_path / "page", text(nodes[0])
    words = ("evaluate", "--data-dir", unseen, "--out", page, "--node-config", node)
    judged = site(*words)
    assert judged.code == 0, judged.stderr
    found = json.loads((page / "evaluation.json").read_text())
    assert (found["schema"], found["count"]) == (1, 60)
    score = TARGETS[KINDS[kind]["task"]].score
    for answer, own in found["metric_values"].items():
        assert any(each["value"] is not None for each in own.values())
        if score in own:
            line = next(each for each in judged.stdout.splitlines() if f" {answer} " in each)
            assert f" {IN_WORDS.get(score, score)} " in line
            assert f" {metric_text(score, own[score]['value'])} " in line
    assert "<svg" in (page / "evaluation.html").read_text()
    if kind == "labels":
        shown = json.loads(site(*words, "--json").stdout)
        assert (Path(shown.pop("page")).is_file(), shown.pop("stored")) == (True, None)
        assert shown == json.loads((page / "evaluation.json").read_text())
    own = site("adapt", "--data-dir", unseen, "--json", "--node-config", text(nodes[0]))
    assert own.code == 0, own.stderr
    adapted = json.loads(own.stdout)
    assert adapted["records"] == 60
    names = {each["name"] for each in adapted["judged"]}
    assert names == {"shared", "moved", "scaled", "corrected by a ridge", "own head"}


def test_a_run_learns_no_column_that_a_hospital_does_not_list(tmp_path: Path) -> None:
    nodes = hospitals(tmp_path, **{"target-columns": "ink,even"})
    with pytest.raises(RunError, match="cannot work with these settings"):
        run_federation(tmp_path, InProcessGrid(nodes), **FAST | RUN | KINDS["labels"])
