"""Generators in rounds: decoders are averaged, encoders stay home, and a head is trained on what the decoder makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from common.checks import Expectation, check_header
from common.claims import opening_noise, opening_shares
from common.classifiers import Classifier, Head
from common.errors import RunError, SurrogateError
from common.generator_files import pack_generator
from common.generators import COUNTS, MEANS, SUMS, Generator, labels_evenly
from common.heads import Batch, train_on_features
from common.model_frames import pack_parameters, unpack_parameters
from common.parameters import Parameters, average, check_update
from common.randomness import stream
from common.sums import Sums
from common.surrogates import SumsSurrogate
from common.wire import to_record
from strategies.class_means import pool
from strategies.rounds import Rounds
from strategies.training import Training

FILE = "generator.safetensors"
# What each site has told of its class sizes, in the memory of a training.
SIZES = "sizes."


@dataclass(frozen=True)
class Made:
    """What a head was trained on: a generator's embeddings."""

    generator: Generator

    def sample(self, seed: int, limit: int) -> Batch:
        """About `limit` embeddings (n, d) and labels (n,), for pictures."""
        classes = len(self.generator.header.classes)
        labels = labels_evenly(classes, max(1, limit // classes))
        return self.generator.draw(labels, stream(seed, "picture")), labels


class DPCVAE(Rounds[Parameters]):
    """Rounds of `dpcvae.rounds`: in the first, sites tell class sizes and sums; in the others decoders are trained."""

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        if self.config.epsilon and training.asked and not training.round:
            raise RunError("the first round of this run failed, and is paid for; begin a new run, without resume")
        return training

    def read(self, payload: bytes, training: Training) -> Parameters:
        """One site's class sums, or the update of its decoder, checked. Raises SurrogateError."""
        config, reply = self.config, unpack_parameters(payload)
        check_header(reply.header, Expectation.of(config, training.classes, training.fingerprint))
        if reply.header.classes != training.classes:
            raise SurrogateError(f"{len(reply.header.classes)} classes in another order than the run's")
        number = training.round + 1
        shapes = {name: tuple(tensor.shape) for name, tensor in training.model.items() if name not in (MEANS, COUNTS)}
        if number == 1:
            count = len(training.classes)
            shapes = {COUNTS: (count,)} | ({SUMS: (count, training.inputs)} if config.dpcvae.opening == "sums" else {})
        check_update(reply, shapes, number, bool(config.epsilon))
        if number == 1 and not config.epsilon and bool((reply.tensors[COUNTS] < -0.5).any()):
            raise SurrogateError("a class of less than no records")
        return reply

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Take in class sizes and means, or move the decoder by the mean of its updates, in single precision."""
        if training.round == 0:
            told = {SIZES + reply.header.site: reply.tensors[COUNTS] for reply in replies}
            training.memory = {**training.memory, **told}
            sizes = torch.stack(list(told.values())).double().sum(0).clamp_min(0)
            training.model = {**training.model, COUNTS: sizes.float()}
            if self.config.dpcvae.opening == "sums":
                training.model = {**training.model, MEANS: self._class_means(replies)}
        else:
            moved = average([reply.tensors for reply in replies], self._weights(training, replies))
            training.model = {
                name: tensor + moved[name] if name in moved else tensor for name, tensor in training.model.items()
            }
        training.finish_round(reply.header.site for reply in replies)
        return {}

    def classifier(self, training: Training) -> Classifier:
        """A head trained on embeddings of every class, as many of each."""
        config, generator = self.config, self._generator(training)
        self.outcome.learned = Made(generator)
        self._payload_of_sites = pack_parameters(Parameters(training.header(), training.round, training.model))
        self.recorder.keep(FILE, pack_generator(generator, rounds=training.asked))
        labels = labels_evenly(len(training.classes), config.dpcvae.synthetic)
        features = generator.draw(labels, stream(config.seed, "judge")).to(self.device)
        weight, bias = train_on_features(features, labels.to(self.device), len(training.classes), config.head, config.seed)
        return Head(training.header(), weight.cpu(), bias.cpu(), clip=0.0)

    def _broadcast(self) -> Iterable[Message]:
        """Take the generator, not the head, to the sites: each uses it for what it likes."""
        payload, used = self._payload_of_sites, [n for n, site in self.outcome.sites.items() if site.fate == "used"]
        return [self._message(MessageType.EVALUATE, node, to_record(payload, {"bytes": len(payload)})) for node in used]

    def _generator(self, training: Training) -> Generator:
        return Generator(training.header(), self.config, training.model)

    def _weights(self, training: Training, replies: Sequence[Parameters]) -> list[float]:
        """What each site weighs: the size it has told, or that of the median site where it came too late to tell."""
        if self.config.dpcvae.weights == "equal":
            return [1.0] * len(replies)
        sizes = {key: max(1.0, float(value.sum())) for key, value in training.memory.items() if key.startswith(SIZES)}
        usual = float(torch.tensor(list(sizes.values())).median()) if sizes else 1.0
        return [sizes.get(SIZES + reply.header.site, usual) for reply in replies]

    def _class_means(self, replies: Sequence[Parameters]) -> Tensor:
        """Means (C, d) of the classes, of mean square about one, from all sites' class sums.

        Under privacy every mean is drawn to that of all classes by as much as is noise in how far it is from there
        (James & Stein 1961): a head trained on samples around a noisy mean learns the noise.
        """
        tensors = [reply.tensors for reply in replies]
        scale = math.sqrt(tensors[0][SUMS].shape[1])
        if (noise := opening_noise(self.config) if self.config.epsilon else None) is None:
            counts, sums = (torch.stack([t[name].double() for t in tensors]).sum(0) for name in (COUNTS, SUMS))
            middle = sums.sum(0) / counts.sum().clamp_min(1)
            found = torch.where(counts[:, None] > 0.5, sums / counts.clamp_min(1)[:, None], middle)
            return (found * scale).float()
        sigmas = {name: noise / math.sqrt(share) for name, share in opening_shares(self.config).items()}
        claimed = [(reply, reply.claim) for reply in replies if reply.claim is not None]
        pooled = pool([
            SumsSurrogate(reply.header, Sums(reply.tensors[COUNTS], reply.tensors[SUMS], None, sigmas), claim)
            for reply, claim in claimed
        ])  # fmt: skip
        middle = (pooled.records[:, None] * pooled.means).sum(0) / pooled.records.sum()
        apart = pooled.means - middle
        kept = (1 - apart.shape[1] * pooled.noise.diagonal() / apart.square().sum(1).clamp_min(1e-12)).clamp(0, 1)
        names = replies[0].header.classes
        means = middle.repeat(len(names), 1)
        means[[names.index(name) for name in pooled.classes]] += kept[:, None] * apart
        return (means * scale).float()
