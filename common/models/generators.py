"""Generators of embeddings by class: the decoder of a conditional VAE and, for comparison, the
generator of a GAN.

All embeddings have norm one; this normalisation is public and the same at all sites. Internally
they are scaled by sqrt(d), so that an entry is about one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..errors import LARGEST_DIMENSION, SurrogateError
from ..privacy.gaussian_mechanism import clip_rows
from .devices import stream
from .networks import parameters_of
from .parameters import Tensors

if TYPE_CHECKING:
    from ..run import Run
    from ..settings import Settings
    from ..surrogates.surrogates import Header

# Approximate norm of an encoder's inputs, which are deviations from the class mean.
ENCODER_NORM = 6.0
# Largest absolute value of the logarithm of a variance.
LARGEST_LOG = 8.0
GAN_GENERATOR, GAN_CRITIC = (512, 1024), (1024, 512)
# Statistics of the first round: the size of every class, and the sum of its embeddings. The sums
# give the class means.
COUNTS, SUMS, MEANS = "counts", "sums", "means"


class Encoder(nn.Module):
    """Encoder: from embeddings to the posterior of z.

    Args:
        latent: dimension of z.
        hidden: units of each of three linear layers, or zero for one linear layer.
        classes: C.
        dimension: of the embeddings, d.
    """

    def __init__(self, latent: int, hidden: int, classes: int, dimension: int) -> None:
        super().__init__()
        self.scale = ENCODER_NORM / math.sqrt(dimension)
        self.layers = stack(dimension + classes, *([hidden] * 2 if hidden else []), 2 * latent)
        if not hidden:
            _draw(self.layers[0].weight, 0.01)  # type: ignore[arg-type]

    def forward(self, deviations: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the posterior of z.

        Args:
            deviations: of embeddings from their class mean, (n, d).
            kinds: one-hot classes, (n, C).

        Returns:
            Mean and log variance, (n, latent) each.
        """
        mean, log_variance = self.layers(torch.cat([deviations * self.scale, kinds], 1)).chunk(2, 1)
        return mean, log_variance.clamp(-LARGEST_LOG, LARGEST_LOG)


class _OfClasses(nn.Module):
    """What both kinds of generators have: statistics of the classes, and the dimension of z.

    Attributes:
        means: of the classes, (C, d).
        counts: sizes of the classes, (C,).
    """

    means: Tensor
    counts: Tensor

    def __init__(self, latent: int, classes: int, dimension: int) -> None:
        super().__init__()
        self.latent = latent
        self.register_buffer(MEANS, torch.zeros(classes, dimension))
        self.register_buffer(COUNTS, torch.zeros(classes))


class Decoder(_OfClasses):
    """Decoder: from z and classes to the mean of embeddings, their variance and the prior of z.

    The mean is the sum of the class means, which are given and not trained, a linear map, and three
    linear layers if hidden is not zero. Differs from the paper, which has only the three layers.
    The means come from class sums, one cheap release, so training need not find them. The linear
    map learns the same as a factor analysis, in far fewer steps and with far more noise. The
    variance of every dimension is learned; the paper has none. The prior of z is learned for every
    class, because a standard normal prior would also sample where no encodings are.

    Args:
        latent: dimension of z.
        hidden: units of each of the three linear layers, or zero for none.
        classes: C.
        dimension: of the embeddings, d.
        learned_variance: whether the variance of every dimension is learned.
        class_prior: whether the prior of z is learned for every class.
    """

    def __init__(
        self,
        latent: int,
        hidden: int,
        classes: int,
        dimension: int,
        learned_variance: bool,
        class_prior: bool,
    ) -> None:
        super().__init__(latent, classes, dimension)
        self.linear = nn.Linear(latent + classes, dimension, bias=not hidden)
        nn.init.zeros_(self.linear.weight)
        _draw(self.linear.weight[:, :latent], 0.02 if hidden else 0.05)
        if not hidden:
            nn.init.zeros_(self.linear.bias)
        self.layers = stack(latent + classes, hidden, hidden, dimension) if hidden else None
        # Written as linear maps of a constant one and of the class, so that one rule gives the
        # gradient of every record.
        self.variance = nn.Linear(1, dimension, bias=False) if learned_variance else None
        self.prior = nn.Linear(classes, 2 * latent, bias=False) if class_prior else None
        if self.variance is not None:
            nn.init.constant_(self.variance.weight, -1.0)
        if self.prior is not None:
            nn.init.zeros_(self.prior.weight)

    def forward(self, z: Tensor, kinds: Tensor) -> Tensor:
        """The mean of embeddings.

        Args:
            z: (n, latent).
            kinds: one-hot classes, (n, C).

        Returns:
            Means (n, d).
        """
        inputs = torch.cat([z, kinds], 1)
        mean: Tensor = kinds @ self.means + self.linear(inputs)
        return mean if self.layers is None else mean + self.layers(inputs)

    def prior_of(self, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """The prior of z.

        Args:
            kinds: one-hot classes, (n, C).

        Returns:
            Mean and log variance of z, (n, latent) each.
        """
        if self.prior is None:
            return (kinds.new_zeros(len(kinds), self.latent),) * 2
        mean, log_variance = self.prior(kinds).chunk(2, 1)
        return mean, log_variance.clamp(-LARGEST_LOG, LARGEST_LOG)

    def log_variance(self, kinds: Tensor) -> Tensor | None:
        """Log variance of embeddings around their mean.

        Args:
            kinds: one-hot classes, (n, C).

        Returns:
            Log variance (n, d); None if it is not learned.
        """
        if self.variance is None:
            return None
        found: Tensor = self.variance(kinds.new_ones(len(kinds), 1))
        return found.clamp(-LARGEST_LOG, LARGEST_LOG)

    def draw(self, kinds: Tensor, generator: torch.Generator) -> Tensor:
        """Embeddings of classes.

        Args:
            kinds: one-hot classes, (n, C).
            generator: of random numbers.

        Returns:
            Embeddings (n, d).
        """
        mean, log_variance = self.prior_of(kinds)
        drawn: Tensor = self(
            mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator), kinds
        )
        if (spread := self.log_variance(kinds)) is not None:
            drawn = drawn + (spread / 2).exp() * torch.randn(drawn.shape, generator=generator)
        return drawn


