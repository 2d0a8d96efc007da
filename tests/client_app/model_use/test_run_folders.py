"""The model of a simulation at work: its run folder is named, and neither a node-config nor a key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    own_model,
    save_signed_model,
    signed_from_run,
)
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.sample_data import write_xrays
from tests.client_app.model_use.hospitals import site
from tests.common.signed_models.test_signed_model import KEY

Walk = tuple[Path, Path]
SETTINGS: dict[str, str | int] = {
    "data": "imagefolder", "partition": "column", "site-column": "hospital",
    "patient-column": "patient", "backbone": "pixels", "image-size": 16, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Drawn X-rays, and the folder of a simulation on them."""
    folder = tmp_path_factory.mktemp("walk")
    write_xrays(folder / "xrays", hospitals=3, images=120, pixels=24)
    places = {"data-dir": str(folder / "xrays" / "hospitals"), "output-dir": str(folder / "runs")}
    run = simulate_here(3, SETTINGS | places, lambda event: None, report=False)
    return folder / "xrays", run


def test_a_run_folder_is_used_evaluated_and_adapted_without_settings_of_a_site(
    walk: Walk, tmp_path: Path
) -> None:
    xrays, run = walk
    out = tmp_path / "p.csv"
    done = site("predict", run, "--data-dir", xrays / "new", "--out", out)
    assert done.code == 0, done.stderr
    assert "your own folder: used as it is, without a coordinator's key" in done.stdout
    assert "not calibrated on records of this site" in done.stdout
    assert "site evaluate RUN --store" in done.stdout, "what is needed for a score"
    assert len(out.read_text().splitlines()) == 61
    done = site(
        "evaluate", run, "--out", tmp_path / "e", "--temperature", "--abstain", 0.1, "--store"
    )
    assert done.code == 0, done.stderr
    facts = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    assert facts["schema"] == 1
    assert facts["records"] == "the simulation's test records"
    metrics = json.loads((run / "metrics.json").read_text())
    judged = facts["report"]["records"] + facts["calibrated_on"]
    assert judged == metrics["quality"]["records"], "the test records that the run has judged"
    done = site("predict", run, "--data-dir", xrays / "new", "--out", out, "--overwrite")
    assert "not calibrated" not in done.stdout, "what is stored in the run folder is used"
    assert "mahalanobis" in out.read_text().splitlines()[0]
    done = site("adapt", run, "--json")
    assert done.code == 0, done.stderr
    trained = json.loads(done.stdout)["records"]
    assert trained + metrics["quality"]["records"] == 360
    assert {file.name.split(".")[0] for file in (run / "site" / "models").iterdir()} == {
        own_model(run).manifest.name
    }


def test_the_whole_test_split_gives_the_numbers_of_the_run(walk: Walk, tmp_path: Path) -> None:
    _, run = walk
    site("evaluate", run, "--out", tmp_path)
    found = json.loads((tmp_path / "evaluation.json").read_text())["report"]
    recorded = json.loads((run / "metrics.json").read_text())["quality"]
    assert found["confusion"] == recorded["confusion"]
    auroc = found["averages"]["macro_auroc"]["value"]
    assert auroc == pytest.approx(recorded["averages"]["macro_auroc"]["value"], abs=1e-6)


def test_one_simulated_site_is_chosen_by_a_node_config(walk: Walk, tmp_path: Path) -> None:
    _, run = walk
    settings = f'partition-id=1 num-partitions=3 state-dir="{tmp_path}/state"'
    done = site("evaluate", run, "--out", tmp_path, "--node-config", settings)
    assert done.code == 0, done.stderr
    facts = json.loads((tmp_path / "evaluation.json").read_text())
    tested = json.loads((run / "metrics.json").read_text())["quality"]["records"]
    assert 0 < facts["report"]["records"] < tested


def test_the_model_of_a_run_folder_keeps_its_name_and_its_numbers(walk: Walk) -> None:
    _, run = walk
    first, again, exported = own_model(run), own_model(run), signed_from_run(run, KEY)
    assert first.manifest == again.manifest
    assert first.manifest.tensors == exported.manifest.tensors
    assert first.gaussians is None


def test_folders_that_cannot_be_used_are_named_with_what_to_do(
    walk: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xrays, run = walk
    done = site("evaluate", xrays)
    assert (done.code, "no run folder" in done.stderr) == (1, True)
    monkeypatch.delenv("FEDSURROGATE_NODE_CONFIG", raising=False)
    done = site("adapt", tmp_path / "model.fedsurrogate")
    assert done.code == 1
    deployed = tmp_path / "deployed"
    deployed.mkdir()
    (deployed / "manifest.json").write_text(
        json.dumps(json.loads((run / "manifest.json").read_text()) | {"simulated": False})
    )
    (deployed / f"model{SUFFIX}").write_bytes(save_signed_model(signed_from_run(run, KEY)))
    done = site("evaluate", deployed)
    assert (done.code, "its records are not on this machine" in done.stderr) == (1, True)
    done = site("predict", deployed, "--data-dir", xrays / "new", "--out", tmp_path / "p.csv")
    assert done.code == 0, "the signed model of a deployment"
    monkeypatch.setattr(os, "getuid", lambda: run.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="only your own run folder"):
        own_model(run)
