"""Methods and settings of earlier versions that stored runs name."""

from __future__ import annotations

from collections.abc import Mapping

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.flat import Scalar

# Methods, and the last version that has them.
METHODS = dict.fromkeys(("afl", "fedcof", "fedcgs", "gh-ofl"), "0.2.0")
# Settings that with this value asked for nothing. Each stored run names all settings.
SETTINGS: dict[str, Scalar] = {
    "counting.models": 0,
    "afl.ridge": 0.1,
    "fedcof.groups": 1,
    "fedcof.samples-per-group": 10,
    "fedcof.shrinkage": 1.0,
    "fedcgs.ridge": 0.0,
    "ghofl.head": "fishermix",
}


def check_method(name: object) -> None:
    """Raise ConfigError for a method that is gone: with the version that has it, and what to use."""
    if isinstance(name, str) and name in METHODS:
        raise ConfigError(
            f"method = {name!r} is gone: version {METHODS[name]} is the last that runs it and "
            "learns from its runs; use method = 'fedpft' with fedpft.covariance = 'gram'"
        )


def left(flat: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings without those of `SETTINGS`. Raises ConfigError for a method that is gone: before
    its own settings, which are unknown too.
    """
    check_method(flat.get("method"))
    return {key: value for key, value in flat.items() if (key, value) not in SETTINGS.items()}
