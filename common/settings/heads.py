"""Settings of features, heads, targets and counts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..backbones.power_transform import LARGEST_POWER
from ..escapes import check_ranges
from ..identity import normal
from ..image_histograms import HISTOGRAMS, read_bins
from .base import Epochs, Name, Names, Only, Range, Records, Section, Steps, Unit


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


def _channels(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(float(part) for part in value.split(",")) if value else ()


def _three(value: tuple[float, ...]) -> tuple[float, ...]:
    if len(value) not in (0, 3) or not all(0 <= each <= 1 for each in value):
        raise ValueError(f"{len(value)} numbers {value}; give three of 0 to 1, separated by commas")
    return value


# A number for each of the channels red, green and blue.
Channels = Annotated[
    tuple[float, ...],
    BeforeValidator(_channels),
    AfterValidator(_three),
    Range("three numbers of 0 to 1 separated by commas"),
]
# The projection that a run chooses itself.
AUTO = "auto"
# Fewest dimensions that "auto" maps: a difference of few columns may tell classes apart by the mean
# of the columns, which its map leaves out.
FEWEST_MAPPED = 64
# Fewest of which sites keep little of a feature's own mean, and fewest of its length. In eight columns
# generated families gain up to 40 points by the mean and lose none; by the length they lose two, in 16 none.
FEWEST_MEAN, FEWEST_OWN = 8, 16
# Most dimensions that a projection may be asked for.
MOST_DIMENSIONS = 65_536
# How the features of the images of one unit become one record.
Bag = Literal["none", "mean"]


class FeaturesSettings(Section):
    """What is done with all features first (section `features.`).

    Attributes:
        power_transform: Power transform of every feature, sign(x) |x|^p; auto is 0.5 for backbones
            that end in a ReLU, otherwise 1; and 1 where each site adds noise of its own to clipped
            features.
        bag: Whether many images of one unit, such as the slices of a study, are one record: none,
            or the mean of their features after the power transform; a site's bag-column says which
            images these are.
        ranges: Lowest and highest value of each feature, known in public: features are moved and
            scaled from these to -1 and 1 first, where sites send sums or train by FedAvg; empty
            leaves them as they are.
        mean: Mean of each channel of the backbone's images, in 0 to 1; empty for that of the
            backbone's files, which ONNX files do not have.
        std: Standard deviation of each channel, as features.mean.
        pooling: What becomes of the tokens of an image: the class token, the mean of the patches,
            or both one after the other; auto takes what the backbone's files say.
        projection: Public map before noise, in secure aggregation a file with a projection or a
            head; auto gives the mean over columns a small weight, and there projects to the
            backbone's head or random directions; empty for none.
        dimensions: Most dimensions after the projection; 0 chooses them from features.records and
            the distributed noise.
        records: Training records of all sites, as far as known in public, for features.dimensions =
            0 and, with epsilon, fedpft.covariance = 'auto'.
        digest: SHA-256 of the projection and of the public mean that sites receive, by
            fedpft.public and features.projection; `coordinator run`, `approval propose`, `offline
            request` and `exchange` compute it.
    """

    power_transform: Power = "auto"
    bag: Bag = "none"
    ranges: Annotated[
        str, AfterValidator(check_ranges), Range("low,high; for several columns low,high; low,high")
    ] = ""
    mean: Channels = ()
    std: Channels = ()
    pooling: Literal["auto", "cls", "mean", "both"] = "auto"
    projection: Annotated[str, Only("fedpft")] = AUTO
    dimensions: Annotated[int, Only("fedpft"), Unit("dimensions")] = Field(
        0, ge=0, le=MOST_DIMENSIONS
    )
    records: Annotated[Records, Only("fedpft")] = Field(10_000, ge=1, le=10**9)

    digest: str = Field("", pattern=r"^([0-9a-f]{128})?$")

    @property
    def given_projection(self) -> str:
        """The file of the projection; empty where none is given."""
        return "" if self.projection == AUTO else self.projection


def _check_shrinkage(value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "auto" or (number and 0 <= value <= 1):  # type: ignore[operator]
        return value
    raise ValueError("must be 'auto', or a number from 0 to 1")


Shrinkage = Annotated[
    float | Literal["auto"], BeforeValidator(_check_shrinkage), Range("auto; else 0 to 1")
]


# The default learning rate of a head: the most that a step changes a score of a record of mean size,
# and the least rate, of backbones. On held-out halves of Iris, wine, breast cancer and digits, heads
# with this rate are as accurate as logistic regression; with 0.001 they were 1 to 15 points below.
STEP_OF_A_SCORE, LEAST_RATE = 0.5, 1e-3
# From so many features on it is the least rate.
MANY_COLUMNS = round(STEP_OF_A_SCORE / LEAST_RATE)


class HeadSettings(Section):
    """Settings for the training of a linear head (section `head.`).

    Attributes:
        epochs: Fewest passes over the records in the training of a head.
        min_steps: Fewest training steps of a head; passes are added to reach them.
        batch_size: Records in one training step of a head.
        learning_rate: Learning rate of a head; 0 for 0.5 over the number of features, but at least
            0.001.
        max_samples: Most synthetic features that are drawn from surrogates to train one head.
        solver: How the head is found: in closed form (lda, ridge, naive-bayes, qda), from samples
            (sampled), or in rounds of noisy sums (logistic); auto is logistic for secure
            aggregation with epsilon, else what suits the statistics.
        shrinkage: Share of the mean variance in the covariance of a closed-form head; auto follows
            from the sites' statistics.
    """

    epochs: Epochs = Field(10, ge=1, le=10_000)
    min_steps: Steps = Field(400, ge=0)
    batch_size: Records = Field(256, ge=1)
    learning_rate: float = Field(0.0, ge=0, le=10)
    max_samples: Records = Field(1_000_000, ge=1)
    solver: Annotated[
        Literal["auto", "lda", "ridge", "naive-bayes", "qda", "sampled", "logistic"], Only("fedpft")
    ] = "auto"
    shrinkage: Annotated[Shrinkage, Only("fedpft")] = "auto"

    def passes(self, batches: int, times: int = 1) -> int:
        """Number of passes over data of `batches` batches: `epochs`, or more to reach `times` times
        `min_steps` steps.
        """
        return max(self.epochs, -(-times * self.min_steps // batches))

    def rate(self, dimension: int) -> float:
        """The learning rate, or the default for this number of features.

        A step of Adam moves each weight by at most the rate, and so a score by at most the rate
        times the number of features: with few features, a small rate ends before it has arrived.

        Args:
            dimension: number of features, d.

        Example:
            >>> [HeadSettings().rate(d) for d in (5, 50, 1280)]
            [0.1, 0.01, 0.001]
            >>> HeadSettings(learning_rate=0.02).rate(5)
            0.02
        """
        return self.learning_rate or max(LEAST_RATE, STEP_OF_A_SCORE / max(1, dimension))


class BaselineSettings(Section):
    """Settings of the baseline methods that FedPFT is compared with (section `baseline.`).

    Attributes:
        temperature: Temperature of the received head in knowledge distillation.
        validation: Share of a site's training records with which it chooses its mixing weight.
    """

    temperature: Annotated[float, Only("kd")] = Field(5.0, gt=0)
    validation: Annotated[float, Only("fedlambda", "knn-per", "dpcvae", "dpcgan")] = Field(
        0.2, gt=0, lt=1
    )


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
        listed = tuple(filter(None, map(normal, names.split(","))))
        if not (equals and site.strip() and listed) or site.strip() in found:
            raise ValueError(f"{part[:60]!r}: write each site once, as 'site=label,label'")
        found[site.strip()] = listed
    return found


def _check_sets(text: str) -> str:
    label_sets(text)
    return text


class TargetSettings(Section):
    """What a run learns of a record.

    Attributes:
        task: What a run learns of a record: its class, labels of which each is present or absent
            (multilabel), one or several numbers, or the time to an event (survival).
        target_range: Lowest and highest value of a number, known in public; values beyond it count
            as its ends.
        value_columns: Columns of the numbers that are learned, with task regression.
        label_columns: Columns of the labels that are learned, with task multilabel: 1, 0, or empty
            where a record is not annotated.
        label_sets: Labels that each site annotates; empty where all annotate all.
        time_column: Column of the time to the event or to the end of observation.
        event_column: Column that says whether the event was observed: 1, or 0.
        horizon: Time up to which survival is learned, with task survival.
        bins: Equal parts of the time to the horizon; 0 for 20, or 10 under privacy, of which the
            last is four times as wide as the first.
        time_head: How risks are learned: from cells in one round, or from residuals in two; auto is
            residuals where each site's own sums are shown, else cells.
        time_unit: Unit of the times, such as years, for people.
    """

    task: Annotated[str, Range("classification, multilabel, regression or survival")] = (
        "classification"
    )
    target_range: Annotated[
        str, AfterValidator(check_ranges), Range("low,high; for several columns low,high; low,high")
    ] = ""
    value_columns: Names = ()
    label_columns: Names = ()
    label_sets: Annotated[
        str, AfterValidator(_check_sets), Range("site=label,label; site=label")
    ] = ""
    time_column: Name = ""
    event_column: Name = ""
    horizon: Annotated[float, Unit("time-unit")] = Field(0.0, ge=0, le=1e15)
    bins: Annotated[int, Unit("bins")] = Field(0, ge=0, le=1000)
    time_head: Literal["auto", "cells", "residuals"] = "auto"
    time_unit: str = Field("", max_length=40)


def _check_images(names: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [name for name in names if name not in HISTOGRAMS]:
        raise ValueError(f"no histogram {wrong[0]!r}; use {', '.join(HISTOGRAMS)}")
    return names


def _check_bins(text: str) -> str:
    read_bins(text)
    return text


class CountingSettings(Section):
    """Settings of a run that counts. `coordinator evaluate` and `coordinator survey` set them.

    Attributes:
        kind: What the sites count instead of learning: decisions of a model on held-out records
            (evaluation), or records of each class (survey); none for a run that learns.
        model: Run folder or signed model file that is evaluated; the coordinator reads it.
        digest: SHA-256 of that model, so that all sites evaluate the same one.
        bins: Bins of each histogram of probabilities in an evaluation.
        largest_error: Errors of a number beyond this share of its range count as this share;
            `coordinator evaluate` sets four of the deviations that the model states, since noise
            grows with it.
        images: Histograms of the images that a survey also counts at each site; `coordinator survey
            --images` sets them.
        image_bins: Cells of some of these histograms in place of the usual ones, such as 'size:
            512, 1024; maker: Siemens, Acme'; public, so never taken from records.
    """

    kind: Literal["none", "evaluation", "survey"] = "none"
    model: str = ""
    digest: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    bins: Annotated[int, Unit("bins")] = Field(16, ge=4, le=256)
    largest_error: Annotated[float, Unit("share of target-range")] = Field(1.0, gt=0, le=1)
    images: Annotated[
        Names, AfterValidator(_check_images), Range(f"some of {', '.join(HISTOGRAMS)}")
    ] = ()
    image_bins: Annotated[
        str, AfterValidator(_check_bins), Range("cells by histogram, such as size: 512, 1024")
    ] = ""
