"""Runs of every target on the real path: site, message or secure aggregation, checks, coordinator, model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsurrogate as fs
from fedsurrogate.common.signed_models.signed_model import make_signed_model, settings_of_run
from fedsurrogate.server_app.export.model_card import model_card
from fedsurrogate.server_app.refit import refit

NUMBER: dict[str, Any] = {"task": "regression", "target_range": (-4, 4)}
LABELS: dict[str, Any] = {"task": "multilabel"}
TIME: dict[str, Any] = {"task": "survival", "horizon": 3.0, "bins": 4}
SUM: dict[str, Any] = {"secure_aggregation": True, "colluding": 0.0, "dropouts": 0.0}
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
Site = tuple[Any, Any]


def hospitals(kind: str, sizes: tuple[int, ...] = (90, 60, 30), seed: int = 0) -> list[Site]:
    """Records whose targets follow from their features."""
    draw = np.random.default_rng(seed)
    sites = []
    for size in sizes:
        x = draw.normal(size=(size, 4)) * [1, 2, 0.5, 1] + [1, 0, 3, -2]
        signal = x[:, 0] - 0.5 * x[:, 1]
        if kind == "regression":
            sites.append((x, signal + 0.3 * draw.normal(size=size)))
        elif kind == "multilabel":
            there = (signal[:, None] + draw.normal(size=(size, 3)) > [0.5, 1.0, 1.5]).astype(float)
            there[draw.random((size, 3)) < 0.2] = np.nan
            sites.append((x, there))
        else:
            time = draw.exponential(np.exp(-(signal - 1)))
            seen = draw.uniform(0.5, 4, size)
            sites.append((x, np.stack([np.minimum(time, seen), time <= seen], 1)))
    return sites


@pytest.mark.parametrize("kind", [NUMBER, LABELS, TIME], ids=lambda kind: str(kind["task"]))
@pytest.mark.parametrize("more", [{}, SUM, PRIVATE, SUM | PRIVATE], ids=["", "sum", "dp", "both"])
def test_a_run_learns_and_measures_every_target(
    kind: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    if kind is TIME and not more:
        more = {"bins": 1}
    if kind is LABELS and more is SUM:
        more = SUM | {"label_sets": ";".join(f"{i}=label 1,label 2,label 3" for i in range(3))}
    sites = hospitals(str(kind["task"]), sizes=(400, 300, 200))
    result = fs.simulate(sites, output_dir=tmp_path, **(kind | more))
    metric_values = result.metric_values
    x, y = (np.concatenate([site[part] for site in sites]) for part in (0, 1))
    model = fs.load(result.folder)
    assert isinstance(model, fs.Model)
    score = model.score(x, y)
    least = {"regression": 0.3, "multilabel": 0.6, "survival": 0.55}[str(kind["task"])]
    assert score > least, (score, metric_values)
    score_of = {"regression": "r2", "multilabel": "auroc", "survival": "concordance"}
    scores = [own[score_of[str(kind["task"])]] for own in metric_values.values()]
    assert f" {np.mean(scores):.4f}, " in repr(result)
    assert all(own["records"] > 100 for own in metric_values.values())
    answers = model.answers(x)
    assert all(len(column) == len(x) for column in answers.values())
    assert json.loads((result.folder / "manifest.json").read_text())["config"]["task"]


@pytest.mark.parametrize("kind", [NUMBER, LABELS], ids=["regression", "multilabel"])
def test_a_run_is_learned_again_without_a_site_that_leaves(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    """As if the site had never been there; and with all sites the run's own model comes out."""
    sites = hospitals(str(kind["task"]), sizes=(200, 150, 120))
    run = fs.simulate(sites, output_dir=tmp_path, **kind)
    _, same = refit(run.folder, without=[])
    assert torch.equal(same.arrays()["weight"], run.model.classifier.arrays()["weight"])
    _, left = refit(run.folder, without=["0"])
    (run.folder / "surrogates" / "0.pb").unlink()
    _, never = refit(run.folder, without=[])
    assert torch.equal(left.arrays()["weight"], never.arrays()["weight"])
    assert not torch.equal(left.arrays()["weight"], same.arrays()["weight"])


@pytest.mark.parametrize("more", [{}, PRIVATE], ids=["exact", "noise"])
def test_the_documents_of_a_run_can_be_written(more: dict[str, Any], tmp_path: Path) -> None:
    """Report and model card speak of classes elsewhere."""
    run = fs.simulate(hospitals("regression", (300, 200)), output_dir=tmp_path, **NUMBER, **more)
    assert "What the model answers" in run.report().read_text()
    config = settings_of_run(run.folder)
    signed = make_signed_model(run.model.classifier, config, None, "1", 2, bytes(range(32)))
    assert signed.manifest.run_config().target == config.target
    assert "value" in model_card(signed, run.folder)
