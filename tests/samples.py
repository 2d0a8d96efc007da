"""Sample data of real images, which a checkout does not hold: a folder that FEDSURROGATE_SAMPLES
names.

A test that takes the fixture `samples` is marked `samples`. `make test` and `make test-all` leave
such tests out; `make test-samples` runs them. No other test may look at the folder, so that the
suite is the same with and without it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

VARIABLE = "FEDSURROGATE_SAMPLES"
Samples = Callable[[str], Path]


def sample(name: str) -> Path:
    """The path of a sample file or folder. Skips the test, with the name of what is missing, where
    there is none.

    Args:
        name: path below the folder, such as "features/cifar10-train.safetensors".
    """
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        pytest.skip(f"needs {name} of the sample data; {VARIABLE} names no folder")
    if not Path(folder).is_dir():
        pytest.fail(f"{VARIABLE} = {folder!r} is no folder")
    if not (found := Path(folder) / name).exists():
        pytest.skip(
            f"needs {name} of the sample data, which is not in the folder that {VARIABLE} names"
        )
    return found
