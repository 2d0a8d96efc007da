"""Settings of the features that every method uses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fedsurrogate.common.backbones.feature_power import LARGEST_POWER
from fedsurrogate.common.ranges import check_ranges
from fedsurrogate.common.settings.base import Only, Range, Records, Section, Unit


def _check_power(value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "auto" or (number and 0 < value <= LARGEST_POWER):  # type: ignore[operator]
        return value
    raise ValueError(f"must be 'auto', or a number above 0 and at most {LARGEST_POWER:g}")


Power = Annotated[
    float | Literal["auto"],
    BeforeValidator(_check_power),
    Range(f"auto; else above 0 to {LARGEST_POWER:g}"),
]

# The projection that a run chooses itself.
AUTO = "auto"
# Fewest dimensions that "auto" maps: a difference of few columns may tell classes apart by the mean
# of the columns, which its map leaves out.
FEWEST_MAPPED = 64
# Most dimensions that a projection may be asked for.
MOST_DIMENSIONS = 65_536
# How the features of the images of one unit become one record.
Bag = Literal["none", "mean"]


class FeaturesSettings(Section):
    """What is done with all features first (section `features.`)."""

    power: Power = Field(
        "auto",
        description="Power of every feature, with its sign; auto is 0.5 for backbones that end in "
        "a ReLU, otherwise 1; and 1 where each site adds noise of its own to clipped features.",
    )
    bag: Bag = Field(
        "none",
        description="Whether many images of one unit, such as the slices of a study, are one "
        "record: none, or the mean of their features after power; a site's bag-column says which "
        "images these are.",
    )
    ranges: Annotated[
        str,
        AfterValidator(check_ranges),
        Range("low,high; for several columns low,high; low,high"),
    ] = Field(
        "",
        description="Lowest and highest value of each feature, known in public: features are moved "
        "and scaled from these to -1 and 1 first, where sites send sums or train by FedAvg; empty "
        "leaves them as they are.",
    )
    projection: Annotated[str, Only("fedpft")] = Field(
        AUTO,
        description="Public map before noise, in a secure sum a file with a projection or a head; auto "
        "leaves out the mean of a record's columns, and projects secure sums to the backbone's own head "
        "or random directions; empty for none.",
    )
    dimensions: Annotated[int, Only("fedpft"), Unit("dimensions")] = Field(
        0,
        ge=0,
        le=MOST_DIMENSIONS,
        description="Most dimensions after the projection; 0 chooses them from features.records "
        "and the joint noise.",
    )
    records: Annotated[Records, Only("fedpft")] = Field(
        10_000,
        ge=1,
        le=10**9,
        description="Training records of all sites, as far as known in public, for "
        "features.dimensions = 0 and, with epsilon, fedpft.covariance = 'auto'.",
    )

    digest: str = Field(
        "",
        pattern=r"^([0-9a-f]{128})?$",
        description="SHA-256 of the projection and of the centre that sites receive, by fedpft.public and "
        "features.projection; `coordinator propose`, `run`, `request` and `exchange` compute it.",
    )

    @property
    def given_projection(self) -> str:
        """The file of the projection; empty where none is given."""
        return "" if self.projection == AUTO else self.projection
