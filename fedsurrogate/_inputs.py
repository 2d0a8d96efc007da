"""Arrays and keyword arguments of users, as the rest of the code wants them."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedsurrogate._arrays import Array, columns_of, names_of, numbers_of, shown
from fedsurrogate.common.backbones.backbone_names import in_column_order
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.identity import normal
from fedsurrogate.common.methods import method_named
from fedsurrogate.common.renamed import SETTINGS
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import Scalar, check_epsilon_given, known_keys, short
from fedsurrogate.common.surrogates.surrogates import in_class_order

P = ParamSpec("P")
T = TypeVar("T")


def is_number(value: object) -> bool:
    """Whether a value is a real number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


Check = tuple[Callable[[Any], bool], str]


def _at_least(lowest: int) -> Check:
    return (
        lambda value: is_whole(value) and value >= lowest,
        f"a whole number of at least {lowest}",
    )


PATH: Check = (lambda value: isinstance(value, str | PathLike), "a path: a text or a Path")
TRUTH: Check = (lambda value: isinstance(value, bool), "True or False")
NUMBER: Check = (is_number, "a number")
DEVICE = re.compile(r"auto|cpu|(cuda|mps|xpu)(:\d{1,4})?")
# By the name of an argument: what it may be, and this in words.
KINDS: Mapping[str, Check] = {
    "path": PATH,
    "output_dir": PATH,
    "weights_path": PATH,
    "site": (lambda value: isinstance(value, str), "a text"),
    "device": (
        lambda value: isinstance(value, str) and bool(DEVICE.fullmatch(value)),
        "a device such as 'auto', 'cpu', 'cuda' or 'cuda:0'",
    ),
    "verbose": TRUTH,
    "progress": TRUTH,
    "delta": NUMBER,
    "epsilon": NUMBER,
    "noise_multiplier": (
        lambda value: is_number(value) and 0 < value < math.inf,
        "a positive number",
    ),
    "sample_rate": (
        lambda value: is_number(value) and 0 < value <= 1,
        "a number above 0, and 1 at most",
    ),
    "steps": _at_least(1),
    "batch_size": _at_least(1),
    "image_size": _at_least(0),
    "backbone": (
        lambda value: value is None or isinstance(value, str | nn.Module),
        "a name such as 'torchvision:resnet18', or a torch.nn.Module; wrap a function in a module",
    ),
}


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """A public function that refuses arguments which it does not know, or of another kind.

    Args:
        function: with or without further `**settings`.

    Returns:
        The same function, which raises ConfigError for them.
    """
    signature = inspect.signature(function)
    name = function.__name__

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        open_to_all = any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()
        )
        known = {*signature.parameters, *(_all_names() if open_to_all else ())}
        for key in kwargs:
            if key not in known:
                raise ConfigError(f"{name} has no argument {key!r}{suggestion(key, known)}")
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from None
        settings = given.arguments.get("settings", {}) if open_to_all else {}
        if open_to_all:
            check_epsilon_given({**given.arguments, **settings})
        for key, value in given.arguments.items():
            check(key, value)
        for key, value in settings.items():
            if "grid" in signature.parameters:
                _check_one_value(key, value)
            if value is not None:
                check(key, value)
        return function(*args, **kwargs)

    # So that it can be pickled by its public name.
    call.__module__ = "fedsurrogate"
    return call


def _check_one_value(key: str, value: object) -> None:
    """Raise ConfigError for a list of numbers where all runs of a sweep share one."""
    if key == "classes" or not isinstance(value, list | tuple):
        return
    if all(isinstance(each, int | float) for each in value):
        raise ConfigError(
            f"{key} = {short(str(value))}: all runs share one value; to try each write "
            f"grid={{{key!r}: [...]}}"
        )


def check(name: str, value: object) -> None:
    """Raise ConfigError for an argument of another kind than its name says."""
    if name in KINDS:
        fits, words = KINDS[name]
        if not fits(value):
            raise ConfigError(f"{name} = {shown(value)}: must be {words}")


def suggestion(name: str, known: Sequence[str] | set[str]) -> str:
    """For an error: the name of today, or a question whether a similar one was meant; empty without one."""
    if today := SETTINGS.get(name.replace("__", ".").replace("_", "-")):
        return f"; it is now {today.replace('.', '__').replace('-', '_')!r}"
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@cache
def _all_names() -> frozenset[str]:
    """Names that functions with further settings know: those of settings, with and without their
    section, and of the functions to which they hand them on.
    """
    keys = [key.replace("-", "_") for key in known_keys(Settings)]
    own = {"bags", "classes", "patients", "site", "method", "workers", "resume", "output_dir"}
    short_forms = {key.rpartition(".")[2] for key in keys}
    return frozenset({key.replace(".", "__") for key in keys} | short_forms | own)


@contextmanager
def writing(path: str | Path, suffix: str = "") -> Iterator[Path]:
    """Write a file inside: `with writing(path) as file`.

    Args:
        path: as the user gave it.
        suffix: with which its name must end, so that `load` knows what it holds; empty for any.

    Raises:
        ConfigError: for what is no path, or a file that cannot be written.
    """
    check("path", path)
    file = Path(path)
    if suffix and file.suffix != suffix:
        raise ConfigError(f"path = '{path}': must end in {suffix}, by which load knows what it is")
    if file.is_dir() or not file.parent.is_dir():
        why = "is a folder" if file.is_dir() else f"is in no folder: make '{file.parent}' first"
        raise ConfigError(f"path = '{path}' {why}")
    try:
        yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"path = '{path}' cannot be written: {error}") from None


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
    known, description = set(known_keys(Settings)), method_named(str(method))
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
