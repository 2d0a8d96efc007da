"""Settings of whole runs under a name: `fedlap` for two cores without a network, and those of the papers."""

from __future__ import annotations

import tomllib
from pathlib import Path

from common.config.flat_settings import Scalar
from common.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "preset_files"


def presets() -> list[str]:
    """Their names."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def preset_settings(name: str) -> dict[str, Scalar]:
    """Settings of a preset, flat; none for an empty name. Raises ConfigError for one there is not."""
    if not name:
        return {}
    if name not in presets():
        raise ConfigError(f"preset {name!r}: there are {', '.join(presets())}")
    return tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))


def preset_note(name: str) -> str:
    """What it is, in the words of its first line."""
    return (FOLDER / f"{name}.toml").read_text("utf-8").splitlines()[0].removeprefix("# ")
