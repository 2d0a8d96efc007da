"""Runs in rounds of other targets than classes, with the defaults of the settings without noise, from
sites to the model at work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsurrogate as fs
from fedsurrogate.client_app.model_use.store import read_index, use_model
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.models.classifiers import target_of_model
from tests.client_app.model_use import test_targets_at_work as at_work
from tests.client_app.model_use.hospitals import site, text, write_images
from tests.grid import InProcessGrid, metrics_of, run_federation
from tests.strategies.targets.test_coded_runs import LABELS, NUMBER, PRIVATE, SUM, TIME, hospitals

KINDS = {"regression": NUMBER, "multilabel": LABELS, "survival": TIME}
# What a model that knows nothing reaches, and a part of what is possible.
LEAST = {"regression": 0.6, "multilabel": 0.7, "survival": 0.65}
# Cells of time and event with one record leave a site in sums only. Noise takes most of the time:
# a step for a fifth of the records, and half of the rounds.
WAYS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg in a sum": {"method": "fedavg"} | SUM,
    "noise at sites": {"method": "dp-fedavg", "fedavg__sample_rate": 0.2} | PRIVATE,
    "distributed noise": {"method": "dp-fedavg", "fedavg__rounds": 10} | SUM | PRIVATE,
}


def scored(kind: str, more: dict[str, Any], folder: Path) -> float:
    """The score of a run's model on all records, after what is in its folder was checked."""
    if kind == "multilabel" and "epsilon" not in more and "secure_aggregation" in more:
        more = more | {"label_sets": ";".join(f"{i}=label 1,label 2,label 3" for i in range(3))}
    sites = hospitals(kind, sizes=(400, 300, 200))
    result = fs.simulate(sites, output_dir=folder, **(KINDS[kind] | more))
    x, y = (np.concatenate([site[part] for site in sites]) for part in (0, 1))
    model = fs.load(result.folder)
    assert isinstance(model, fs.Model)
    facts = json.loads(target_of_model(model.classifier))
    assert facts["name"] == kind
    answers = model.answers(x)
    assert all(np.isfinite(column).all() for column in answers.values())
    assert result.metrics["metric_values"]["all"]
    return float(model.score(x, y))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *(("fedavg", kind) for kind in KINDS),
        ("fedavg in a sum", "multilabel"),
        ("noise at sites", "survival"),
        ("distributed noise", "regression"),
    ],
)
def test_a_run_learns(kind: str, way: str, tmp_path: Path) -> None:
    more = WAYS[way] | ({"bins": 1} if kind == "survival" and way == "fedavg" else {})
    assert scored(kind, more, tmp_path) > LEAST[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", at_work.KINDS)
def test_a_model_from_rounds_works_at_a_hospital(kind: str, tmp_path: Path) -> None:
    """Its predictions and its evaluation: a model from rounds knows no error of its numbers."""
    nodes = at_work.hospitals(tmp_path)
    settings = at_work.RUN | at_work.KINDS[kind] | {"method": "fedavg", "fedavg.rounds": 3}
    if kind == "survival":
        settings |= {"bins": 1}
    folder = run_federation(tmp_path, InProcessGrid(nodes), **settings)
    metric_values = metrics_of(folder)["metric_values"]
    assert set(metric_values["per_site"]) == {"clinic-0", "clinic-1", "clinic-2"}
    (name,) = read_index(parse_node_config(nodes[0])).models
    use_model(parse_node_config(nodes[0]), name)
    unseen = write_images(tmp_path / "judged", range(1200, 1260), labelled=False)
    at_work.write_table(unseen, range(1200, 1260))
    page, out = tmp_path / "page", tmp_path / "answers.csv"
    config = ("--node-config", text(nodes[0]))
    done = site("predict", "--data-dir", unseen, "--out", out, *config)
    assert done.code == 0, done.stderr
    heading = out.read_text().splitlines()[0]
    assert not any(word in heading for word in (" low", " high"))
    judged = site("evaluate", "--data-dir", unseen, "--out", page, *config)
    assert judged.code == 0, judged.stderr
    found = json.loads((page / "evaluation.json").read_text())
    for own in found["metric_values"].values():
        assert any(each["value"] is not None for each in own.values())
