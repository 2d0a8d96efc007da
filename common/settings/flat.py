"""Parser of flat settings: dotted keys from Flower or a file become frozen models."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import Section, kebab

Scalar = str | int | float | bool
# Maximum number of characters of a wrong value in an error message, and of unknown keys for which
# it names a similar one.
LONGEST_SHOWN, MOST_SUGGESTED = 200, 20
# Keys of one name that an error lists.
MOST_MEANT = 4
M = TypeVar("M", bound=Section)


def parse_settings(model: type[M], flat: Mapping[str, Scalar]) -> M:
    """Parse flat dotted keys into `model`. Raises ConfigError with one line of text."""
    known = known_keys(model)
    complaints: list[str] = []
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        if key in known:
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = value
            continue
        # The sender of the settings chooses keys: looking for similar ones takes time.
        near = len(complaints) < MOST_SUGGESTED and len(key) <= LONGEST_SHOWN
        close = _like(key, known, str(flat.get("method", ""))) if near else []
        meant = " or ".join(map(repr, close))
        complaints.append(
            f"unknown key {short(key)}" + (f"; did you mean {meant}?" if meant else "")
        )
    try:
        parsed = model.model_validate(nested)
    except ValidationError as error:
        complaints += map(_explain, error.errors())
    if complaints:
        raise ConfigError("; ".join(complaints))
    return parsed


def _like(key: str, known: Sequence[str], method: str) -> list[str]:
    """The keys that a person may mean: those that end so, of the method first, else the most alike."""
    same = [each for each in known if each.rpartition(".")[2] == key]
    own = [each for each in same if each == f"{method}.{key}"]
    return own or same[:MOST_MEANT] or difflib.get_close_matches(key, known, n=1)


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert the nested sections of a dumped model to flat dotted keys of a run-config. Lists
    become comma-separated.
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = (
                ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            )
    return flat


@cache
def known_keys(model: type[Section]) -> tuple[str, ...]:
    """Return all flat keys of `model`, with sections as dotted prefixes."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += [f"{kebab(name)}.{key}" for key in known_keys(field.annotation)]
        else:
            keys.append(kebab(name))
    return tuple(keys)


_PLAIN = {
    "tuple_type": "must be one text of names separated by commas",
    "bool_type": "must be true or false",
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
}


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    original = (
        str(error["msg"])
        .removeprefix("Value error, ")
        .removeprefix("Input ")
        .removeprefix("String ")
    )
    message = _PLAIN.get(error["type"], original.replace("should", "must"))
    return f"{key} = {short(error['input'])}: {message}" if key else message


def short(value: object) -> str:
    """A wrong value for an error message."""
    shown = repr(value[: LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."


def parse_overrides(texts: Sequence[str]) -> dict[str, Scalar]:
    """Parse 'key="value" other=3', the format of `flwr run --run-config`. Raises ConfigError with
    the unreadable part.
    """
    flat: dict[str, Scalar] = {}
    for text in texts:
        rest = re.sub(_PAIR, "", text).strip()
        if rest:
            raise ConfigError(
                f"cannot read {rest!r} in {text!r}; write key=value pairs, strings in quotes: "
                "'method=\"fedpft\" seed=1'"
            )
        for key, value in re.findall(_PAIR, text):
            try:
                parsed = tomllib.loads(f"value = {value}")["value"]
            except tomllib.TOMLDecodeError:
                raise ConfigError(f"cannot read {key}={value}; {_hint(key, value)}") from None
            flat[key] = parsed
    check_epsilon_given(flat)
    return flat


def check_epsilon_given(given: Mapping[str, Any]) -> None:
    """Refuse a budget of nothing that a person has written, perhaps for the strictest of all.

    Args:
        given: what the person has written, by name.

    Raises:
        ConfigError: for an epsilon of 0 without a delta of 0.
    """
    epsilon = given.get("epsilon")
    if isinstance(epsilon, int | float) and not epsilon and "delta" not in given:
        raise ConfigError(
            "epsilon = 0 would be no differential privacy: leave epsilon out for a run without, write "
            "epsilon=0 delta=0 to take away the budget of a preset, or give a budget, such as "
            "epsilon=8 delta=1e-5"
        )


def _hint(key: str, value: str) -> str:
    """What to write in place of a value that cannot be read."""
    if value.casefold() in ("true", "false"):
        return f"write {key}={value.casefold()}"
    if re.fullmatch(r"[+-]?[0-9]*,[0-9]+", value):
        return f"a number has a point: {key}={value.replace(',', '.')}"
    return f'a string needs quotes: {key}="{value}"'


_PAIR = r"""([A-Za-z0-9_.-]+)=('[^']*'|"[^"]*"|\S+)"""
