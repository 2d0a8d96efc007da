"""The base class of all settings, the types that several sections share, the parser of flat
settings, and methods and settings that are no more.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .. import renamed
from ..errors import SITE_NAME, ConfigError
from ..identity import name_of, normal

# A name in settings: of a column or a site.
Name = Annotated[
    str, BeforeValidator(lambda value: normal(value) if isinstance(value, str) else value)
]


def kebab(name: str) -> str:
    """The key in the settings for a field's name."""
    return name.replace("_", "-")


# What follows a type in `Annotated` describes a key where pydantic's own constraints do not.
@dataclass(frozen=True)
class Unit:
    """The unit of a number."""

    name: str


@dataclass(frozen=True)
class Range:
    """The allowed values of a type that a function checks."""

    text: str


@dataclass(frozen=True)
class Only:
    """The methods that use a key, where not all methods of its section do."""

    methods: tuple[str, ...]

    def __init__(self, *methods: str) -> None:
        object.__setattr__(self, "methods", methods)


# Limits are checked before a list is split: the sender of the settings must not control our memory
# use.
LONGEST_LIST, MOST_NAMES = 2**20, 10_000


def split_names(value: object) -> Any:
    """Convert "a, b" to ("a", "b"); an empty string means "not set" and gives ().

    Raises ValueError for a list without any name, such as ",".
    """
    return _split(value, normal) if isinstance(value, str) else value


def split_classes(value: object) -> Any:
    """The same for names of classes, in their normal form."""
    if isinstance(value, str):
        return _split(value, lambda part: name_of(part, (normal(part),)) or "")
    return value


def _split(value: str, form: Callable[[str], str]) -> tuple[str, ...]:
    if len(value) > LONGEST_LIST or value.count(",") >= MOST_NAMES:
        raise ValueError(
            f"a list of {len(value)} characters; at most {LONGEST_LIST}, and at most {MOST_NAMES} "
            "names"
        )
    names = tuple(name for part in value.split(",") if (name := form(part)))
    if value and not names:
        raise ValueError(f"an empty list {value!r}; name at least one, separated by commas")
    if len(set(names)) < len(names):
        raise ValueError(f"a name stands twice in {value!r}")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(split_names), Range("names separated by commas")]
ClassNames = Annotated[
    tuple[str, ...], BeforeValidator(split_classes), Range("names separated by commas")
]


def split_sites(value: object) -> Any:
    """A number of sites as it is, and their names as `split_names`.

    Raises ValueError for neither.
    """
    names = split_names(value)
    if isinstance(names, str | bool | float) or not isinstance(names, int | tuple | list):
        raise ValueError("must be a whole number, or names of sites separated by commas in quotes")
    if isinstance(names, int):
        if names < 0:
            raise ValueError("must be greater than or equal to 0")
        return names
    if wrong := [name for name in names if not SITE_NAME.fullmatch(str(name))]:
        raise ValueError(f"{wrong[0]!r} is no name of a site")
    return tuple(names) or 0


# Privacy depends on the clip bound, which is computed in floating point. This range is far from
# overflow and underflow.
SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6


def _check_clip(value: float) -> float:
    if not SMALLEST_CLIP <= value <= LARGEST_CLIP:
        raise ValueError(f"must be a clip from {SMALLEST_CLIP:g} to {LARGEST_CLIP:g}")
    return value


def _check_feature_clip(value: float) -> float:
    if value and not SMALLEST_CLIP <= value <= LARGEST_CLIP:
        raise ValueError(
            f"must be 0 (all features get norm one) or a clip from {SMALLEST_CLIP:g} to "
            f"{LARGEST_CLIP:g}"
        )
    return value


_CLIPS = f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:.0f}"
Clip = Annotated[float, AfterValidator(_check_clip), Range(_CLIPS)]
# DP-SGD, in every section that has it.
GradientClip = Annotated[
    Clip,
    Field(
        description="Largest norm of one record's gradient under privacy; longer ones are "
        "shortened."
    ),
]
SampleRate = Annotated[
    float,
    Field(
        ge=1e-6,
        le=1,
        description="Probability that a record takes part in a private training step.",
    ),
]
NoiseMultiplier = Annotated[
    float,
    Field(
        ge=0,
        description="Noise of a private step as a multiple of the clip; 0 derives it, so that all "
        "rounds spend epsilon.",
    ),
]
FeatureClip = Annotated[float, AfterValidator(_check_feature_clip), Range(f"0, or {_CLIPS}")]


def _check_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return value


Device = Annotated[str, AfterValidator(_check_device), Range("auto, cpu, cuda or cuda:N")]
Covariance = Literal["full", "diag", "spherical", "lowrank", "gram"]
AnyCovariance = Literal["auto", "full", "diag", "spherical", "lowrank", "gram"]
DataKind = Literal["digits", "imagefolder", "dicom", "parquet", "safetensors", "slides"]
Defence = Literal["auto", "none", "harm", "median", "trimmed", "screen"]
Model = Literal["linear", "mlp", "convnet"]
Seconds = Annotated[float, Unit("seconds")]
MiB = Annotated[int, Unit("MiB")]
Pixels = Annotated[int, Unit("pixels")]
Rounds = Annotated[int, Unit("rounds")]
Steps = Annotated[int, Unit("steps")]
Records = Annotated[int, Unit("records")]
Epochs = Annotated[int, Unit("passes")]


