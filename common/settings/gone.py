"""Methods, settings, and values of settings, that are no more: run folders and commands may still name
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.flat import Scalar

_COX = "Cox models in rounds, which no release had; time-head = 'residuals' ranks as well in two rounds"
_LABELS = (
    "a choice that no release had; the code is capped under privacy where label-sets are given, and a "
    "label has the second moment of the sites that annotate it where no noise pays for it"
)
_PEERS = "methods of peers, and fedsurrogate 0.2.0 was the last with them"
# Methods that are no more, and the last version that has them.
METHODS = dict.fromkeys(("afl", "fedcof", "fedcgs", "gh-ofl"), "0.2.0")
# Settings that are no more, which run folders of earlier versions name: the value that asked for
# nothing, and what any other one asked for.
GONE: dict[str, tuple[Scalar, str]] = {
    "counting.models": (
        0,
        "values of sites, and fedsurrogate 0.2.0 was the last with them; `coordinator relearn RUN "
        "--without SITE` learns the model without one",
    ),
    "afl.ridge": (0.1, _PEERS),
    "fedcof.groups": (1, _PEERS),
    "fedcof.samples-per-group": (10, _PEERS),
    "fedcof.shrinkage": (1.0, _PEERS),
    "fedcgs.ridge": (0.0, _PEERS),
    "ghofl.head": ("fishermix", _PEERS),
    "cox-rounds": (0, _COX),
    "feature-names": ("", _COX),
    "label-code": ("auto", _LABELS),
    "label-moment": ("auto", _LABELS),
}
# The same of single values of settings that are there.
GONE_VALUES: dict[tuple[str, Scalar], str] = {
    ("time-head", "cox"): _COX,
    ("fedpft.bits", 4): "loadings of 4 bits, and fedsurrogate 0.2.0 was the last with them; "
    "fedpft.bits = 8 takes twice their bytes and is up to 2 points better, and a smaller "
    "fedpft.rank takes as few",
}


def check_method(name: object) -> None:
    """Raise ConfigError for a method that is gone: with the version that has it, and what to use."""
    if isinstance(name, str) and name in METHODS:
        raise ConfigError(
            f"method = {name!r} is gone: version {METHODS[name]} is the last that runs it and "
            "learns from its runs; use method = 'fedpft' with fedpft.covariance = 'gram'"
        )


def without_gone(flat: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settings without those that are gone and asked for nothing.

    Args:
        flat: by key.

    Raises:
        ConfigError: for a method that is gone, and for a setting that asked for something; it says
            what to use instead.
    """
    check_method(flat.get("method"))
    for key, value in flat.items():
        why = next((said for pair, said in GONE_VALUES.items() if pair == (key, value)), "")
        if key in GONE and value != GONE[key][0]:
            why = GONE[key][1]
        if why:
            raise ConfigError(f"{key} = {value!r} asks for what is gone: {why}")
    return {key: value for key, value in flat.items() if key not in GONE}
