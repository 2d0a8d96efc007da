"""Whether a result holds numbers of Python alone: others look alike, and are written otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, str, bytes, type(None))


def plain(found: Any) -> bool:
    """Whether all parts of a result are of Python's own types; tensors and models count as plain.

    Example:
        >>> import numpy as np
        >>> plain({"a": (1.0, None)}), plain([np.float64(1.0)])
        (True, False)
    """
    if isinstance(found, Tensor | nn.Module) or type(found) in PLAIN:
        return True
    if isinstance(found, Mapping):
        return all(plain(key) and plain(value) for key, value in found.items())
    if is_dataclass(found):
        return all(plain(getattr(found, each.name)) for each in fields(found))
    return isinstance(found, list | tuple | set | frozenset) and all(map(plain, found))
