"""Settings of runs that count records at the sites instead of learning (section `counting.`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsurrogate.common.settings.base import Section, Unit


class CountingSettings(Section):
    """Settings of a run that counts. `coordinator evaluate` and `coordinator survey` set them."""

    kind: Literal["none", "evaluation", "survey"] = Field(
        "none",
        description="What the sites count instead of learning: decisions of a model on held-out "
        "records (evaluation), or records of each class (survey); none for a run that learns.",
    )
    model: str = Field(
        "",
        description="Run folder or signed model file that is evaluated; the coordinator reads it.",
    )
    digest: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="SHA-256 of that model, so that all sites evaluate the same one.",
    )
    bins: Annotated[int, Unit("bins")] = Field(
        16, ge=4, le=256, description="Bins of each histogram of probabilities in an evaluation."
    )
    largest_error: Annotated[float, Unit("share of target-range")] = Field(
        1.0,
        gt=0,
        le=1,
        description="Errors of a number beyond this share of its range count as this share; "
        "`coordinator evaluate` sets four of the deviations that the model states, since noise "
        "grows with it.",
    )
