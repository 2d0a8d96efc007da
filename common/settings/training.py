"""Settings of methods: FedAvg and related ones, FedLAP, generators of embeddings, FedPFT."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from . import base


class FedAvgSettings(base.Section):
    """Settings of FedAvg and related methods: sites train one model in rounds (section `fedavg.`).

    Attributes:
        model: Network: a linear layer, one hidden layer (mlp), or FedLAP's ConvNet on square
            images; auto is linear, and mlp for a method that shares only what lies below the head.
        width: Units of the hidden layer, or channels of the ConvNet.
        rounds: Rounds of training; 0 for 10, or 20 to 30 with distributed noise (see fedavg.noise).
        local_epochs: Passes over a site's records in a round.
        batch_size: Records in a training step; under privacy the public number that a step's sum is
            divided by.
        learning_rate: Learning rate at a site, for a linear model over the mean squared norm of its
            features; 0 for 30 if linear (3 under privacy), otherwise 0.1. With distributed noise,
            of the coordinator's step; 0 for 3 a class if linear.
        momentum: Momentum of the training steps at a site.
        mu: Weight of FedProx's term, which keeps a site's model close to the received one.
        server_learning_rate: Learning rate of the coordinator in FedYogi.
        keep: Share of an update's entries, the largest, that DSFL sends.
        noise: Noise in secure aggregation: distributed over all sites, in one step a round over all
            their records, or that of DP-SGD at every site.
    """

    model: base.Model | Literal["auto"] = "auto"
    width: Annotated[int, base.Unit("units or channels")] = Field(128, ge=1, le=1024)
    rounds: base.Rounds = Field(0, ge=0, le=100_000)
    local_epochs: base.Epochs = Field(5, ge=1, le=10_000)
    batch_size: base.Records = Field(64, ge=1)
    learning_rate: float = Field(0.0, ge=0, le=1e4)
    momentum: Annotated[
        float, base.Only("fedavg", "fedprox", "fedyogi", "fedsgd", "dsfl", "fedlambda", "knn-per")
    ] = Field(0.0, ge=0, lt=1)
    mu: Annotated[float, base.Only("fedprox", "dp-fedprox")] = Field(0.01, ge=0)
    server_learning_rate: Annotated[float, base.Only("fedyogi")] = Field(0.03, gt=0)
    keep: Annotated[float, base.Only("dsfl")] = Field(0.5, gt=0, le=1)
    clip: base.GradientClip = 1.0
    sample_rate: base.SampleRate = 0.05
    noise_multiplier: base.NoiseMultiplier = 0.0
    noise: Annotated[Literal["distributed", "site"], base.Only("dp-fedavg")] = "distributed"

    @property
    def kind(self) -> base.Model:
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

    def distributed_rate(self, classes: int, linear: float = 0.0) -> float:
        """The learning rate of the coordinator's step with distributed noise.

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


