"""Settings of the generators of embeddings."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedsurrogate.common.settings.base import (
    Epochs,
    GradientClip,
    NoiseMultiplier,
    Only,
    Records,
    Rounds,
    SampleRate,
    Section,
    Unit,
)


class DPCVAESettings(Section):
    """Settings of DP-CVAE and DP-CGAN: sites train a generator of embeddings together (section
    `dpcvae.`).

    Optimisers begin anew in every round.
    """

    rounds: Rounds = Field(
        11,
        ge=2,
        le=100_000,
        description="Rounds; the first releases class sizes, the others train.",
    )
    opening: Literal["sums", "counts"] = Field(
        "sums",
        description="What the first round releases: the size of every class (counts), or also the "
        "sum of its embeddings.",
    )
    opening_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the budget for the first round; 0 for 4 / (4 + epsilon) with sums, "
        "0.05 with counts.",
    )
    latent: Annotated[int, Unit("dimensions")] = Field(
        0,
        ge=0,
        le=4096,
        description="Dimension of the latent vector z; 0 for 32, or 8 under privacy.",
    )
    hidden: Annotated[int, Only("dpcvae"), Unit("units")] = Field(
        0, ge=0, le=8192, description="Width of the three layers on each side; 0 for linear maps."
    )
    learned_variance: Annotated[bool, Only("dpcvae")] = Field(
        True,
        description="Whether the decoder learns a variance for each dimension of the embeddings.",
    )
    class_prior: Annotated[bool, Only("dpcvae")] = Field(
        True, description="Whether each class has its own Gaussian prior of z."
    )
    beta: Annotated[float, Only("dpcvae")] = Field(
        1.0, ge=0, le=1e4, description="Weight of the divergence between posterior and prior."
    )
    warm_up: Annotated[float, Only("dpcvae")] = Field(
        0.3,
        ge=0,
        le=1,
        description="Share of the rounds over which the weight of the divergence rises to beta.",
    )
    local_epochs: Epochs = Field(
        5, ge=1, le=10_000, description="Passes over a site's records in a round."
    )
    batch_size: Records = Field(
        256, ge=1, description="Records in a training step without privacy."
    )
    optimiser: Annotated[Literal["adam", "sgd"], Only("dpcvae")] = Field(
        "adam", description="Optimiser at a site."
    )
    learning_rate: float = Field(
        0.0, ge=0, le=1e4, description="Learning rate at a site; 0 for the optimiser's default."
    )
    cosine: bool = Field(True, description="Whether the learning rate is annealed over the rounds.")
    weights: Literal["records", "equal"] = Field(
        "records",
        description="Weight of a site in the average: its reported number of records, or one.",
    )
    clip: GradientClip = 0.1
    sample_rate: SampleRate = 1.0
    noise_multiplier: NoiseMultiplier = 0.0
    synthetic: Records = Field(
        1000,
        ge=1,
        le=100_000,
        description="Synthetic embeddings of each class that evaluate the generator.",
    )

    def latents(self, private: bool) -> int:
        """The dimension of z."""
        return self.latent or (8 if private else 32)

    def share(self, epsilon: float) -> float:
        """The first round's share of the budget 1 / noise_multiplier^2."""
        return self.opening_share or (4 / (4 + epsilon) if self.opening == "sums" else 0.05)

    def rate(self, round: int, rounds: int, usual: float) -> float:
        """The learning rate in a round, counted from one, of so many as the run has; `usual` if none
        is set.
        """
        done = (round - 2) / max(1, rounds - 1)
        return (self.learning_rate or usual) * (
            (1 + math.cos(math.pi * done)) / 2 if self.cosine else 1.0
        )

    def weight_of_divergence(self, round: int, rounds: int) -> float:
        """beta in a round, counted from one, of so many as the run has."""
        return self.beta * min(1.0, (round - 1) / max(1e-9, self.warm_up * (rounds - 1)))

    @property
    def private_steps(self) -> int:
        """Steps of a private round. On average they use every record `local_epochs` times."""
        return max(1, round(self.local_epochs / self.sample_rate))
