"""Models of run folders, written by hand: which are signed, with which facts, and what is no run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.signed_models import signed_model
from fedsurrogate.common.signed_models.signed_model import (
    OF_SIMULATION,
    is_run_folder,
    is_simulated,
    own_model,
    save_signed_model,
    settings_of_run,
    signed_from_run,
)
from fedsurrogate.common.wire.model_proto import save_model
from tests.common.signed_models.test_signed_model import PRIVATE, head, model, sampler

KEY = bytes(range(32))


def folder(home: Path, manifest: Any = None, metrics: Any = None) -> Path:
    run = home / "run"
    run.mkdir()
    own = {"config": PRIVATE.settings.flat(), "flower_run_id": 77}
    (run / "manifest.json").write_text(json.dumps(own if manifest is None else manifest))
    (run / "metrics.json").write_text(json.dumps({} if metrics is None else metrics))
    save_model(head(), run / "model.safetensors")
    return run


def claims(*units: Any) -> dict[str, Any]:
    return {f"s{at}": {"unit": unit} for at, unit in enumerate(units)}


@pytest.mark.parametrize(
    ("metrics", "sites", "relation"),
    [
        ({}, 0, ""),
        ({"sites": {"used": 4}, "privacy": {"per_site": claims("record", "record")}}, 4, "add or remove one record"),
        ({"sites": {"used": "4"}, "privacy": {"per_site": claims("patient")}}, 0, "add or remove one patient"),
        (
            {"sites": {"used": 0}, "privacy": {"per_site": claims("patient", "record", None)}}, 0,
            "add or remove one record, or one patient at the sites that protect patients",
        ),
        ({"sites": [4], "privacy": {"per_site": {"a": 3, "b": {}, "c": {"unit": ""}}}}, 0, ""),
        ({"sites": 4, "privacy": [1]}, 0, ""), ({"privacy": {"per_site": [1]}}, 0, ""),
    ],
)  # fmt: skip
def test_a_model_is_signed_with_the_facts_of_its_folder(
    tmp_path: Path, metrics: Any, sites: int, relation: str
) -> None:
    found = signed_from_run(folder(tmp_path, metrics=metrics), KEY, sampler).manifest
    assert (found.sites, found.flower_run, found.run) == (sites, "77", PRIVATE.digest)
    assert found.privacy is not None
    assert (found.privacy.epsilon, found.privacy.relation) == (2.0, relation)
    assert found.gaussians == ""
    assert found.dimension == 6


def test_an_own_model_has_a_name_that_stays_and_no_gaussians(tmp_path: Path) -> None:
    run = folder(tmp_path)
    first, again = own_model(run), own_model(run)
    assert first.manifest == again.manifest
    assert first.key != again.key
    assert first.gaussians is None
    assert first.manifest.gaussians == OF_SIMULATION
    assert first.manifest.name == f"fedpft-{first.manifest.tensors[:8]}"
    x = sampler(0, 9)[0]
    assert torch.allclose(first.classifier.scores(x), head().scores(x), atol=0.01)
    # Of a deployment it is the signed one.
    signed = model()
    (run / "model.fedsurrogate").write_bytes(save_signed_model(signed))
    assert own_model(run).manifest == signed.manifest
    assert own_model(run).key == public_key(KEY)


def test_a_folder_of_another_account_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, user = folder(tmp_path), os.getuid()
    monkeypatch.setattr(signed_model.os, "getuid", lambda: user + 1)
    with pytest.raises(ConfigError) as refusal:
        own_model(run)
    assert str(refusal.value).startswith(
        f"{run} belongs to user {user}, and this is user {user + 1}: only your own run folder"
    )


def test_a_run_without_a_model_has_failed(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run / "model.safetensors").unlink()
    reason = "has no model.safetensors: the run has failed, or its result is no classifier"
    with pytest.raises(RunError, match=reason):
        signed_from_run(run, new_key())


@pytest.mark.parametrize("text", [True, False, 1, "true", None])
def test_only_true_says_that_a_run_was_simulated(tmp_path: Path, text: Any) -> None:
    run = folder(tmp_path, manifest={"simulated": text, "config": {"seed": 5}})
    assert is_run_folder(run)
    assert not is_run_folder(tmp_path)
    assert is_simulated(run) == (text is True)
    assert settings_of_run(run).settings.seed == 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", r"run is not a run folder: manifest.json cannot be read \(JSONDecodeError\)$"),
        (b"\xff", r"cannot be read \(UnicodeDecodeError\)$"),
        (9000 * b"[", r"cannot be read \(RecursionError\)$"),
        (None, r"cannot be read \(FileNotFoundError\)$"),
        (b"[]", "manifest.json is not a JSON object$"), (b"3", "manifest.json is not a JSON object$"),
        (b"{}", "run is not a run folder: manifest.json has no config$"),
        (b'{"config": 3}', "run is not a run folder: manifest.json has no config$"),
    ],
)  # fmt: skip
def test_a_folder_without_settings_is_no_run_folder(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    run = folder(tmp_path)
    if content is None:
        (run / "manifest.json").unlink()
    else:
        (run / "manifest.json").write_bytes(content)
    with pytest.raises(RunError, match=reason):
        settings_of_run(run)
    if b"{}" not in (content or b"") and b"config" not in (content or b""):
        with pytest.raises(RunError, match=reason):
            is_simulated(run)