class FedLAPSettings(base.Section):
    """Settings of FedLAP: synthetic images at the sites, learning at the coordinator (section
    `fedlap.`).

    Attributes:
        model: Network: a linear layer, one hidden layer (mlp), or the ConvNet on square images;
            auto is the ConvNet for a backbone of pixels with an image-size above 8, otherwise mlp.
        width: Units of the hidden layer, or channels of the ConvNet.
        rounds: Rounds of training.
        images_per_class: Synthetic images of each class that a site sends; 0 for 10 with a ConvNet
            or under privacy, otherwise 50.
        start: Whether images start from noise in every round, or from those of the last round.
        trajectories: Trajectories of the model along which images are fitted; R_i in the paper.
        loops: Most loops in a trajectory; five in the paper.
        batches: Batches of real records in a loop.
        batch_size: Records in a batch; 0 for all at once; under privacy the public number that a
            sum is divided by.
        image_steps: Steps of the images to match the gradient of a batch, R_b in the paper; 0 for
            40 with a ConvNet without privacy, otherwise 100.
        model_steps: Steps of the model on the images at the end of a loop; R_l in the paper.
        trust_radius: Largest distance of the model from its start in a round; r in the paper.
        image_learning_rate: Learning rate of the images.
        mse_weight: Weight of the squared error next to the cosine in the distance of gradients, 0.1
            in the paper; negative for 1 with a ConvNet, 0.1 with another network, and 0 under
            privacy.
        learning_rate: Learning rate of the model in round 1, annealed over the steps of every
            round.
        cosine: Whether the learning rate falls as a cosine that ends with the last round, as in the
            paper; otherwise it is divided by the square root of the round.
        server_steps: Steps of the coordinator in a round.
        rule: How the radii of the sites become one; fixed is trust-radius.
        descent: Steps of the coordinator: annealed inside the radius, or plain as in the paper, at
            the full rate up to it, which sites seek along all steps. auto is annealed with a
            ConvNet or privacy, else plain.
        memory: Share of the coordinator's loss that images of the three rounds before have from
            round 2 on, 0 in the paper; negative for 0.33, and 0 under privacy.
        augment: Random changes of the images in training; only for a ConvNet.
        sample_rate: Probability that a record takes part in a private gradient.
        noise_multiplier: Noise of a private gradient as a multiple of the clip; 0 derives it, so
            that all rounds spend epsilon.
    """

    model: base.Model | Literal["auto"] = "auto"
    width: Annotated[int, base.Unit("units or channels")] = Field(32, ge=1, le=1024)
    rounds: base.Rounds = Field(5, ge=1, le=100_000)
    images_per_class: Annotated[int, base.Unit("images")] = Field(0, ge=0, le=10_000)
    start: Literal["noise", "last"] = "last"
    trajectories: Annotated[int, base.Unit("trajectories")] = Field(1, ge=1, le=1000)
    loops: Annotated[int, base.Unit("loops")] = Field(1, ge=1, le=1000)
    batches: Annotated[int, base.Unit("batches")] = Field(1, ge=1, le=100_000)
    batch_size: base.Records = Field(0, ge=0)
    image_steps: base.Steps = Field(0, ge=0, le=100_000)
    model_steps: base.Steps = Field(0, ge=0, le=100_000)
    trust_radius: float = Field(10.0, gt=0, le=1e6)
    image_learning_rate: float = Field(100.0, gt=0, le=1e6)
    mse_weight: float = Field(-1.0, le=1e6)
    learning_rate: float = Field(0.1, gt=0, le=1e4)
    cosine: bool = False
    server_steps: base.Steps = Field(100, ge=1, le=100_000)
    rule: Annotated[Literal["min", "median", "max", "fixed"], base.Only("fedlap")] = "median"
    descent: Annotated[Literal["auto", "annealed", "plain"], base.Only("fedlap")] = "auto"
    memory: float = Field(-1.0, ge=-1, lt=1)
    augment: base.Augmentations = ()
    clip: base.GradientClip = 0.3
    sample_rate: float = Field(1.0, ge=1e-6, le=1)
    noise_multiplier: float = Field(0.0, ge=0)

    @property
    def kind(self) -> base.Model:
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


