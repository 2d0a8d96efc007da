"""Steps of a generator's training: one on a batch's exact gradient, or on private gradients, of a conditional
VAE or a GAN. No Flower types, and nothing of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fedsurrogate.common.models.generators import (
    AnyGenerator,
    Decoder,
    Encoder,
    GanGenerator,
    elbo,
)
from fedsurrogate.common.models.training_parts import UncompiledAdam, UncompiledSGD
from fedsurrogate.common.privacy.gaussian_mechanism import system_normals

from ..dp.record_gradients import clipped_sums, noisy_mean

if TYPE_CHECKING:
    from fedsurrogate.common.settings import DPCVAESettings

# Adam's settings in the paper's GAN.
GAN_RATE, GAN_BETAS = 2e-4, (0.5, 0.999)
Normals = Callable[[Sequence[int]], Tensor]


class Trainer(Protocol):
    """Trains a generator and its companion in place.

    Attributes:
        modules: whose gradients are computed from records.
    """

    # The modules whose gradients are computed from records.
    modules: nn.ModuleList

    def noise(self, count: int) -> Tensor:
        """Random numbers (count, ...) for the losses of `count` records."""

    def losses(self, embeddings: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """The loss of every record.

        Args:
            embeddings: (n, d), of mean square one.
            labels: indices of classes, (n,).
            noise: (n, ...), see `noise`.

        Returns:
            Losses (n,).
        """

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Take a step along the mean gradient of the losses, by parameter names in `modules`."""


class CVAETrainer:
    """Trains encoder and decoder with one gradient.

    Args:
        decoder: the generator.
        encoder: its companion.
        settings: of the optimiser.
        rate: learning rate.
        beta: weight of the divergence.
        normals: draws the noise of the encodings, one row a record. Under privacy it must be
            secret: a record's gradient depends on its row, and its row on which other records were
            drawn. With secret noise any record may have had any row.
    """

    def __init__(
        self,
        decoder: Decoder,
        encoder: Encoder,
        settings: DPCVAESettings,
        rate: float,
        beta: float,
        normals: Normals,
    ) -> None:
        self.modules = nn.ModuleList([decoder, encoder])
        self._decoder, self._encoder, self._beta, self._normals = decoder, encoder, beta, normals
        self._optimiser = _optimiser(self.modules, settings, rate)

    def noise(self, count: int) -> Tensor:
        """Noise of the encodings (count, latent)."""
        return self._normals((count, self._decoder.latent))

    def losses(self, embeddings: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """The loss of every record in nats per dimension.

        Args:
            embeddings: (n, d), of mean square one.
            labels: indices of classes, (n,).
            noise: of the encodings, (n, latent).

        Returns:
            Losses (n,).
        """
        kinds, noise = (
            one_hot(labels, len(self._decoder.means)).to(embeddings),
            noise.to(embeddings),
        )
        missed, apart = elbo(self._encoder, self._decoder, embeddings, kinds, noise)
        return (missed + self._beta * apart) / embeddings.shape[1]

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update encoder and decoder."""
        for name, parameter in self.modules.named_parameters():
            parameter.grad = gradients[name]
        self._optimiser.step()


class GanTrainer:
    """Trains a critic and a generator.

    The critic learns from real and from synthetic records. The generator learns from the critic
    only, which costs no privacy. Differs from the published code, which gives the generator the
    labels of the real batch without protection, and begins with new networks in every round.

    Args:
        maker: the generator.
        judge: the critic.
        settings: `batch_size` is the number of synthetic records in a step.
        rate: learning rate.
        shares: released class sizes, (C,), by which labels of synthetic records are drawn.
        generator: of random numbers.
    """

    def __init__(
        self,
        maker: GanGenerator,
        judge: nn.Module,
        settings: DPCVAESettings,
        rate: float,
        shares: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.modules = nn.ModuleList([judge])
        self._maker, self._discriminator, self._generator, self._size = (
            maker,
            judge,
            generator,
            settings.batch_size,
        )
        self._shares = shares.double().clamp_min(0) + 1e-9
        self._critic = UncompiledAdam(judge.parameters(), lr=rate, betas=GAN_BETAS)
        self._made = UncompiledAdam(maker.parameters(), lr=rate, betas=GAN_BETAS)

    def noise(self, count: int) -> Tensor:
        """An empty tensor (count, 0): these losses need no noise."""
        return torch.zeros(count, 0)

    def losses(self, embeddings: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """The critic's loss on each real record.

        Args:
            embeddings: (n, d), of mean square one.
            labels: indices of classes, (n,).
            noise: not used.

        Returns:
            Losses (n,).
        """
        kinds = one_hot(labels, len(self._maker.means)).to(embeddings)
        return _unreal(self._discriminator, embeddings, kinds, 1.0)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the critic, then the generator."""
        made, kinds = self._make()
        self._critic.zero_grad()
        _unreal(self._discriminator, made.detach(), kinds, 0.0).mean().backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.modules.named_parameters():
            assert parameter.grad is not None
            parameter.grad += gradients[name]
        self._critic.step()
        made, kinds = self._make()
        self._made.zero_grad()
        _unreal(self._discriminator, made, kinds, 1.0).mean().backward()  # type: ignore[no-untyped-call]
        self._made.step()

    def _make(self) -> tuple[Tensor, Tensor]:
        at = self._maker.means
        labels = torch.multinomial(
            self._shares, self._size, replacement=True, generator=self._generator
        )
        kinds = one_hot(labels, len(at)).to(at)
        noise = torch.randn(self._size, self._maker.latent, generator=self._generator).to(at)
        return self._maker(noise, kinds), kinds


def _unreal(judge: nn.Module, embeddings: Tensor, kinds: Tensor, real: float) -> Tensor:
    logits: Tensor = judge(torch.cat([embeddings, kinds], 1)).squeeze(1)
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="none")


