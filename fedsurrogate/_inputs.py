"""Arrays and keyword arguments of users, as the rest of the code wants them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate._arguments import shown
from fedsurrogate._arrays import Array, columns_of, names_of, numbers_of
from fedsurrogate.common.backbones.column_names import in_column_order
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.identity import normal
from fedsurrogate.common.methods import method_named
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.flat import Scalar, known_keys
from fedsurrogate.common.surrogates.surrogates import in_class_order


def flat_settings(method: str, given: Mapping[str, Any]) -> dict[str, Scalar]:
    """Keyword arguments as flat keys of a run.

    Args:
        method: its name.
        given: values by name: of a setting of the run, or of the method's section (`rank`), or
            `section__key`.

    Returns:
        Values by flat key, such as "fedpft.rank".

    Raises:
        ConfigError: for an unknown method, or a value of another type than settings have.

    Example:
        >>> flat_settings("fedpft", {"rank": 8, "head__epochs": 5})
        {'method': 'fedpft', 'fedpft.rank': 8, 'head.epochs': 5}
    """
    # A method of another type is named as it is in the error.
    known, description = set(known_keys(Settings)), method_named(_hashable(method))
    # What a method does not read would have no effect.
    sections = dict.fromkeys((method, description.shown, *description.reads, "head"))
    flat: dict[str, Scalar] = {"method": method}
    for name, value in given.items():
        if value is None:
            # Not given, as None is in Python.
            continue
        key = str(name).replace("__", ".").replace("_", "-")
        choices = [key, *(f"{section}.{key}" for section in sections)]
        chosen = next((choice for choice in choices if choice in known), key)
        flat[chosen] = ",".join(class_names(value)) if key == "classes" else _scalar(name, value)
    return flat


def _hashable(method: object) -> str:
    return method if isinstance(method, str) else str(method)


def _scalar(name: str, value: Any) -> Scalar:
    """A value as settings have it: one of Python's, and a list as a text with commas.

    Raises:
        ConfigError: for a value of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Scalar):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        return ",".join(str(_scalar(name, each)) for each in value)
    raise ConfigError(
        f"{name} = {shown(value)}: must be a text, a number, True or False, or a list of these"
    )


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


def feature_names(values: Array) -> tuple[str, ...]:
    """Names of the columns of features, in the order of `as_features`; empty without names."""
    return in_column_order(columns_of(values))[0]


def as_features(values: Array) -> Tensor:
    """Features as a tensor; columns with names in their public order, whatever order they come in.

    Args:
        values: array-like, (n, d) with n at least 1.

    Returns:
        Features (n, d), float32, on the processor.

    Raises:
        DataError: for another shape, or numbers that are not finite.
    """
    features = torch.from_numpy(numbers_of(values))
    if features.ndim != 2 or not features.numel():
        raise DataError(
            f"features of shape {tuple(features.shape)}; they must be of shape (n, d) with n and d "
            "at least 1"
        )
    if not features.isfinite().all():
        row = int((~features.isfinite().all(1)).nonzero()[0])
        raise DataError(
            f"features hold NaN or infinity, first in row {row}; remove those rows or compute them "
            "again"
        )
    order = in_column_order(columns_of(values))[1] or list(range(features.shape[1]))
    return features if order == sorted(order) else features[:, order].contiguous()


def class_names(classes: Sequence[object]) -> tuple[str, ...]:
    """Names of the classes that a user lists, in normal form and in their order.

    Args:
        classes: texts or numbers.

    Raises:
        ConfigError: for one without a name, or with a comma, which separates names in settings.

    Example:
        >>> class_names([0.0, 1.0]), class_names(["nevus ", "None"])
        (('0', '1'), ('nevus', 'None'))
    """
    if isinstance(classes, str):
        # As in settings.
        classes = [each for each in classes.split(",") if each.strip()]
    if not isinstance(classes, Iterable) or not (given := [*classes]):
        raise ConfigError(
            f"classes = {shown(classes)}: must be a list of one name or more, such as range(3)"
        )
    try:
        listed = names_of(given, len(given), "class", [normal(e) for e in given if type(e) is str])
    except DataError as error:
        raise ConfigError(f"classes: {error}") from None
    for name in listed.names:
        if "," in name:
            raise ConfigError(f"class {name!r} contains a comma; rename it")
    return tuple(listed.names)


def labelled(
    features: Array, labels: Array, classes: Sequence[object] | None
) -> tuple[Tensor, Tensor, tuple[str, ...], Mapping[str, Any]]:
    """Features with class indices.

    Args:
        features: array-like, (n, d).
        labels: array-like, (n,): class names or numbers.
        classes: all classes, in order; None for those among the labels, sorted.

    Returns:
        Features (n, d), float32, class indices (n,), int64, class names in order, and the classes
        by name as the user has them.

    Raises:
        DataError: for a label that is no class, or what `as_features` and `names_of` refuse.
    """
    x, known = as_features(features), None if classes is None else class_names(classes)
    given = names_of(labels, len(x), known=known or ())
    names = in_class_order(set(given.names)) if known is None else known
    index = {name: i for i, name in enumerate(names)}
    if unknown := sorted(set(given.names) - set(names)):
        raise DataError(f"label {unknown[0]!r} is not among classes = {', '.join(names)[:200]}")
    values = dict(given.values)
    for name, value in zip(names, classes or (), strict=False):
        values.setdefault(name, value)
    return x, torch.tensor([index[name] for name in given.names]), names, values


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
