"""What arguments of public functions may be, by their names: a name means the same everywhere."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from safetensors import SafetensorError
from torch import nn

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.flat import check_epsilon_given, known_keys, short

P = ParamSpec("P")
T = TypeVar("T")


def is_number(value: object) -> bool:
    """Whether a value is a real number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_backbone(value: object) -> bool:
    return value is None or isinstance(value, str | nn.Module)


def _is_at_least(lowest: int) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and value >= lowest


def _is_instance(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


PATH = (_is_instance(str, PathLike), "a path: a text or a Path")
TEXT = (_is_instance(str), "a text")
TRUTH = (_is_instance(bool), "True or False")
DEVICE = re.compile(r"auto|cpu|(cuda|mps|xpu)(:\d{1,4})?")
NUMBER = (is_number, "a number")
# By the name of an argument: what it may be, and this in words.
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "path": PATH,
    "output_dir": PATH,
    "weights_path": PATH,
    "site": TEXT,
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
    "steps": (_is_at_least(1), "a whole number of at least 1"),
    "batch_size": (_is_at_least(1), "a whole number of at least 1"),
    "image_size": (_is_at_least(0), "a whole number of at least 0"),
    "backbone": (
        _is_backbone,
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


def shown(value: object) -> str:
    """A wrong value for an error, on one line."""
    if value is None or isinstance(value, str | bool | Real):
        return short(value)
    return f"an object of type {type(value).__name__}"


def suggestion(name: str, known: Sequence[str] | set[str]) -> str:
    """A question for an error: whether a similar name was meant; empty without one."""
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