def private_gradient(
    trainer: Trainer,
    embeddings: Tensor,
    labels: Tensor,
    clip: float,
    noise_multiplier: float,
    expected: float,
    weights: Tensor | None = None,
) -> tuple[dict[str, Tensor], int, float]:
    """The noisy mean of clipped gradients, see `noisy_mean`.

    Args:
        trainer: computes the losses.
        embeddings: (n, d), of mean square one.
        labels: indices of classes, (n,).
        clip: largest norm of one record's gradient, over all parameters.
        noise_multiplier: standard deviation of the noise over the clip.
        expected: divisor of the sum, a public number.
        weights: of the records, (n,), see `units.Units`; None for one.

    Returns:
        The noisy sum of clipped gradients over `expected`, by name; the number of clipped ones; the
        signal-to-noise ratio.
    """
    inputs = embeddings, labels, trainer.noise(len(labels)).to(embeddings)
    total, cut = clipped_sums(trainer.modules, trainer.losses, inputs, clip, weights)
    like = dict(trainer.modules.named_parameters())
    mean, signal = noisy_mean(total, like, clip, noise_multiplier, expected)
    return mean, cut, signal


def exact_gradient(trainer: Trainer, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The mean of the records' gradients.

    Args:
        trainer: computes the losses.
        embeddings: (n, d), of mean square one.
        labels: indices of classes, (n,).

    Returns:
        The mean, by name of the parameter.
    """
    names, parameters = zip(*trainer.modules.named_parameters(), strict=True)
    gradients = torch.autograd.grad(
        trainer.losses(embeddings, labels, trainer.noise(len(labels))).mean(), parameters
    )
    return dict(zip(names, gradients, strict=True))


def _optimiser(modules: nn.Module, settings: DPCVAESettings, rate: float) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": UncompiledAdam,
        "sgd": UncompiledSGD,
    }
    return makers[settings.optimiser](modules.parameters(), lr=rate)


def trainer_of(
    shared: AnyGenerator,
    companion: nn.Module,
    settings: DPCVAESettings,
    round: tuple[int, int],
    shares: Tensor,
    private: bool,
    generator: torch.Generator,
) -> Trainer:
    """The trainer of a generator and its companion for one round; its optimiser begins anew.

    Args:
        shared: the generator.
        companion: its encoder or critic.
        settings: of the training.
        round: its number, from one, and how many the run has.
        shares: released class sizes, (C,).
        private: whether noise of encodings must be secret.
        generator: of all other random numbers.
    """
    if isinstance(shared, GanGenerator):
        return GanTrainer(
            shared, companion, settings, settings.rate(*round, GAN_RATE), shares, generator
        )
    assert isinstance(companion, Encoder)
    usual = {"adam": 3e-3 if settings.hidden else 0.03, "sgd": 0.1}[settings.optimiser]
    beta = settings.weight_of_divergence(*round)

    def seeded(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator)

    normals = system_normals if private else seeded
    return CVAETrainer(shared, companion, settings, settings.rate(*round, usual), beta, normals)
