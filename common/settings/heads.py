"""Settings of linear heads, and of the methods that train them at the sites."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedsurrogate.common.settings.base import Epochs, Only, Range, Records, Section, Steps, Unit


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
    """Settings for the training of a linear head (section `head.`)."""

    epochs: Epochs = Field(
        10, ge=1, le=10_000, description="Fewest passes over the records in the training of a head."
    )
    min_steps: Steps = Field(
        400, ge=0, description="Fewest training steps of a head; passes are added to reach them."
    )
    batch_size: Records = Field(256, ge=1, description="Records in one training step of a head.")
    learning_rate: float = Field(
        0.0,
        ge=0,
        le=10,
        description=(
            "Learning rate of a head; 0 for 0.5 over the number of features, but at least 0.001."
        ),
    )
    max_samples: Records = Field(
        1_000_000,
        ge=1,
        description="Most synthetic features that are drawn from surrogates to train one head.",
    )
    solver: Annotated[
        Literal["auto", "lda", "ridge", "naive-bayes", "qda", "sampled", "logistic"], Only("fedpft")
    ] = Field(
        "auto",
        description=(
            "How the head is found: in closed form (lda, ridge, naive-bayes, qda), from samples "
            "(sampled), or in rounds of noisy sums (logistic); auto is logistic for a secure sum with "
            "epsilon, else what suits the statistics."
        ),
    )
    shrinkage: Annotated[Shrinkage, Only("fedpft")] = Field(
        "auto",
        description=(
            "Share of the mean variance in the covariance of a closed-form head; auto follows from "
            "the sites' statistics."
        ),
    )

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
    """Settings of the baseline methods that FedPFT is compared with (section `baseline.`)."""

    temperature: Annotated[float, Only("kd")] = Field(
        5.0, gt=0, description="Temperature of the received head in knowledge distillation."
    )
    received: Annotated[float, Only("kd")] = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the received head's predictions in the distillation loss.",
    )
    samples: Annotated[int, Only("fedbe"), Unit("heads")] = Field(
        15, ge=1, description="Heads that the coordinator draws in FedBE."
    )
    teachers: Annotated[int, Only("fedkt"), Unit("heads")] = Field(
        5, ge=1, description="Heads that a site of FedKT trains."
    )
    synthetic: Annotated[Records, Only("fedbe", "fedkt")] = Field(
        10_000,
        ge=1,
        description="Synthetic features that the coordinator labels with the sites' heads.",
    )
    neighbours: Annotated[int, Only("knn-per"), Unit("records")] = Field(
        10, ge=1, description="Nearest records whose labels are mixed with the model's prediction."
    )
    validation: Annotated[float, Only("fedlambda", "knn-per", "dpcvae", "dpcgan")] = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of a site's training records with which it chooses its mixing weight.",
    )