class GanGenerator(_OfClasses):
    """The generator of the paper's conditional GAN: from z and classes to embeddings.

    The output is linear, and the class means are added, as in the decoder.

    Args:
        latent: dimension of z.
        classes: C.
        dimension: of the embeddings, d.
    """

    def __init__(self, latent: int, classes: int, dimension: int) -> None:
        super().__init__(latent, classes, dimension)
        self.layers = stack(latent + classes, *GAN_GENERATOR, dimension)

    def forward(self, z: Tensor, kinds: Tensor) -> Tensor:
        """Embeddings.

        Args:
            z: (n, latent).
            kinds: one-hot classes, (n, C).

        Returns:
            Embeddings (n, d).
        """
        drawn: Tensor = kinds @ self.means + self.layers(torch.cat([z, kinds], 1))
        return drawn

    def draw(self, kinds: Tensor, generator: torch.Generator) -> Tensor:
        """Embeddings of classes.

        Args:
            kinds: one-hot classes, (n, C).
            generator: of random numbers.

        Returns:
            Embeddings (n, d).
        """
        drawn: Tensor = self(torch.randn(len(kinds), self.latent, generator=generator), kinds)
        return drawn


AnyGenerator = Decoder | GanGenerator


def _draw(weight: Tensor, deviation: float) -> None:
    """Draw normal numbers, but not for a shape without memory: torch imports its compiler there."""
    if not weight.is_meta:
        nn.init.normal_(weight, 0, deviation)


def stack(*sizes: int, slope: float = 0.0) -> nn.Sequential:
    """Linear layers with (leaky) ReLU between them.

    Args:
        sizes: dimension of the inputs, and units of each layer.
        slope: that of the leaky ReLU; 0 for ReLU.

    Example:
        >>> [name for name, _ in stack(2, 8, 1).named_children()]
        ['linear1', 'relu1', 'linear2']
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(1, len(sizes)):
        if index > 1:
            layers[f"relu{index - 1}"] = nn.LeakyReLU(slope) if slope else nn.ReLU()
        layers[f"linear{index}"] = nn.Linear(sizes[index - 1], sizes[index])
    return nn.Sequential(layers)


def critic(classes: int, dimension: int) -> nn.Module:
    """The critic of the GAN.

    Args:
        classes: C.
        dimension: of the embeddings, d.

    Returns:
        A network from embeddings and classes (n, d + C) to the logit that they are real (n, 1).
    """
    return stack(dimension + classes, *GAN_CRITIC, 1, slope=0.2)


def fresh_generator(
    settings: Settings, adversarial: bool, classes: int, dimension: int
) -> AnyGenerator:
    """The shared generator before training. It depends only on the run's settings.

    Args:
        settings: of the run; those of the generator, the seed, and whether there is a budget.
        adversarial: whether it is a GAN's, and not that of a variational autoencoder.
        classes: number of classes.
        dimension: of the embeddings.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        own, latents = settings.dpcvae, settings.dpcvae.latents(bool(settings.epsilon))
        if adversarial:
            return GanGenerator(latents, classes, dimension)
        shape = (latents, own.hidden, classes, dimension)
        return Decoder(*shape, own.learned_variance, own.class_prior)


