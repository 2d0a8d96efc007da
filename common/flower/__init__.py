"""The only room that imports private modules of Flower, behind one class for every version."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from .v134 import Flower134


def _v134() -> Flower134:
    from .v134 import Flower134

    return Flower134()


def _v142() -> Flower134:
    from .v142 import Flower142

    return Flower142()


# By major and minor number.
VERSIONS: dict[str, Callable[[], Flower134]] = {"1.34": _v134, "1.42": _v142}


@cache
def flower() -> Flower134:
    """The interface to the Flower that is installed here.

    Neither this call nor the import of this module imports Flower. The version is read from the
    installed package, as `flwr.__version__` is, so that a process that starts others stays free of
    gRPC's threads.

    Raises:
        ConfigError: Flower is not installed, or its version is not among `VERSIONS`.

    Example:
        >>> flower().supernode_flags("127.0.0.1:9094")
        ['--isolation', 'process', '--clientappio-api-address', '127.0.0.1:9094']
    """
    supported = ", ".join(f"{each}.x" for each in VERSIONS)
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise ConfigError(
            f"flwr is not installed; fedsurrogate works with flwr {supported}"
        ) from None
    implementation = VERSIONS.get(".".join(installed.split(".")[:2]))
    if implementation is None:
        raise ConfigError(
            f"flwr {installed} is installed, but fedsurrogate works with flwr {supported}; install "
            "that version"
        )
    return implementation()
