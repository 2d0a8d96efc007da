"""DP-CVAE and DP-CGAN in rounds: decoders are averaged, encoders stay at the sites, and a head is trained
on synthetic embeddings. The coordinator sees the replies of each site, or in secure aggregation the sums of class
statistics and of weighted updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import LARGEST_COUNT, LARGEST_PRIVATE, RunError, SurrogateError
from fedsurrogate.common.methods.training import first_round_shares
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import COUNTS, MEANS, SUMS, Generator, labels_evenly
from fedsurrogate.common.models.parameters import Parameters, average, by_name
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import DPCVAESettings, Settings
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.records import Info

from .base.federation import Federation
from .base.outcome import Defended
from .base.rounds import RoundsOfParameters
from .base.training import Training
from .pooling.class_means import by_site, pool
from .pooling.site_weights import POOLED, Total, false_numbers, robust_tensors, weight_of
from .robustness.defence import cap_sums, defend_updates
from .secure_aggregation.strategy import SecureRounds

# Prefix of the reported class sizes of each site in the training's memory.
SIZES = "sizes."
# Allowed deviation of noisy counts and sums, in standard deviations of the noise.
SIGMAS = 30.0


def expected_shapes(training: Training) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a reply to the next round."""
    if training.round == 0:
        count, sums = len(training.classes), training.config.settings.dpcvae.first_round == "sums"
        return {COUNTS: (count,)} | ({SUMS: (count, training.inputs)} if sums else {})
    return {
        name: tuple(tensor.shape)
        for name, tensor in training.model.items()
        if name not in (MEANS, COUNTS)
    }


def check_first_round(
    reply: Parameters, mechanism: Mechanism | None, own: DPCVAESettings, sites: int = 1
) -> None:
    """Check class sizes, and sums of embeddings of norm one.

    Otherwise one site's invalid values would spoil the class means of all sites. Privacy noise may
    add to both.

    Args:
        reply: class sizes (C,), and perhaps class sums (C, d).
        mechanism: of the run; None without privacy.
        own: settings of the generator.
        sites: number of sites whose noise is in the reply.

    Raises:
        SurrogateError: for impossible class sizes, or sums longer than that number of embeddings of
            norm one.
    """
    counts, sums = reply.tensors[COUNTS].double(), reply.tensors.get(SUMS)
    noise = mechanism.event(1).noise_multiplier if mechanism is not None else 0.0
    most = SIGMAS * noise * math.sqrt(sites)
    slack = {name: most / math.sqrt(share) for name, share in first_round_shares(own).items()}
    if bool((counts < -slack[COUNTS]).any() or (counts > LARGEST_COUNT).any()):
        raise SurrogateError(
            f"class sizes of {float(counts.min()):g} to {float(counts.max()):g} records are out of "
            "range"
        )
    if sums is None:
        return
    allowed = (
        counts.clamp_min(0) * (1 + 1e-2)
        + slack[COUNTS]
        + slack[SUMS] * math.sqrt(sums.shape[1])
        + 1e-2
    )
    if bool((longer := sums.double().norm(dim=1) > allowed).any()):
        worst = int(longer.int().argmax())
        raise SurrogateError(
            f"class {reply.header.classes[worst][:40]!r}: the sum of {float(counts[worst]):g} "
            f"embeddings of norm one is {float(sums[worst].norm()):g} long"
        )


def take_in(training: Training, replies: Sequence[Parameters]) -> None:
    """Finish a round: store class sizes and means, or add the mean update to the decoder, in single
    precision.

    Args:
        training: before the round; changed.
        replies: that the defence keeps.
    """
    if training.round == 0:
        training.memory = {
            **training.memory,
            **{SIZES + reply.header.site: reply.tensors[COUNTS] for reply in replies},
        }
        training.model = with_classes(training, replies)
    else:
        rule, updates = training.config.defence, [reply.tensors for reply in replies]
        weights = _weights(training.memory, replies)
        moved = robust_tensors(updates, rule) if rule in POOLED else average(updates, weights)
        training.model = moved_by(training.model, moved)
    training.finish_round(reply.header.site for reply in replies)


