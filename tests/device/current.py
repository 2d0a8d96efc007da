"""The pretended machine of this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.device.machine import Machine

# The last one is that of the innermost `with`.
ENTERED: list[Machine] = []


def current() -> Machine:
    """The machine of this moment."""
    if not ENTERED:
        raise RuntimeError("a pretended tensor is used outside of its machine")
    return ENTERED[-1]
