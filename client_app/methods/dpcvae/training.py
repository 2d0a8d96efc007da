"""A site's part in training a generator (conditional VAE or GAN). The decoder is exchanged; the encoder, or
a GAN's critic, stays at the site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fedsurrogate.common.errors import StateError, SurrogateError
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import (
    COUNTS,
    SUMS,
    AnyGenerator,
    Decoder,
    Encoder,
    GanGenerator,
    elbo,
    fresh_companion,
    fresh_generator,
    scaled,
)
from fedsurrogate.common.models.networks import parameters_of
from fedsurrogate.common.models.parameters import Parameters, Tensors, flat
from fedsurrogate.common.models.training_parts import UncompiledAdam, UncompiledSGD
from fedsurrogate.common.privacy.gaussian_mechanism import (
    BoundedSum,
    clip,
    system_normals,
    with_noise,
)
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import DPCVAESettings
from fedsurrogate.common.surrogates.class_sums import class_sums
from fedsurrogate.common.wire.model_proto import pack_parameters

from ...features.site_features import site_device
from ..dp.record_gradients import NoisyMeans, Units, clipped_sums
from ..job import Job, MethodOutput, SiteStatistic
from ..local_training import batches

# Adam's settings in the paper's GAN.
GAN_RATE, GAN_BETAS = 2e-4, (0.5, 0.999)
Normals = Callable[[Sequence[int]], Tensor]


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
        kinds = one_hot(labels, len(self._decoder.means)).to(embeddings)
        noise = noise.to(embeddings)
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
        self._maker = maker
        self._discriminator = judge
        self._generator = generator
        self._size = settings.batch_size
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


# Trains a generator and its companion in place, by mean gradients of the losses of records.
Trainer = CVAETrainer | GanTrainer


def _unreal(judge: nn.Module, embeddings: Tensor, kinds: Tensor, real: float) -> Tensor:
    logits: Tensor = judge(torch.cat([embeddings, kinds], 1)).squeeze(1)
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="none")


def private_gradient(
    trainer: Trainer,
    means: NoisyMeans,
    embeddings: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """The noisy mean of clipped gradients, by parameter.

    Args:
        trainer: whose losses are taken.
        means: adds the noise.
        embeddings: of the records drawn, (n, d).
        labels: indices of classes, (n,).
        weights: of the records, (n,), see `Units`; None for one.
    """
    inputs = embeddings, labels, trainer.noise(len(labels)).to(embeddings)
    total, cut = clipped_sums(trainer.modules, trainer.losses, inputs, means.clip, weights)
    return means.mean(total, dict(trainer.modules.named_parameters()), cut, len(labels))


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


COMPANION = "companion."


# The reply, the site's records by class that its training knows, facts for its log, and the files to keep.
Trained = tuple[Parameters, Tensor, dict[str, float], dict[Path, bytes]]


def train_generator(job: Job) -> MethodOutput:
    """This site's update of the generator in one round, for DP-CVAE and, as a baseline, DP-CGAN.
    Raises as `trained`.
    """
    reply, _, facts, keep = trained(job)
    return MethodOutput(pack_parameters(reply), reply.claim, facts, keep=keep, must_keep=True)


def generator_sums(job: Job) -> SiteStatistic:
    """This site's part of secure aggregation, float64.

    In the first round it is the site's class sizes (C,) and sums (C, d); in the others its records
    (1,), which are its weight, and update (P,), the change of all parameters in the order of their
    names, times that weight.

    Under privacy all of these have their noise already. The model is what all sites have agreed on,
    so they all send the same statistics. A site that began anew would have hardly any weight, and
    the sum would show the others'.

    Args:
        job: the request, with the model.

    Raises:
        SurrogateError: for a request that does not follow this site's last round, or a model of
            another round; and all errors of `trained`.
    """
    if (number := job.received_model().round) != job.round or job.confirmed != job.round - 1:
        raise SurrogateError(
            f"a request for round {job.round} after {job.confirmed} rounds, with the model of "
            f"{number}"
        )
    reply, sizes, _, keep = trained(job)
    tensors = {name: tensor.double() for name, tensor in reply.tensors.items()}
    if job.round > 1:
        weight = max(1.0, float(sizes.sum().round()))
        tensors = {
            "records": torch.tensor([weight], dtype=torch.float64),
            "update": weight * flat(tensors),
        }
    return SiteStatistic(tensors, reply.claim, keep=keep)


def trained(job: Job) -> Trained:
    """This site's part of one round, before anything is packed.

    Encoder and decoder are both trained under privacy. A record's gradient of the decoder depends
    on the encoder: an encoder that had learned from the record without noise would bring the record
    into the decoder, past any clip.

    Args:
        job: the request, with the model.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's.
        StateError: where the site's kept file is lost.
    """
    run, received = job.run, job.received_model()
    classes, private = received.header.classes, bool(run.settings.epsilon)
    features, labels = job.training_data(classes)
    units = Units.of(job.training_units(classes) if private else None, len(labels))
    companion = fresh_companion(
        run.settings, run.method.adversarial, len(classes), features.shape[1]
    )
    if job.round == 1:
        return _first_round(job, classes, (features, labels, units), companion)
    counts = _restore(job, companion, len(classes))
    shared = fresh_generator(run.settings, run.method.adversarial, len(classes), features.shape[1])
    shared.load_state_dict(dict(received.tensors))
    device = site_device(run.settings.device, job.node)
    embeddings, labels = scaled(features).to(device), labels.to(device)
    shared, companion = shared.to(device), companion.to(device)
    random = stream(run.settings.seed, run.settings.method, job.site, job.round)
    round = (job.round, run.rounds)
    trainer = trainer_of(shared, companion, run.settings.dpcvae, round, counts, private, random)
    claim = job.mechanism()
    facts: dict[str, float] = {}
    if private:
        assert claim is not None
        facts = _train_privately(
            trainer, (embeddings, labels, units), counts, run.settings.dpcvae, claim
        )
    else:
        own = run.settings.dpcvae
        for rows in batches(len(labels), own.local_epochs, own.batch_size, random):
            trainer.step(exact_gradient(trainer, embeddings[rows], labels[rows]))
    moved = {
        name: p.detach().cpu() - received.tensors[name] for name, p in shared.named_parameters()
    }
    reply = Parameters(job.header(classes), job.round, moved, 0 if private else len(labels), claim)
    return reply, counts, facts, _kept(job, companion, counts)


def _first_round(
    job: Job, classes: tuple[str, ...], data: tuple[Tensor, Tensor, Units], companion: nn.Module
) -> Trained:
    """The first round: the size of every class and, if set, the sum of its unit-norm embeddings;
    noisy under privacy.
    """
    run, count, (features, labels, units) = job.run, len(classes), data
    unit = clip(features.double(), 0.0)[0]
    weights = torch.ones(len(labels)) if units.weights is None else units.weights
    exact = dict(zip((COUNTS, SUMS), class_sums(unit, labels, weights, count), strict=True))
    sums = {name: sum_.value for name, sum_ in exact.items()}
    chosen = {COUNTS, SUMS} if run.settings.dpcvae.first_round == "sums" else {COUNTS}
    claim = job.mechanism()
    facts: dict[str, float] = {}
    if claim is not None:
        # Of the mechanism's noise, that of this round's statistics.
        first = replace(claim, noise={name: claim.noise[name] for name in sorted(chosen)})
        noisy = with_noise([BoundedSum(name, exact[name], 1.0) for name in chosen], first)
        facts = {f"signal-to-noise-{each.name}": each.signal_to_noise() for each in noisy}
        sums |= {each.name: each.value for each in noisy}
    shared = {name: sums[name].float() for name in chosen}
    records = 0 if run.settings.epsilon else len(labels)
    sizes = shared[COUNTS]
    reply = Parameters(job.header(classes), 1, shared, records, claim)
    return reply, sizes, facts, _kept(job, companion, sizes)


def _train_privately(
    trainer: Trainer,
    data: tuple[Tensor, Tensor, Units],
    counts: Tensor,
    settings: DPCVAESettings,
    claim: Mechanism,
) -> dict[str, float]:
    """Train by DP-SGD (Abadi et al. 2016); return facts that stay at the site.

    Every step takes each unit, a record or a patient, independently with probability `sample_rate`.
    It divides the noisy sum of clipped gradients by the expected number of units, which is computed
    from the released class sizes.
    """
    embeddings, labels, units = data
    records = float(counts.clamp_min(0).sum())
    expected = max(1.0, settings.sample_rate * records if records else settings.batch_size)
    means = NoisyMeans(claim.clip, claim.noise_multiplier, expected)
    for _ in range(settings.private_steps):
        rows, weights = units.sample(settings.sample_rate)
        rows = rows.to(labels.device)
        trainer.step(private_gradient(trainer, means, embeddings[rows], labels[rows], weights))
    return means.facts()


def _file(state: Path, round: int) -> Path:
    return state / f"kept-{round}.safetensors"


def _kept(job: Job, companion: nn.Module, counts: Tensor) -> dict[Path, bytes]:
    """File and content that the site needs in the next round; written after this round is charged,
    and never released.
    """
    from safetensors.torch import save

    tensors: Tensors = {
        COMPANION + name: tensor.cpu().contiguous()
        for name, tensor in parameters_of(companion).items()
    }
    content: bytes = save({**tensors, COUNTS: counts}, {"run": job.run.digest})
    return {_file(job.state, job.round): content}


def _restore(job: Job, companion: nn.Module, classes: int) -> Tensor:
    """Load the companion as it was after the last round that counted; return the released class
    sizes (C,).

    A site that joins later than the others begins with a new companion and sizes of zero. Raises
    StateError.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    if not job.confirmed:
        return torch.zeros(classes)
    file = _file(job.state, job.confirmed)
    try:
        with safe_open(file, "pt") as content:
            if (content.metadata() or {}).get("run") != job.run.digest:
                raise KeyError("of another run")
        tensors = load_file(file)
        counts: Tensor = tensors.pop(COUNTS)
        companion.load_state_dict(
            {name.removeprefix(COMPANION): tensor for name, tensor in tensors.items()}
        )
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise StateError(
            f"{file} cannot be read ({type(error).__name__}), but round {job.confirmed} of this "
            "run counted: without this file the site's encoder, and its budget with it, would "
            "begin anew; restore the state folder"
        ) from None
    for old in job.state.glob("kept-*.safetensors"):
        if (
            old != file
            and (number := old.stem.removeprefix("kept-")).isdecimal()
            and int(number) < job.confirmed
        ):
            old.unlink(missing_ok=True)
    return counts