def _check_augmentations(names: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [name for name in names if name not in AUGMENTATIONS]:
        raise ValueError(f"no augmentation {wrong[0]!r}; use {', '.join(AUGMENTATIONS)}")
    return names


AUGMENTATIONS = ("colour", "crop", "cutout", "flip", "scale", "rotate")
Augmentations = Annotated[
    Names, AfterValidator(_check_augmentations), Range(f"some of {', '.join(AUGMENTATIONS)}")
]


class Section(BaseModel):
    """Base class of all settings: frozen, strict types, dashes in keys, no unknown keys. The text below
    a field says what it means; only the help reads it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True
    )


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
        if renamed.SETTINGS.get(key, key) in known and (why := renamed.renamed_setting(key, value)):
            complaints.append(why)
            continue
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
    "tuple_type": "must be one text of names separated by commas, in quotes",
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
    if message.startswith("must be a") and re.fullmatch(r"[+-]?[0-9]*,[0-9]+", str(error["input"])):
        message = f"a number has a point: {error['input'].replace(',', '.')}"
    return f"{key} = {short(error['input'])}: {message}" if key else message


def short(value: object) -> str:
    """A wrong value for an error message."""
    shown = repr(value[: LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."


def parse_overrides(texts: Sequence[str]) -> dict[str, Scalar]:
    """Parse settings as a person types them.

    Args:
        texts: each 'method=fedpft classes=no,yes seed=3', or the name of a file: TOML, or lines of
            key=value. A string needs quotes only where it could be read as something else, as in
            `flwr run --run-config`, which wants them around every string. Later texts win.

    Returns:
        The values by key.

    Raises:
        ConfigError: with the part that cannot be read.

    Example:
        >>> parse_overrides(["method=fedpft classes=no,yes seed=3 compare=True"])
        {'method': 'fedpft', 'classes': 'no,yes', 'seed': 3, 'compare': True}
    """
    flat: dict[str, Scalar] = {}
    for text in texts:
        flat |= _pairs(text) if "=" in text or not text.strip() else _file_of_settings(text.strip())
    check_epsilon_given(flat)
    return flat


def settings_text(flat: Mapping[str, Scalar]) -> str:
    """Settings in the form that `parse_overrides` and Flower read."""
    text = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in flat.items())
    # TOML escapes one character more than JSON.
    return text.replace("\x7f", "\\u007f")


def _file_of_settings(name: str) -> dict[str, Scalar]:
    try:
        content = Path(name).expanduser().read_text("utf-8-sig")
    except (OSError, ValueError):
        raise ConfigError(
            f"cannot read {short(name)}: it has no = and is no file that can be read; write "
            "key=value pairs, such as 'method=fedpft seed=1', or the name of a file of settings or of a preset"
        ) from None
    try:
        return flatten(tomllib.loads(content))
    except tomllib.TOMLDecodeError:
        lines = (line for line in content.splitlines() if not line.lstrip().startswith("#"))
        return _pairs(" ".join(lines))


def _pairs(text: str) -> dict[str, Scalar]:
    if rest := re.sub(_PAIR, "", text).strip():
        raise ConfigError(
            f"cannot read {short(rest)} in {short(text)}; write key=value pairs, a string with blanks "
            "in quotes: 'method=fedpft data-dir=\"/my data\"'"
        )
    return {key: parse_value(key, value) for key, value in re.findall(_PAIR, text)}


def parse_value(key: str, text: str) -> Any:
    """A value as a person types it, TOML or a plain string. Raises ConfigError where it could be
    either.
    """
    if text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    plain = not re.search(r"""["'\[\]{}=#]""", text)
    if plain or text[:1] in "\"'[":
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
            if isinstance(value, str | int | float | list):
                return value
    if not plain:
        raise ConfigError(
            f"cannot read {key}={short(text)}; a string with a quote, a bracket, = or # needs quotes: "
            f'{key}="..."'
        )
    return text


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


_PAIR = r"""([A-Za-z0-9_.-]+)=('[^']*'|"(?:[^"\\]|\\.)*"|\S+)"""


def check_method(name: object) -> None:
    """Raise ConfigError for a method that is gone: with the version that has it, and what to use."""
    if name in renamed.GONE_METHODS:
        raise ConfigError(
            f"method = {name!r} is gone: version 0.2.0 is the last that runs it and learns from its "
            "runs; use method = 'fedpft' with fedpft.covariance = 'gram'"
        )


def without_gone(flat: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settings without those that are gone and asked for nothing.

    Args:
        flat: by key.

    Raises:
        ConfigError: for a method that is gone, and for a setting that asked for something; it says
            what to use instead.
    """
    check_method(flat.get("method"))
    for key, value in flat.items():
        why = next((said for *pair, said in renamed.GONE_VALUES if pair == [key, value]), "")
        if key in renamed.GONE_SETTINGS and value != renamed.GONE_SETTINGS[key][0]:
            why = renamed.GONE_SETTINGS[key][1]
        if why:
            raise ConfigError(f"{key} = {value!r} asks for what is gone: {why}")
    return {key: value for key, value in flat.items() if key not in renamed.GONE_SETTINGS}
