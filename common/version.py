"""The version of this software."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NAME = "fedsurrogate"
CHECKOUT = Path(__file__).resolve().parents[1]


@cache
def own_version() -> str:
    """The version of the code that runs: of `pyproject.toml` in a checkout or an image, of the
    installed wheel elsewhere.

    An environment may have another checkout installed than the one whose code runs, so a checkout's
    own file comes first.

    Returns:
        A version such as "0.2.0"; empty where neither is found.
    """
    try:
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]
        if project["name"] == NAME:
            return str(project["version"])
    except (OSError, ValueError, KeyError):
        # An installed wheel, whose folder has no such file or that of another project.
        pass
    try:
        return version(NAME)
    except PackageNotFoundError:
        return ""
