"""The signed model of a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.signed_models.making import make_signed_model
from fedsurrogate.common.signed_models.signed_model import SUFFIX, SignedModel, read_signed_model
from fedsurrogate.common.wire.model_files import load_model
from fedsurrogate.server_app.deployment.request_key import read_request_key, signing_key
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.json_values import as_number, as_table, at


def run_config_of(run: Path) -> Run:
    """The settings of a run.

    Args:
        run: the run folder.

    Returns:
        The settings, with method and plan.

    Raises:
        RunError: for a folder that is no run folder.
    """
    settings = read_json(run, "manifest.json").get("config")
    if not isinstance(settings, dict):
        raise RunError(f"{run} is not a run folder: manifest.json has no config")
    return parse_run(settings)


def signed_model_of(run: Path, key_folder: Path | None = None) -> SignedModel:
    """The model that the sites received. A run without one, such as a simulation, is signed now,
    without Gaussians.

    Args:
        run: the run folder.
        key_folder: where the coordinator's key is; by default the key of the folder of the run.

    Returns:
        The signed model.

    Raises:
        RunError: the run has no model.
        ConfigError: the key cannot be read or made.
    """
    file = run / f"model{SUFFIX}"
    if file.is_file():
        return read_signed_model(file)
    config, manifest = run_config_of(run), read_json(run, "manifest.json")
    if not (run / "model.safetensors").is_file():
        raise RunError(
            f"{run} has no model.safetensors: the run has failed, or its result is no classifier"
        )
    model = load_model(run / "model.safetensors")
    private = (
        read_request_key(key_folder)
        if key_folder
        else signing_key(run.absolute().parent, os.environ)
    )
    metrics = read_json(run, "metrics.json")
    used = int(as_number(at(metrics, "sites", "used")) or 0)
    per_site = as_table(at(metrics, "privacy", "per_site")).values()
    units = {str(unit) for site in per_site if (unit := as_table(site).get("unit"))}
    return make_signed_model(
        model, config, None, str(manifest.get("flower_run_id", "")), used, private, units
    )
