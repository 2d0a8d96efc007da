"""Runs in rounds: they survive a failing site, are recorded, and resume. tests/test_methods.py runs
all methods.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.lifecycle.before_start import continuation
from tests.grid import Fault, InProcessGrid, Json, metrics_of, run_federation, sites
from tests.strategies.dpcvae.test_runs import SMALL as GENERATOR
from tests.strategies.fedlap.test_runs import LITTLE
from tests.strategies.interrupted import interrupted

SMALL: dict[str, Any] = {
    "head.min-steps": 60,
    "head.epochs": 2,
    "fedavg.local-epochs": 2,
    "fedavg.rounds": 2,
    "alpha": 1.0,
}
PRIVATE: dict[str, Any] = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "fedavg.sample-rate": 1.0,
    "fedavg.local-epochs": 3,
    "fedavg.batch-size": 512,
}


def used(folder: Path) -> Json:
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    return metrics


@pytest.mark.slow
def test_what_a_site_keeps_of_its_own_makes_it_better_there(tmp_path: Path) -> None:
    own = {}
    for method in ("fedavg", "fedlambda", "knn-per"):
        per_site = used(
            run_federation(tmp_path / method, sites(3), method=method, **SMALL | {"alpha": 0.3})
        )["accuracy"]["per_site"]
        own[method] = sum(per_site.values()) / 3
    assert min(own["fedlambda"], own["knn-per"]) > own["fedavg"]


def test_privacy_of_many_rounds_is_one_promise(tmp_path: Path) -> None:
    metrics = used(run_federation(tmp_path, sites(2), method="dp-fedavg", **SMALL | PRIVATE))
    card = metrics["privacy"]
    assert (card["mechanism"], card["epsilon"], card["relation"]) == (
        "dp-sgd",
        8.0,
        "add or remove one record",
    )
    assert "all rounds together" in card["covers"]
    ledgers = list((tmp_path / "site-state").rglob("*.jsonl"))
    releases = [json.loads(line) for file in ledgers for line in file.read_text().splitlines()]
    rounds = [
        (entry["round"], entry["events"][0]["count"])
        for entry in releases
        if entry["kind"] == "release"
    ]
    assert sorted(rounds) == [(1, 3), (1, 3), (2, 3), (2, 3)]


@pytest.mark.parametrize("settings", [{}, {"method": "scaffold"}])
def test_the_convnet_is_trained_in_rounds_as_well(tmp_path: Path, settings: dict[str, Any]) -> None:
    convnet = {
        "method": "fedavg",
        "fedavg.model": "convnet",
        "fedavg.width": 8,
        "fedavg.batch-size": 16,
        "partition": "iid",
    }
    folder = run_federation(tmp_path, sites(2), **SMALL | convnet | settings)
    assert used(folder)["accuracy"]["model"] > 0.3
    with safe_open(folder / "model.safetensors", "pt") as model:
        assert model.metadata()["kind"] == "convnet"
        assert "convolution1.weight" in model.keys()  # noqa: SIM118 - it has no other


@pytest.mark.parametrize(
    ("settings", "rounds", "kept"),
    [
        *(
            (SMALL | {"method": method, "fedavg.rounds": 3}, 3, "model")
            for method in ("fedavg", "fedyogi", "scaffold")
        ),
        # The sites go on from their stored images of round two.
        pytest.param(LITTLE | {"fedlap.rounds": 3}, 3, "model", marks=pytest.mark.slow),
        pytest.param(GENERATOR | {"method": "dpcgan"}, 4, "generator", marks=pytest.mark.slow),
    ],
    ids=["fedavg", "fedyogi", "scaffold", "fedlap", "dpcgan"],
)
def test_a_run_resumes_from_its_last_round_and_ends_where_it_would_have(
    tmp_path: Path, settings: dict[str, Any], rounds: int, kept: str
) -> None:
    whole = run_federation(tmp_path / "whole", sites(2), **settings)
    half = interrupted(tmp_path / "half", settings, after=2)
    assert metrics_of(half)["status"] == "failed"
    resumed = run_federation(tmp_path / "half", sites(2), **settings, resume=str(half))
    assert [entry["round"] for entry in metrics_of(resumed)["rounds"]] == [*range(1, rounds + 1)]
    one, other = (load_file(folder / f"{kept}.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_missed_quorum_leaves_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(2), {0: Fault(offline=True)})
    with pytest.raises(RunError, match="round 1: quorum missed"):
        run_federation(tmp_path, grid, method="fedavg", **SMALL | {"deadline": 0.3, "quorum": 1.0})
    (manifest,) = tmp_path.rglob("manifest.json")
    assert "resume=" in continuation(manifest.parent)
