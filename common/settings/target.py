"""Settings of what is learned of a record: a class, labels, numbers, or the time to an event."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedsurrogate.common.identity import Name
from fedsurrogate.common.ranges import check_ranges
from fedsurrogate.common.settings.base import Names, Range, Section, Unit


def label_sets(text: str) -> dict[str, tuple[str, ...]]:
    """The labels that each site annotates.

    Args:
        text: of the setting: "site=label,label; site=label"; empty for none.

    Raises:
        ValueError: for another text.

    Example:
        >>> label_sets("north=edema,fracture; south=edema")
        {'north': ('edema', 'fracture'), 'south': ('edema',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        site, equals, names = part.partition("=")
        listed = tuple(filter(None, map(str.strip, names.split(","))))
        if not (equals and site.strip() and listed) or site.strip() in found:
            raise ValueError(f"{part[:60]!r}: write each site once, as 'site=label,label'")
        found[site.strip()] = listed
    return found


def _check_sets(text: str) -> str:
    label_sets(text)
    return text


class TargetSettings(Section):
    """What a run learns of a record."""

    target: Annotated[str, Range("class, labels, number or time")] = Field(
        "class",
        description="What a run learns of a record: its class, labels of which each is present or "
        "absent, one or several numbers, or the time to an event.",
    )
    target_range: Annotated[
        str,
        AfterValidator(check_ranges),
        Range("low,high; for several columns low,high; low,high"),
    ] = Field(
        "",
        description="Lowest and highest value of a number, known in public; values beyond it count "
        "as its ends.",
    )
    value_columns: Names = Field(
        (), description="Columns of the numbers that are learned, with target number."
    )
    label_columns: Names = Field(
        (),
        description="Columns of the labels that are learned, with target labels: 1, 0, or empty "
        "where a record is not annotated.",
    )
    label_sets: Annotated[
        str, AfterValidator(_check_sets), Range("site=label,label; site=label")
    ] = Field("", description="Labels that each site annotates; empty where all annotate all.")
    time_column: Name = Field(
        "", description="Column of the time to the event or to the end of observation."
    )
    event_column: Name = Field(
        "", description="Column that says whether the event was observed: 1, or 0."
    )
    horizon: Annotated[float, Unit("time-unit")] = Field(
        0.0, ge=0, le=1e300, description="Time up to which survival is learned, with target time."
    )
    bins: Annotated[int, Unit("bins")] = Field(
        0,
        ge=0,
        le=1000,
        description="Equal parts of the time to the horizon; 0 for 20, or 10 under privacy, of which "
        "the last is four times as wide as the first.",
    )
    time_head: Literal["auto", "cells", "residuals"] = Field(
        "auto",
        description="How risks are learned: from cells in one round, or from residuals in two; auto "
        "is residuals where each site's own sums are shown, else cells.",
    )
    time_unit: str = Field(
        "", max_length=40, description="Unit of the times, such as years, for people."
    )
