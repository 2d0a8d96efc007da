"""Settings of FedLAP."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedsurrogate.common.settings.base import (
    Augmentations,
    GradientClip,
    Model,
    Only,
    Records,
    Rounds,
    Section,
    Steps,
    Unit,
)


class FedLAPSettings(Section):
    """Settings of FedLAP: synthetic images at the sites, learning at the coordinator (section
    `fedlap.`).
    """

    model: Model | Literal["auto"] = Field(
        "auto",
        description=(
            "Network: a linear layer, one hidden layer (mlp), or the ConvNet on square images; "
            "auto is the ConvNet for a backbone of pixels with an image-size above 8, otherwise "
            "mlp."
        ),
    )
    width: Annotated[int, Unit("units or channels")] = Field(
        32, ge=1, le=1024, description="Units of the hidden layer, or channels of the ConvNet."
    )
    rounds: Rounds = Field(5, ge=1, le=100_000, description="Rounds of training.")
    images_per_class: Annotated[int, Unit("images")] = Field(
        10, ge=1, le=10_000, description="Synthetic images of each class that a site sends."
    )
    labels: Literal["auto", "present", "all"] = Field(
        "auto",
        description=(
            "Classes of the images: the site's (present), or all of the run, which hides a site's "
            "own; auto is all under privacy, otherwise present."
        ),
    )
    start: Literal["noise", "last"] = Field(
        "last",
        description="Whether images start from noise in every round, or from those of the last "
        "round.",
    )
    trajectories: Annotated[int, Unit("trajectories")] = Field(
        1,
        ge=1,
        le=1000,
        description="Trajectories of the model along which images are fitted; R_i in the paper.",
    )
    loops: Annotated[int, Unit("loops")] = Field(
        1, ge=1, le=1000, description="Most loops in a trajectory; five in the paper."
    )
    batches: Annotated[int, Unit("batches")] = Field(
        1, ge=1, le=100_000, description="Batches of real records in a loop."
    )
    batch_size: Records = Field(
        0,
        ge=0,
        description="Records in a batch; 0 for all at once; under privacy the public number that "
        "a sum is divided by.",
    )
    image_steps: Steps = Field(
        0,
        ge=0,
        le=100_000,
        description=(
            "Steps of the images to match the gradient of a batch, R_b in the paper; 0 for 40 with "
            "a ConvNet without privacy, otherwise 100."
        ),
    )
    model_steps: Steps = Field(
        0,
        ge=0,
        le=100_000,
        description="Steps of the model on the images at the end of a loop; R_l in the paper.",
    )
    trust_radius: float = Field(
        10.0,
        gt=0,
        le=1e6,
        description="Largest distance of the model from its start in a round; r in the paper.",
    )
    image_learning_rate: float = Field(
        100.0, gt=0, le=1e6, description="Learning rate of the images."
    )
    image_momentum: float = Field(
        0.5, ge=0, lt=1, description="Momentum of the steps of the images."
    )
    mse_weight: float = Field(
        -1.0,
        le=1e6,
        description=(
            "Weight of the squared error next to the cosine in the distance of gradients, 0.1 in "
            "the paper; negative for 1 with a ConvNet, 0.1 with another network, and 0 under "
            "privacy."
        ),
    )
    learning_rate: float = Field(
        0.1,
        gt=0,
        le=1e4,
        description="Learning rate of the model in round 1, annealed over the steps of every "
        "round.",
    )
    cosine: bool = Field(
        False,
        description=(
            "Whether the learning rate falls as a cosine that ends with the last round, as in the "
            "paper; otherwise it is divided by the square root of the round."
        ),
    )
    server_steps: Steps = Field(
        100, ge=1, le=100_000, description="Steps of the coordinator in a round."
    )
    rule: Annotated[Literal["min", "median", "max", "fixed"], Only("fedlap")] = Field(
        "median", description="How the radii of the sites become one; fixed is trust-radius."
    )
    descent: Annotated[Literal["annealed", "plain"], Only("fedlap")] = Field(
        "annealed",
        description=(
            "Steps of the coordinator in a round: annealed and kept inside the radius, or plain as in "
            "the paper, at the full rate until the radius is reached; a site then looks for its radius "
            "along all of these steps."
        ),
    )
    memory: float = Field(
        -1.0,
        ge=-1,
        lt=1,
        description=(
            "Share of the coordinator's loss that images of the three rounds before have from "
            "round 2 on, 0 in the paper; negative for 0.33, and 0 under privacy."
        ),
    )
    augment: Augmentations = Field(
        (), description="Random changes of the images in training; only for a ConvNet."
    )
    clip: GradientClip = 0.3
    sample_rate: float = Field(
        1.0,
        ge=1e-6,
        le=1,
        description="Probability that a record takes part in a private gradient.",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        description="Noise of a private gradient as a multiple of the clip; 0 derives it, so that "
        "all rounds spend epsilon.",
    )

    @property
    def kind(self) -> Model:
        """The network. Without a run's configuration, which resolves "auto", that is the ConvNet."""
        return "convnet" if self.model == "auto" else self.model

    @property
    def private_steps(self) -> int:
        """Number of private gradients in one round. All are counted, even if a trajectory stops
        early.
        """
        return self.trajectories * self.loops * self.batches

    def mse(self, private: bool) -> float:
        """The weight of the squared error in the matching loss."""
        if self.mse_weight >= 0 or private:
            return max(self.mse_weight, 0.0)
        return 1.0 if self.kind == "convnet" else 0.1

    def remembered(self, private: bool) -> float:
        """The share of earlier rounds' images in the coordinator's loss."""
        return self.memory if self.memory >= 0 else 0.0 if private else 0.33

    def rate(self, round: int, rounds: int) -> float:
        """The model's learning rate in a round, counted from one, of so many as the run has."""
        if not self.cosine:
            return self.learning_rate / math.sqrt(round)
        return max(self.learning_rate * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2, 1e-6)
