"""The signed model of a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from fedsurrogate.common.signed_models.making import settings_of_run, signed_from_run
from fedsurrogate.common.signed_models.signed_model import SUFFIX, SignedModel, read_signed_model

from ..deployment.request_key import read_request_key, signing_key
from ..relearn import stored_source


def signed_model_of(run: Path, key_folder: Path | None = None) -> SignedModel:
    """The model that the sites received. A run without one, such as a simulation, is signed now;
    of a private run with the Gaussians of its stored surrogates, as at the end of a deployment's run.

    Args:
        run: the run folder.
        key_folder: where the coordinator's key is; by default the key of the folder of the run.

    Returns:
        The signed model.

    Raises:
        RunError: the run has no model.
        ConfigError: the key cannot be read or made.
        SurrogateError: the model, or a stored surrogate, cannot be read.
    """
    file = run / f"model{SUFFIX}"
    if file.is_file():
        return read_signed_model(file)
    private = (
        read_request_key(key_folder)
        if key_folder
        else signing_key(run.absolute().parent, os.environ)
    )
    source = stored_source(run) if settings_of_run(run).settings.epsilon else None
    return signed_from_run(run, private, None if source is None else source.sample)
