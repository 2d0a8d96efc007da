"""The newest Flower that we work with, in a folder of its own; `make flower-newest` makes it."""

import os
from pathlib import Path

import pytest

from fedsurrogate.server_app.deployment.submit import APP_FOLDER

VARIABLE = "FEDSURROGATE_FLOWER_NEWEST"
FOLDER = Path(os.environ.get(VARIABLE, APP_FOLDER / "build" / "flower-newest"))
needed = pytest.mark.skipif(
    not (FOLDER / "flwr").is_dir(),
    reason=f"there is no newest Flower in {FOLDER}: make flower-newest, or name it in {VARIABLE}",
)
OLD = {"PYTHONPATH": str(APP_FOLDER)}
NEW = {"PYTHONPATH": os.pathsep.join([str(APP_FOLDER), str(FOLDER)])}
"""Variables of a process that uses the Flower of the environment, and the newest."""