def with_classes(
    training: Training, replies: Sequence[Parameters], sites: int = 1
) -> dict[str, Tensor]:
    """The model with class sizes and means from the first round.

    Args:
        training: before the first round.
        replies: class sizes (C,), and class sums (C, d) where the first round is "sums".
        sites: number of sites whose noise is in each reply.
    """
    sizes = torch.stack([reply.tensors[COUNTS] for reply in replies]).double().sum(0).clamp_min(0)
    if training.config.settings.epsilon:
        # Sites of a private run refuse larger numbers. Only the classes' shares matter.
        sizes = sizes * min(1.0, 0.9 * LARGEST_PRIVATE / max(1.0, float(sizes.max())))
    model = {**training.model, COUNTS: sizes.float()}
    if training.config.settings.dpcvae.first_round == "sums":
        model[MEANS] = class_means(
            replies, training.config.mechanism, training.config.settings.dpcvae, sites
        )
    return model


def moved_by(model: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model with a change added to its parameters, in single precision.

    Args:
        model: not changed.
        moved: the change by parameter. Parameters that are not in it stay as they are.
    """
    return {
        name: tensor + moved[name].float() if name in moved else tensor
        for name, tensor in model.items()
    }


def head_of(generator: Generator, settings: Settings, device: str = "cpu") -> Head:
    """A head trained on synthetic embeddings of a generator, the same number for every class.

    Args:
        generator: trained.
        settings: of the run: number of embeddings, head, and seed.
        device: on which the head is trained.
    """
    labels = labels_evenly(len(generator.header.classes), settings.dpcvae.synthetic)
    features = generator.draw(labels, stream(settings.seed, "judge")).to(device)
    weight, bias = train_on_features(
        features, labels.to(device), len(generator.header.classes), settings.head, settings.seed
    )
    return Head(generator.header, weight.cpu(), bias.cpu(), clip=0.0)


def class_means(
    replies: Sequence[Parameters], mechanism: Mechanism | None, own: DPCVAESettings, sites: int = 1
) -> Tensor:
    """Class means from all sites' class sums, scaled to a mean square of about one.

    Under privacy every mean is shrunk towards the mean of all classes, by the share of noise in its
    distance from it. Otherwise a head would learn the noise of the means. A class lost in noise
    gets the overall mean.

    Args:
        replies: class sizes (C,) and class sums (C, d), for the same classes.
        mechanism: of the run; None without privacy.
        own: settings of the generator.
        sites: number of sites whose noise is in each reply.

    Returns:
        (C, d), float32.

    Source: James & Stein 1961.
    """
    tensors, names = [reply.tensors for reply in replies], replies[0].header.classes
    scale = math.sqrt(tensors[0][SUMS].shape[1])
    if mechanism is None:
        counts, sums = (
            torch.stack([each[name].double() for each in tensors]).sum(0) for name in (COUNTS, SUMS)
        )
        middle = sums.sum(0) / counts.sum().clamp_min(1)
        exact = torch.where(counts[:, None] > 0.5, sums / counts.clamp_min(1)[:, None], middle)
        return (exact * scale).float()
    noise, shares = mechanism.event(1).noise_multiplier, first_round_shares(own)
    sigmas = {name: noise * math.sqrt(sites / share) for name, share in shares.items()}
    noisy = [
        SumsSurrogate(reply.header, Sums(table[COUNTS], table[SUMS], None, sigmas), reply.claim)
        for reply, table in zip(replies, tensors, strict=True)
        if reply.claim is not None
    ]
    pooled = pool(by_site(noisy))
    middle = (pooled.records[:, None] * pooled.means).sum(0) / pooled.records.sum()
    apart = pooled.means - middle
    kept = (
        1 - apart.shape[1] * pooled.noise.diagonal() / apart.square().sum(1).clamp_min(1e-12)
    ).clamp(0, 1)
    means = middle.repeat(len(names), 1)
    means[[names.index(name) for name in pooled.classes]] += kept[:, None] * apart
    return (means * scale).float()


def _weights(memory: Mapping[str, Tensor], replies: Sequence[Parameters]) -> list[float]:
    """Weight of each site: its reported size, or the median size for a site that joined too late to
    report one.
    """
    sizes = {
        key: max(1.0, float(value.sum())) for key, value in memory.items() if key.startswith(SIZES)
    }
    usual = float(torch.tensor(list(sizes.values())).median()) if sizes else 1.0
    return [sizes.get(SIZES + reply.header.site, usual) for reply in replies]


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Update the generator with a sum over sites, and finish the round.

    Args:
        total: the sum: class sizes and sums in the first round, weighted updates in the others.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for sums that no records have.
    """
    if training.round == 0:
        tensors = {name: tensor.float() for name, tensor in total.tensors.items()}
        pooled = Parameters(training.header(), 1, tensors, claim=total.claim)
        try:
            check_first_round(
                pooled, training.config.mechanism, training.config.settings.dpcvae, len(summed)
            )
        except SurrogateError as error:
            raise false_numbers(f"sums that no records have: {error}") from None
        training.model = with_classes(training, [pooled], len(summed))
    else:
        weight = weight_of(total, len(summed))
        training.model = moved_by(
            training.model, by_name(total.tensors["update"] / weight, expected_shapes(training))
        )
    training.finish_round(summed)


FILE = "generator.safetensors"


class SharedGenerator(Federation):
    """A run in rounds whose result is a generator."""

    _shared = b""

    def classifier(self, training: Training) -> Classifier:
        """A head trained on the generator's embeddings. The generator is stored with it, and is
        sent to the sites.
        """
        generator = Generator(training.header(), self.config, training.model)
        self.outcome.learned = generator.sample
        self.outcome.parameters = sum(
            math.prod(shape) for shape in expected_shapes(training).values()
        )
        self._shared = pack_parameters(
            Parameters(training.header(), training.round, training.model)
        )
        self.recorder.keep(FILE, pack_generator(generator, rounds=training.asked))
        return head_of(generator, self.config.settings, self.device)

    def _evaluated_by_sites(self) -> tuple[bytes | None, Info]:
        """The generator, not the head: each site can use it for its own purposes."""
        return self._shared, {}


class DPCVAE(SharedGenerator, RoundsOfParameters):
    """Training in `dpcvae.rounds` rounds. In the first, sites send class sizes and sums; in the
    others, decoder updates.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = DPCVAE({"method": "dpcvae", "dpcvae.rounds": 2})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('rounds', ['decoder'])
    """

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        if self.config.settings.epsilon and training.asked and not training.round:
            raise RunError(
                "the first round of this run failed, but is charged; start a new run, without "
                "resume"
            )
        return training

    def shapes(self, training: Training) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the class sums in the first round, and of the decoder's parameters in
        the others.
        """
        return expected_shapes(training)

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the classes, and that some embeddings can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other classes, or sums that no embeddings have.
        """
        if reply.header.classes != training.classes:
            raise SurrogateError(
                f"its {len(reply.header.classes)} classes are not the run's in the run's order"
            )
        own = self.config.settings
        if training.round == 0:
            check_first_round(reply, self.config.mechanism, own.dpcvae)

    def records(self, reply: Parameters) -> int:
        """Sum of the class sizes, which the first round reports; noisy under privacy."""
        return max(0, round(float(reply.tensors[COUNTS].sum()))) if COUNTS in reply.tensors else 0

    def facts(self, reply: Parameters) -> dict[str, object]:
        """Class sizes in the first round; noisy under privacy."""
        if COUNTS not in reply.tensors:
            return {}
        return {
            "counts": dict(zip(reply.header.classes, reply.tensors[COUNTS].tolist(), strict=True))
        }

    def defend(self, training: Training, replies: Sequence[Parameters]) -> Defended[Parameters]:
        """Cap the class sizes and sums of the first round; in the others, exclude updates that
        disagree with the others', and bound each update.

        Args:
            training: before the round.
            replies: checked replies, sorted by site.
        """
        own = self.config.settings
        if training.round == 0:
            return cap_sums(replies, own.max_share, self.config.private)
        return defend_updates(replies, self.config.defence, own.max_share)

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Update the generator with one round's replies.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.

        Returns:
            No facts for the round's event.
        """
        take_in(training, replies)
        return {}


class SummedGenerators(SharedGenerator, SecureRounds):
    """Rounds of secure aggregation. In the first, of class sizes and sums; in the others, of the
    generator's weighted updates.
    """
