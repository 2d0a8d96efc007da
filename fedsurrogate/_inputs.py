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
    """Keyword arguments as flat keys of a run.

    Args:
        method: its name.
        given: values by name: of a setting of the run, or of the method's section (`rank`), or
            `section__key`.

    Returns:
        Values by flat key, such as "fedpft.rank".

    Raises:
        ConfigError: for an unknown method.

    Example:
        >>> flat_settings("fedpft", {"rank": 8, "head__epochs": 5})
        {'method': 'fedpft', 'fedpft.rank': 8, 'head.epochs': 5}
    """
    known, description = set(known_keys(Settings)), method_named(method)
    sections = dict.fromkeys(
        (method, description.shown, description.usual.training.section, "head")
    )
    flat: dict[str, Scalar] = {"method": method}
    for name, value in given.items():
        key = name.replace("__", ".").replace("_", "-")
        choices = [key, *(f"{section}.{key}" for section in sections)]
        chosen = next((choice for choice in choices if choice in known), key)
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        flat[chosen] = value
    return flat


def config_of(method: str, given: Mapping[str, Any]) -> Run:
    """The run of these settings.

    Args:
        method: its name.
        given: as in `flat_settings`.

    Raises:
        ConfigError: for one that is no setting of the run or the method, or settings that do not
            agree.
    """
    return parse_run(flat_settings(method, given))


def as_features(values: Array) -> Tensor:
    """Features as a tensor.

    Args:
        values: array-like, (n, d) with n at least 1.

    Returns:
        Features (n, d), float32, on the processor.

    Raises:
        DataError: for another shape, or numbers that are not finite.
    """
    features = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if features.ndim != 2 or not len(features):
        raise DataError(
            f"features of shape {tuple(features.shape)}; they must be of shape (n, d) with n at "
            "least 1"
        )
    features = features.detach().to("cpu", torch.float32)
    if not features.isfinite().all():
        row = int((~features.isfinite().all(1)).nonzero()[0])
        raise DataError(
            f"features hold NaN or infinity, first in row {row}; remove those rows or compute them "
            "again"
        )
    return features


def as_labels(values: Array, count: int) -> list[str]:
    """Class names of records.

    Args:
        values: array-like, (count,): names or integers.
        count: number of records.

    Returns:
        A name for each record; an integer that is stored as floating point is named as an integer.

    Raises:
        DataError: if their number is not `count`.

    Example:
        >>> as_labels([1.0, 0.0], 2)
        ['1', '0']
    """
    listed = values.tolist() if isinstance(values, Tensor) else np.asarray(values).tolist()
    if (
        not isinstance(listed, list)
        or len(listed) != count
        or any(isinstance(each, list) for each in listed)
    ):
        raise DataError(
            f"{np.shape(values)} labels for {count} records; give one label for each record"
        )
    return [
        str(int(each)) if isinstance(each, float) and each.is_integer() else str(each)
        for each in listed
    ]


def labelled(
    features: Array, labels: Array, classes: Sequence[object] | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Features with class indices.

    Args:
        features: array-like, (n, d).
        labels: array-like, (n,): class names or integers.
        classes: all classes, in order; None for those among the labels, sorted.

    Returns:
        Features (n, d), float32, class indices (n,), int64, and class names in order.

    Raises:
        DataError: for a label that is no class, or what `as_features` and `as_labels` refuse.
    """
    x = as_features(features)
    names = as_labels(labels, len(x))
    known = tuple(map(str, classes)) if classes is not None else in_class_order(set(names))
    index = {name: i for i, name in enumerate(known)}
    if unknown := sorted(set(names) - set(known)):
        raise DataError(f"label {unknown[0]!r} is not among classes = {', '.join(known)[:200]}")
    return x, torch.tensor([index[name] for name in names]), known


def check_budget(epsilon: float, classes: Sequence[object] | None) -> None:
    """Check that the classes of a private release are not read off the data.

    Args:
        epsilon: of the release; 0 without privacy.
        classes: all classes of the run; None if none are named.

    Raises:
        ConfigError: for a private release without classes.
    """
    if epsilon and classes is None:
        raise ConfigError(
            f"epsilon = {epsilon:g} without classes: the list of a site's classes would show which "
            "ones it has; name all classes of the run, such as classes=range(10)"
        )