class DPCVAESettings(base.Section):
    """Settings of DP-CVAE and DP-CGAN: sites train a generator of embeddings together (section
    `dpcvae.`).

    Optimisers begin anew in every round.

    Attributes:
        rounds: Rounds; the first releases class sizes, the others train.
        first_round: What the first round releases: the size of every class (counts), or also the
            sum of its embeddings.
        latent: Dimension of the latent vector z; 0 for 32, or 8 under privacy.
        hidden: Width of the three layers on each side; 0 for linear maps.
        learned_variance: Whether the decoder learns a variance for each dimension of the
            embeddings.
        class_prior: Whether each class has its own Gaussian prior of z.
        beta: Weight of the divergence between posterior and prior.
        warm_up: Share of the rounds over which the weight of the divergence rises to beta.
        local_epochs: Passes over a site's records in a round.
        batch_size: Records in a training step without privacy.
        optimiser: Optimiser at a site.
        learning_rate: Learning rate at a site; 0 for the optimiser's default.
        cosine: Whether the learning rate is annealed over the rounds.
        synthetic: Synthetic embeddings of each class that evaluate the generator.
    """

    rounds: base.Rounds = Field(11, ge=2, le=100_000)
    first_round: Literal["sums", "counts"] = "sums"
    latent: Annotated[int, base.Unit("dimensions")] = Field(0, ge=0, le=4096)
    hidden: Annotated[int, base.Only("dpcvae"), base.Unit("units")] = Field(0, ge=0, le=8192)
    learned_variance: Annotated[bool, base.Only("dpcvae")] = True
    class_prior: Annotated[bool, base.Only("dpcvae")] = True
    beta: Annotated[float, base.Only("dpcvae")] = Field(1.0, ge=0, le=1e4)
    warm_up: Annotated[float, base.Only("dpcvae")] = Field(0.3, ge=0, le=1)
    local_epochs: base.Epochs = Field(5, ge=1, le=10_000)
    batch_size: base.Records = Field(256, ge=1)
    optimiser: Annotated[Literal["adam", "sgd"], base.Only("dpcvae")] = "adam"
    learning_rate: float = Field(0.0, ge=0, le=1e4)
    cosine: bool = True
    clip: base.GradientClip = 0.1
    sample_rate: base.SampleRate = 1.0
    noise_multiplier: base.NoiseMultiplier = 0.0
    synthetic: base.Records = Field(1000, ge=1, le=100_000)

    def latents(self, private: bool) -> int:
        """The dimension of z."""
        return self.latent or (8 if private else 32)

    def share(self, epsilon: float) -> float:
        """The first round's share of the budget 1 / noise_multiplier^2."""
        return 4 / (4 + epsilon) if self.first_round == "sums" else 0.05

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


class FedPFTSettings(base.Section):
    """Settings of FedPFT: the surrogate that a site fits to its features (section `fedpft.`).

    Attributes:
        covariance: Form of the covariance of a Gaussian; lowrank is one diagonal and a thin factor
            for all classes, gram one matrix for all classes; auto is gram up to 2,048 dimensions,
            and follows from public numbers with epsilon.
        components: Gaussians for each class; a class with few records gets fewer.
        rank: Columns of the thin factor of a lowrank covariance; 0 is 16, and 64 where covariance
            is auto.
        bits: Bits of an entry of that factor in a message; all else has 16. 0 is 16, and 8 where
            covariance is auto.
        samples_per_component: Fewest records for each Gaussian, and for each column of a lowrank
            covariance.
        privacy: Privacy mechanism under a budget; auto is noisy sums; theorem-4.1 is the paper's,
            which protects less.
        clip: Number that divides private features, or their norm if that is larger; 0 gives all
            features norm one.
        public: File of public features, whose mean is subtracted from the features of every site
            under privacy.
        topology: Whether all sites send to the coordinator (star), or each extends the surrogate of
            the last (chain).
        order: Names of the sites in the order of a chain; empty for a random order.
        seal: Whether a chain's surrogates are encrypted for the next sites.
    """

    covariance: base.AnyCovariance = "auto"
    components: Annotated[int, base.Unit("Gaussians")] = Field(1, ge=1, le=1000)
    rank: Annotated[int, base.Unit("columns")] = Field(0, ge=0, le=4096)
    bits: Annotated[Literal[0, 16, 8], base.Unit("bits")] = 0
    samples_per_component: base.Records = Field(10, ge=1)
    privacy: Literal["auto", "none", "sums", "theorem-4.1"] = "auto"
    clip: base.FeatureClip = 0.0
    public: str = ""
    topology: Literal["star", "chain"] = "star"
    order: base.Names = ()
    seal: bool = False
