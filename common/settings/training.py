"""Settings of FedAvg and related methods."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsurrogate.common.settings.base import (
    Augmentations,
    Epochs,
    GradientClip,
    Model,
    NoiseMultiplier,
    Only,
    Records,
    Rounds,
    SampleRate,
    Section,
    Unit,
)


class FedAvgSettings(Section):
    """Settings of FedAvg and related methods: sites train one model in rounds (section `fedavg.`)."""

    model: Model | Literal["auto"] = Field(
        "auto",
        description=(
            "Network: a linear layer, one hidden layer (mlp), or FedLAP's ConvNet on square "
            "images; auto is linear, and mlp for a method that shares only what lies below the "
            "head."
        ),
    )
    width: Annotated[int, Unit("units or channels")] = Field(
        128, ge=1, le=1024, description="Units of the hidden layer, or channels of the ConvNet."
    )
    rounds: Rounds = Field(
        0,
        ge=0,
        le=100_000,
        description="Rounds of training; 0 for 10, or 20 to 30 with joint noise (see "
        "fedavg.noise).",
    )
    local_epochs: Epochs = Field(
        5, ge=1, le=10_000, description="Passes over a site's records in a round."
    )
    batch_size: Records = Field(
        64,
        ge=1,
        description="Records in a training step; under privacy the public number that a step's "
        "sum is divided by.",
    )
    learning_rate: float = Field(
        0.0,
        ge=0,
        le=1e4,
        description=(
            "Learning rate at a site, for a linear model over the mean squared norm of its "
            "features; 0 for 30 if linear (3 under privacy), otherwise 0.1. With joint noise, of "
            "the coordinator's step; 0 for 3 a class if linear."
        ),
    )
    momentum: Annotated[
        float, Only("fedavg", "fedprox", "fedyogi", "fedsgd", "dsfl", "fedlambda", "knn-per")
    ] = Field(0.0, ge=0, lt=1, description="Momentum of the training steps at a site.")
    mu: Annotated[float, Only("fedprox", "dp-fedprox")] = Field(
        0.01,
        ge=0,
        description="Weight of FedProx's term, which keeps a site's model close to the received "
        "one.",
    )
    server_learning_rate: Annotated[float, Only("fedyogi")] = Field(
        0.03, gt=0, description="Learning rate of the coordinator in FedYogi."
    )
    keep: Annotated[float, Only("dsfl")] = Field(
        0.5, gt=0, le=1, description="Share of an update's entries, the largest, that DSFL sends."
    )
    clip: GradientClip = 1.0
    sample_rate: SampleRate = 0.05
    noise_multiplier: NoiseMultiplier = 0.0
    noise: Annotated[Literal["joint", "site"], Only("dp-fedavg")] = Field(
        "joint",
        description=(
            "Noise in a secure sum: joint for all sites, in one step a round over all their "
            "records, or that of DP-SGD at every site."
        ),
    )
    augment: Annotated[
        Augmentations, Only("fedavg", "fedprox", "fedyogi", "fedsgd", "scaffold")
    ] = Field((), description="Random changes of the images in training; only for a ConvNet.")

    @property
    def kind(self) -> Model:
        """The network. Without a run's configuration, which resolves "auto", a linear layer."""
        return "linear" if self.model == "auto" else self.model

    def rate(self, private: bool, linear: float = 0.0) -> float:
        """The learning rate, or the model's default.

        Args:
            private: whether of a step of DP-SGD.
            linear: default of a linear model of another target than classes; 0 for classes.
        """
        usual = linear or (3.0 if private else 30.0) if self.kind == "linear" else 0.1
        return self.learning_rate or usual

    def joint_rate(self, classes: int, linear: float = 0.0) -> float:
        """The learning rate of the coordinator's step with joint noise.

        Args:
            classes: of the run.
            linear: as in `rate`.

        The curvature of softmax regression on features of norm one is at most about 1.1 / classes
        (the 0.1 is of the bias). Steps with momentum 0.9 diverge there at a rate of 3.5 a class.
        """
        return self.learning_rate or (linear or 3.0 * classes if self.kind == "linear" else 0.1)

    @property
    def private_steps(self) -> int:
        """Steps of a private round. On average they use every record `local_epochs` times."""
        return max(1, round(self.local_epochs / self.sample_rate))
