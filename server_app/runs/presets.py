"""Presets, which are named settings of whole runs: small ones such as `fedlap`, and those of the
papers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import ConfigError

if TYPE_CHECKING:
    from fedsurrogate.common.settings.base import Scalar

FOLDER = Path(__file__).parents[1] / "preset_files"


def presets() -> list[str]:
    """Names of all presets."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def preset_settings(name: str) -> dict[str, Scalar]:
    """Settings of a preset, flat. Raises ConfigError for an unknown one."""
    if name not in presets():
        close = get_close_matches(name, presets(), n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"preset {name!r} is unknown; the presets are {', '.join(presets())}{meant}"
        )
    return tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))


def typed_settings(texts: Sequence[str] | None) -> dict[str, Scalar]:
    """Settings as a person types them after `-c`.

    Args:
        texts: as for `parse_overrides`, or the name of a preset.

    Returns:
        The values by key.

    Raises:
        ConfigError: with the part that cannot be read.
    """
    from fedsurrogate.common.settings.base import parse_overrides

    files = {name: str(FOLDER / f"{name}.toml") for name in presets()}
    return parse_overrides([files.get(text.strip(), text) for text in texts or ()])


def preset_notes(name: str) -> list[str]:
    """Description of a preset, and how it differs from its paper: a sentence or two each."""
    lines = (FOLDER / f"{name}.toml").read_text("utf-8").splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]
