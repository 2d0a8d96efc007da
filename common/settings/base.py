"""The base class of all settings, and the types that several sections share: lists, clips, units
and ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedsurrogate.common.identity import name_of, normal


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
    return _split(value, str.strip) if isinstance(value, str) else value


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
DataKind = Literal["digits", "imagefolder", "dicom", "parquet", "safetensors"]
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
    """Base class of all settings: frozen, strict types, dashes in keys, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True
    )
