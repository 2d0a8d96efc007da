"""Where this software keeps files of a user: below the home folder, or where the XDG variables say."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

NAME = "fedsurrogate"
STATE, CACHE = "XDG_STATE_HOME", "XDG_CACHE_HOME"
# Below the home folder, without the variables.
PLACES = {STATE: ".local/state", CACHE: ".cache"}


def home_folder() -> Path:
    """The user's home folder; one that does not exist for a user without any, as in some
    containers.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def user_folder(variable: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for state or cache.

    Args:
        variable: `STATE` or `CACHE`; its value counts if it is an absolute path.
        environment: The variables of this process.

    Returns:
        A folder, which may not exist. One in the home folder that an earlier version has filled
        stays in use until there is one where the variable says: a site must not lose its ledger to
        a variable.
    """
    usual = home_folder() / PLACES[variable] / NAME
    named = Path(environment.get(variable, ""))
    if not named.is_absolute() or (_exists(usual) and not _exists(named / NAME)):
        return usual
    return named / NAME


def why_not_writable(folder: Path) -> str:
    """Why no file can be made in a folder, which is created if there is none; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:
        return False
