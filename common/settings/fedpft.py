"""Settings of FedPFT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsurrogate.common.settings.base import (
    AnyCovariance,
    FeatureClip,
    Names,
    Records,
    Section,
    Unit,
)


class FedPFTSettings(Section):
    """Settings of FedPFT: the surrogate that a site fits to its features (section `fedpft.`)."""

    covariance: AnyCovariance = Field(
        "auto",
        description=(
            "Form of the covariance of a Gaussian; lowrank is one diagonal and a thin factor for all "
            "classes, gram one matrix for all classes; auto is gram up to 2,048 dimensions, and "
            "follows from public numbers with epsilon."
        ),
    )
    components: Annotated[int, Unit("Gaussians")] = Field(
        1,
        ge=1,
        le=1000,
        description="Gaussians for each class; a class with few records gets fewer.",
    )
    rank: Annotated[int, Unit("columns")] = Field(
        0,
        ge=0,
        le=4096,
        description="Columns of the thin factor of a lowrank covariance; 0 is 16, and 64 where "
        "covariance is auto.",
    )
    bits: Annotated[Literal[0, 16, 8], Unit("bits")] = Field(
        0,
        description="Bits of an entry of that factor in a message; all else has 16. 0 is 16, and 8 "
        "where covariance is auto.",
    )
    samples_per_component: Records = Field(
        10,
        ge=1,
        description="Fewest records for each Gaussian, and for each column of a lowrank "
        "covariance.",
    )
    privacy: Literal["auto", "none", "sums", "theorem-4.1"] = Field(
        "auto",
        description="Privacy mechanism under a budget; auto is noisy sums; theorem-4.1 is the "
        "paper's, which protects less.",
    )
    clip: FeatureClip = Field(
        0.0,
        description="Number that divides private features, or their norm if that is larger; 0 "
        "gives all features norm one.",
    )
    public: str = Field(
        "",
        description="File of public features, whose mean is subtracted from the features of every "
        "site under privacy.",
    )
    topology: Literal["star", "chain"] = Field(
        "star",
        description="Whether all sites send to the coordinator (star), or each extends the "
        "surrogate of the last (chain).",
    )
    order: Names = Field(
        (), description="Names of the sites in the order of a chain; empty for a random order."
    )
    seal: bool = Field(
        False, description="Whether a chain's surrogates are encrypted for the next sites."
    )
