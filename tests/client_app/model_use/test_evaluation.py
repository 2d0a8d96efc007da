"""Evaluation at the site: metrics of held-out records only, by group, with a page; refusals say
what to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, recall_score

from fedsurrogate.client_app.model_use.store import read_index
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.settings.base import parse_overrides
from tests.client_app.model_use.hospitals import (
    federation,
    rows_of_classes,
    site,
    text,
    write_images,
)

Json = dict[str, Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital after a private run, and labelled images that the run has not seen, with a table."""
    home = tmp_path_factory.mktemp("home")
    nodes, _ = federation(home)
    (home / "node.txt").write_text(text(nodes[0]))
    rows, digits = rows_of_classes()[240:520], load_digits()
    folder = write_images(home / "labelled", rows, labelled=False)
    lines = ["path,label,patient,scanner,age"]
    for number, row in enumerate(rows):
        lines.append(
            f"{row:04}.png,{digits.target[row]},p{number // 3},{'ABC'[min(2, number % 40)]},{20 + number % 60}"
        )
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return home


def evaluate(home: Path, *words: str, folder: str = "labelled") -> tuple[Json, Path]:
    out = home / f"evaluation-{len(list(home.iterdir()))}"
    node, where = (
        (home / "node.txt").read_text(),
        ("--data-dir", str(home / folder)) if folder else (),
    )
    done = site("evaluate", "--node-config", node, *where, "--out", str(out), "--json", *words)
    assert done.code == 0, done
    return json.loads(done.stdout), out


def test_measures_are_those_of_the_predictions(home: Path, tmp_path: Path) -> None:
    found, _ = evaluate(home, "--patient-column", "patient")
    out = tmp_path / "p.csv"
    site(
        "predict",
        "--data-dir",
        str(home / "labelled"),
        "--out",
        str(out),
        "--node-config",
        (home / "node.txt").read_text(),
    )
    lines = [line.split(",") for line in out.read_text().splitlines()]
    digits, column = load_digits(), lines[0].index("decision")
    truth = [str(digits.target[int(line[0][:4])]) for line in lines[1:]]
    decided = [line[column] for line in lines[1:]]
    averages = found["report"]["averages"]
    assert averages["accuracy"]["value"] == pytest.approx(accuracy_score(truth, decided))
    assert averages["balanced_accuracy"]["value"] == pytest.approx(
        recall_score(truth, decided, average="macro")
    )
    assert (
        averages["accuracy"]["low"] < averages["accuracy"]["value"] < averages["accuracy"]["high"]
    )
    assert (found["report"]["records"], found["report"]["units"]) == (280, 94)


@pytest.mark.slow
def test_a_wished_sensitivity_is_reached_on_other_records_and_stored(
    home: Path, tmp_path: Path
) -> None:
    wish = ("--positive", "7", "--sensitivity", "0.9", "--temperature", "--store")
    found, _ = evaluate(home, *wish, "--patient-column", "patient")
    assert found["report"]["records"] + found["calibrated_on"] == 280
    (row,) = (each for each in found["report"]["per_class"] if each["name"] == "7")
    assert row["metric_values"]["sensitivity"]["value"] > 0.75
    node = parse_node_config(parse_overrides([(home / "node.txt").read_text()]))
    stored = json.loads(
        (node.state / "models" / f"{read_index(node).in_use}.calibration.json").read_text()
    )
    assert stored["threshold"] == found["calibration"]["threshold"]
    assert stored["temperature"] != 1.0
    again, _ = evaluate(home)
    assert again["calibration"]["threshold"] == stored["threshold"]
