"""The only room that imports private modules of Flower, behind one class for every version."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from .v134 import Flower134


# The module and the class of each major and minor number.
VERSIONS = {"1.34": ("v134", "Flower134"), "1.42": ("v142", "Flower142")}


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
    module, name = VERSIONS.get(".".join(installed.split(".")[:2]), ("", ""))
    if not module:
        raise ConfigError(
            f"flwr {installed} is installed, but fedsurrogate works with flwr {supported}; install "
            "that version"
        )
    found: Flower134 = getattr(import_module(f"{__name__}.{module}"), name)()
    return found
