"""The model in a run folder, for who has the folder itself and no signed file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.sealing import new_key
from fedsurrogate.common.signed_models.making import Sampler, make_signed_model
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    SignedModel,
    read_signed_model,
    sign_model,
)
from fedsurrogate.common.wire.model_files import load_model

MODEL_FILE = "model.safetensors"
OF_SIMULATION = (
    "the model of a simulation has no Gaussians of its surrogates; `site evaluate RUN --store` fits "
    "Gaussians on records that the run has not learned from"
)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return (folder / "manifest.json").is_file()


def settings_of_run(run: Path) -> Run:
    """The settings of a run, under the digest that its files name.

    Args:
        run: the run folder.

    Raises:
        RunError: for a folder that is no run folder.
        ConfigError: for settings of another version.
    """
    manifest = _object(run, "manifest.json")
    if not isinstance(settings := manifest.get("config"), dict):
        raise RunError(f"{run} is not a run folder: manifest.json has no config")
    return replace(parse_run(settings), stored_as=str(manifest.get("run", "")))


def is_simulated(run: Path) -> bool:
    """Whether the run was a simulation, so that this machine has all of its records. Raises RunError."""
    return _object(run, "manifest.json").get("simulated") is True


def signed_from_run(run: Path, private: bytes, sampler: Sampler | None = None) -> SignedModel:
    """Sign the model of a run folder that holds no signed one.

    Args:
        run: the run folder.
        private: the key that signs.
        sampler: draws synthetic features and labels from what the model was learned from; None for
            a model without Gaussians.

    Returns:
        The model.

    Raises:
        RunError: the run has no model.
        SurrogateError: the model cannot be read.
    """
    config, manifest = settings_of_run(run), _object(run, "manifest.json")
    if not (run / MODEL_FILE).is_file():
        raise RunError(
            f"{run} has no {MODEL_FILE}: the run has failed, or its result is no classifier"
        )
    metrics = _object(run, "metrics.json")
    used = _table(metrics.get("sites")).get("used")
    claims = _table(_table(metrics.get("privacy")).get("per_site")).values()
    units = {str(unit) for claim in claims if (unit := _table(claim).get("unit"))}
    return make_signed_model(
        load_model(run / MODEL_FILE),
        config,
        sampler,
        str(manifest.get("flower_run_id", "")),
        used if isinstance(used, int) else 0,
        private,
        units,
    )


def own_model(run: Path) -> SignedModel:
    """The model of a run folder of this account, which is trusted as it is: who may write there may
    write anything of this account. Of a deployment it is the signed one.

    Args:
        run: the run folder.

    Returns:
        The model, under a name that stays the same; that of a simulation without Gaussians.

    Raises:
        ConfigError: the folder is another account's.
        RunError: the run has no model.
        SurrogateError: the model cannot be read.
    """
    owner = run.stat().st_uid
    if owner != os.getuid():
        raise ConfigError(
            f"{run} belongs to user {owner}, and this is user {os.getuid()}: only your own run folder "
            "is used without a signature; name a file that `coordinator export` has written, whose "
            "signature is checked"
        )
    if (run / f"model{SUFFIX}").is_file():
        return read_signed_model(run / f"model{SUFFIX}")
    key = new_key()
    signed = signed_from_run(run, key)
    facts = {"name": f"{signed.manifest.method}-{signed.manifest.tensors[:8]}"}
    manifest = signed.manifest.model_copy(update=facts | {"gaussians": OF_SIMULATION})
    return sign_model(signed.classifier, None, manifest, key)


def _object(run: Path, name: str) -> dict[str, Any]:
    """A JSON object of a run folder. Raises RunError."""
    try:
        content = json.loads((run / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = f"{name} cannot be read ({type(error).__name__})"
        raise RunError(f"{run} is not a run folder: {why}") from None
    if not isinstance(content, dict):
        raise RunError(f"{run / name} is not a JSON object")
    return content


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
