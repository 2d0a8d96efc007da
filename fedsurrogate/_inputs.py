"""Arrays and keyword arguments of users, as the rest of the code wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, DataError
from common.methods import method_named
from common.run import Run, parse_run
from common.settings import Settings
from common.settings.flat import Scalar, known_keys
from common.surrogates.surrogates import in_class_order

# Array-likes: tensors, numpy arrays, lists, data frames.
Array = Any


def flat_settings(method: str, given: Mapping[str, Any]) -> dict[str, Scalar]:
    """Keyword arguments as flat keys of a run. Raises ConfigError for one that is no setting of the run or the method."""
    known, description = set(known_keys(Settings)), method_named(method)
    sections = dict.fromkeys((method, description.shown, description.usual.training.section, "head"))
    found: dict[str, Scalar] = {"method": method}
    for name, value in given.items():
        key = name.replace("__", ".").replace("_", "-")
        choices = [key, *(f"{section}.{key}" for section in sections)]
        chosen = next((choice for choice in choices if choice in known), key)
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        found[chosen] = value
    return found


def config_of(method: str, given: Mapping[str, Any]) -> Run:
    """The settings of a run. Raises ConfigError."""
    return parse_run(flat_settings(method, given))


def as_features(values: Array) -> Tensor:
    """Features (n, d), float32. Raises DataError for another shape, or numbers that are not finite."""
    found = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if found.ndim != 2 or not len(found):
        raise DataError(f"features of shape {tuple(found.shape)}; they must be of shape (n, d) with n at least 1")
    found = found.detach().to("cpu", torch.float32)
    if not found.isfinite().all():
        row = int((~found.isfinite().all(1)).nonzero()[0])
        raise DataError(f"features hold NaN or infinity, first in row {row}; remove those rows or compute them again")
    return found


def as_labels(values: Array, count: int) -> list[str]:
    """Class names of records. Raises DataError if their number is not `count`."""
    listed = values.tolist() if isinstance(values, Tensor) else np.asarray(values).tolist()
    if not isinstance(listed, list) or len(listed) != count or any(isinstance(each, list) for each in listed):
        raise DataError(f"{np.shape(values)} labels for {count} records; give one label for each record")
    return [str(int(each)) if isinstance(each, float) and each.is_integer() else str(each) for each in listed]


def labelled(features: Array, labels: Array, classes: Sequence[object] | None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Features (n, d), class indices (n,) and class names in order. Raises DataError for a label that is no class."""
    x = as_features(features)
    names = as_labels(labels, len(x))
    known = tuple(map(str, classes)) if classes is not None else in_class_order(set(names))
    index = {name: i for i, name in enumerate(known)}
    if unknown := sorted(set(names) - set(known)):
        raise DataError(f"label {unknown[0]!r} is not among classes = {', '.join(known)[:200]}")
    return x, torch.tensor([index[name] for name in names]), known


def check_budget(epsilon: float, classes: Sequence[object] | None) -> None:
    """Raise ConfigError for a private release whose classes would be read off the data."""
    if epsilon and classes is None:
        raise ConfigError(
            f"epsilon = {epsilon:g} without classes: the list of a site's classes would show which ones it has; name "
            "all classes of the run, such as classes=range(10)"
        )