def fresh_companion(
    settings: Settings, adversarial: bool, classes: int, dimension: int
) -> nn.Module:
    """The part that stays at a site, before training: the encoder, or the critic of a GAN.

    Args:
        settings: as in `fresh_generator`.
        adversarial: as in `fresh_generator`.
        classes: number of classes.
        dimension: of the embeddings.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed + 1)
        if adversarial:
            return critic(classes, dimension)
        own, latents = settings.dpcvae, settings.dpcvae.latents(bool(settings.epsilon))
        return Encoder(latents, own.hidden, classes, dimension)


def tensors_of(module: AnyGenerator) -> dict[str, Tensor]:
    """All shared tensors by name: the parameters, the class means, and the class sizes."""
    return parameters_of(module) | {
        MEANS: module.means.detach().clone(),
        COUNTS: module.counts.detach().clone(),
    }


def elbo(
    encoder: Encoder, decoder: Decoder, embeddings: Tensor, kinds: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood and divergence of embeddings.

    A record's loss is the first plus beta times the second, both summed over dimensions. Differs
    from the published code, which averages squared errors over dimensions and records but sums
    divergences over both. There the divergence has thousands of times the weight, and the encoder
    learns nothing.

    Args:
        encoder: of the site.
        decoder: that all sites share.
        embeddings: (n, d), of mean square one.
        kinds: one-hot classes, (n, C).
        noise: standard normals, (n, latent).

    Returns:
        Negative log likelihood and divergence of each record, (n,) each, in nats.
    """
    mean, log_variance = encoder(embeddings - kinds @ decoder.means, kinds)
    drawn = decoder(mean + (log_variance / 2).exp() * noise, kinds)
    squares, spread = (embeddings - drawn).square(), decoder.log_variance(kinds)
    missed = squares if spread is None else squares / spread.exp() + spread
    at, log_width = decoder.prior_of(kinds)
    spread_out = (log_variance.exp() + (mean - at).square()) / log_width.exp()
    apart = log_width - log_variance + spread_out - 1
    return missed.sum(1) / 2, apart.sum(1) / 2


@dataclass(frozen=True)
class Generator:
    """A learned generator, which draws any number of embeddings of every class.

    Attributes:
        header: origin, with the classes.
        run: that it was learned in.
        tensors: those of `fresh_generator`.
    """

    header: Header
    run: Run
    tensors: Tensors

    def sample(self, seed: int, limit: int) -> tuple[Tensor, Tensor]:
        """Synthetic embeddings for figures, the same number of every class.

        Args:
            seed: of the random stream.
            limit: about so many embeddings.

        Returns:
            Embeddings (n, d), and labels (n,).
        """
        classes = len(self.header.classes)
        labels = labels_evenly(classes, max(1, limit // classes))
        return self.draw(labels, stream(seed, "picture")), labels

    def checked(self) -> Generator:
        """This generator.

        Raises:
            SurrogateError: if its tensors do not fit the run's settings.
        """
        means = self.tensors.get(MEANS)
        if means is None or means.ndim != 2 or not 0 < means.shape[1] <= LARGEST_DIMENSION:
            raise SurrogateError("a generator without means (C, d) of the classes")
        # Without memory: settings and means state the sizes of all other tensors.
        with torch.device("meta"):
            wanted = {name: tensor.shape for name, tensor in tensors_of(self._empty()).items()}
        if wanted != {name: tensor.shape for name, tensor in self.tensors.items()}:
            raise SurrogateError(
                f"a generator whose tensors do not fit {len(self.header.classes)} classes"
            )
        return self

    @property
    def dimension(self) -> int:
        """Dimension of the embeddings."""
        return self.tensors[MEANS].shape[1]

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Embeddings of classes.

        Args:
            labels: (n,), indices into header.classes.
            generator: of random numbers.

        Returns:
            Embeddings (n, d), of norm about one like real ones.
        """
        module, dimension = self._empty(), self.dimension
        module.load_state_dict(dict(self.tensors))
        with torch.no_grad():
            parts = [
                module.draw(one_hot(some, len(self.header.classes)).float(), generator)
                for some in torch.split(labels, 4096)
            ]
        return torch.cat(parts) / math.sqrt(dimension) if parts else torch.zeros(0, dimension)

    @property
    def shares(self) -> list[float]:
        """Reported class sizes of all sites together; noisy under privacy, all zero if no site
        reported.
        """
        return [max(0.0, count) for count in self.tensors[COUNTS].tolist()]

    def _empty(self) -> AnyGenerator:
        sizes = len(self.header.classes), self.dimension
        return fresh_generator(self.run.settings, self.run.method.adversarial, *sizes)


def scaled(features: Tensor) -> Tensor:
    """Features normalised to norm one, times sqrt(d): an entry is about one.

    Args:
        features: (n, d).

    Returns:
        Features (n, d), float32.
    """
    return clip_rows(features, 0.0).float() * math.sqrt(features.shape[1])


def labels_evenly(classes: int, each: int) -> Tensor:
    """Labels with `each` entries of every class: (classes * each,)."""
    return torch.arange(classes).repeat_interleave(each)


def labels_like(shares: Sequence[float], count: int) -> Tensor:
    """Labels in proportion to shares.

    Args:
        shares: of each class, which need not sum to one. Negative shares count as zero.
        count: number of labels.

    Returns:
        Labels (count,), ascending.

    Example:
        >>> labels_like([3.0, 0.0, 1.0], 4).tolist()
        [0, 0, 0, 2]
    """
    ends = torch.tensor(shares, dtype=torch.float64).clamp_min(0).cumsum(0)
    ends = (ends * count / ends[-1].clamp_min(1e-12)).round().long()
    return torch.arange(len(shares)).repeat_interleave(
        torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    )
