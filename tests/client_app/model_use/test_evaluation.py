"""Evaluation at the site: metrics of held-out records only, by group, with a page; refusals say
what to do.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, recall_score

from fedsurrogate.client_app.model_use.calibration import (
    abstain_limit,
)
from fedsurrogate.client_app.model_use.store import read_index
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import parse_overrides
from tests.client_app.model_use.hospitals import (
    federation,
    rows_of_classes,
    site,
    text,
    write_images,
)
from tests.uses_of_extras import hidden

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


def test_an_evaluation_without_matplotlib_has_its_tables_and_says_why_it_has_no_curves(
    home: Path,
) -> None:
    with hidden("matplotlib"):
        _, out = evaluate(home)
    page = (out / "evaluation.html").read_text()
    assert "<svg" not in page
    assert page.count("matplotlib is not installed where this page was written") == 1
    assert "Confusion matrix" in page


def test_the_page_needs_no_network_and_no_script(home: Path) -> None:
    _, out = evaluate(home)
    page = (out / "evaluation.html").read_text()
    assert not re.search(r"(src|href)=[\"']?https?:|<script|@import", page)
    assert page.count("<svg") == 3
    assert "prefers-color-scheme: dark" in page
    assert "stays at this site" in page


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


def test_a_limit_for_a_share_is_stored_and_predictions_abstain_beyond_it(
    home: Path, tmp_path: Path
) -> None:
    found, out = evaluate(home, "--abstain", "0.1", "--score", "mahalanobis", "--store")
    assert found["report"]["records"] + found["calibrated_on"] == 280
    # Of 140 other records, a share of 0.1 is 14, with a standard deviation of 5, as the limit is an
    # estimate too.
    assert 0 < found["out_of_distribution"]["abstained"] < 36 / 140
    assert (
        "The model abstains where the mahalanobis score is above"
        in (out / "evaluation.html").read_text()
    )
    node = parse_node_config(parse_overrides([(home / "node.txt").read_text()]))
    file = node.state / "models" / f"{read_index(node).in_use}.calibration.json"
    stored = json.loads(file.read_text())
    try:
        assert (stored["score"], stored["abstain_above"]) == (
            "mahalanobis",
            found["calibration"]["abstain_above"],
        )
        words = (
            "--data-dir",
            str(home / "labelled"),
            "--node-config",
            (home / "node.txt").read_text(),
        )
        assert site("predict", *words, "--out", str(tmp_path / "p.csv")).code == 0
        rows = list(csv.DictReader((tmp_path / "p.csv").open()))
        # The score of one record is the limit, and the file has six digits of it.
        limit = stored["abstain_above"]
        clear = [row for row in rows if abs(float(row["mahalanobis"]) - limit) > 1e-4 * abs(limit)]
        assert all(
            (row["decision"] == "abstain") == (float(row["mahalanobis"]) > limit) for row in clear
        )
        assert len(clear) > 270
        assert any(row["decision"] == "abstain" for row in clear)
        done = site("predict", *words, "--out", str(tmp_path / "q.csv"), "--score", "relative")
        assert done.code == 1
        assert "the stored number of abstain-above is for 'mahalanobis'" in done.stderr
    finally:
        file.unlink()


def test_one_more_record_exceeds_the_limit_with_at_most_the_stated_probability() -> None:
    generator, beyond = torch.Generator().manual_seed(0), 0
    for _ in range(4000):
        scores = torch.randn(60, generator=generator)
        beyond += int(scores[-1] > abstain_limit(scores[:-1], 0.1))
    # The limit is the 54th of 59, so the probability is 0.1; four standard deviations are 0.019.
    assert beyond / 4000 == pytest.approx(0.1, abs=0.019)
    for share, what in ((0.0, "must be above 0"), (1.0, "below 1"), (0.01, "needs 99 records")):
        with pytest.raises(ConfigError, match=what):
            abstain_limit(torch.randn(60, generator=generator), share)


def test_a_private_run_without_a_test_split_has_no_held_out_records(home: Path) -> None:
    done = site(
        "evaluate", "--node-config", (home / "node.txt").read_text(), "--out", str(home / "none")
    )
    assert done.code == 1
    assert "no held-out records" in done.stderr
    assert "--data-dir" in done.stderr


def test_classes_that_the_model_does_not_know_are_refused(home: Path) -> None:
    write_images(home / "foreign", np.arange(60))
    node = (home / "node.txt").read_text()
    words = (
        "--node-config",
        node,
        "--data-dir",
        str(home / "foreign"),
        "--out",
        str(home / "none"),
    )
    done = site("evaluate", *words)
    assert done.code == 1
    assert re.search(
        r"records of classes that the model does not know: 0, 3, 4.*it knows 1, 2, 7", done.stderr
    )
    found, _ = evaluate(home, "--known-only", folder="foreign")
    assert found["left_out"] > 30
    assert any(each["few"] for each in found["report"]["per_class"]), "of few records"
    assert found["report"]["left_out"] == []
    assert found["report"]["averages"]["macro_auroc"]["value"] is not None
