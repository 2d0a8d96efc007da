"""Generators in rounds: decoders are averaged, encoders stay home, and a head is trained on what the decoder makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from common.errors import RunError, SurrogateError
from common.models.classifiers import Classifier
from common.models.generators import COUNTS, Generator, labels_evenly
from common.models.head_training import Batch
from common.models.parameters import Parameters, check_update
from common.randomness import stream
from common.wire.generator_files import pack_generator
from common.wire.model_proto import pack_parameters, unpack_parameters
from common.wire.records import to_record
from common.wire.validation import Expectation, check_header
from strategies.base.rounds import Rounds
from strategies.base.training import Training
from strategies.dpcvae.generating import check_opening, expected_shapes, head_of, take_in
from strategies.robustness.defence import cap_sums, defend_updates

FILE = "generator.safetensors"


@dataclass(frozen=True)
class GeneratorSource:
    """What a head was trained on: a generator's embeddings."""

    generator: Generator

    def sample(self, seed: int, limit: int) -> Batch:
        """About `limit` embeddings (n, d) and labels (n,), for pictures."""
        classes = len(self.generator.header.classes)
        labels = labels_evenly(classes, max(1, limit // classes))
        return self.generator.draw(labels, stream(seed, "picture")), labels


class DPCVAE(Rounds[Parameters]):
    """Rounds of `dpcvae.rounds`: in the first, sites tell class sizes and sums; in the others decoders are trained."""

    _shared = b""

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        if self.config.epsilon and training.asked and not training.round:
            raise RunError("the first round of this run failed, and is paid for; begin a new run, without resume")
        return training

    def read(self, payload: bytes, training: Training) -> Parameters:
        """One site's class sums, or the update of its decoder, checked. Raises SurrogateError."""
        shapes = expected_shapes(training)
        reply = unpack_parameters(payload, most=sum(map(math.prod, shapes.values())))
        check_header(reply.header, Expectation.of(self.config, training.classes, training.fingerprint))
        if reply.header.classes != training.classes:
            raise SurrogateError(f"{len(reply.header.classes)} classes that are not the run's in the run's order")
        check_update(reply, shapes, training.round + 1, bool(self.config.epsilon))
        if training.round == 0:
            check_opening(reply, self.config)
        return reply

    def records(self, reply: Parameters) -> int:
        """All classes' sizes, told in the first round; noisy under privacy."""
        return max(0, round(float(reply.tensors[COUNTS].sum()))) if COUNTS in reply.tensors else 0

    def facts(self, reply: Parameters) -> dict[str, object]:
        """Class sizes, in the first round; noisy under privacy."""
        if COUNTS not in reply.tensors:
            return {}
        return {"counts": dict(zip(reply.header.classes, reply.tensors[COUNTS].tolist(), strict=True))}

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Take in one round's replies."""
        defended = cap_sums(replies, self.config) if training.round == 0 else defend_updates(replies, self.config)
        self._heed(defended, training.round + 1)
        take_in(training, defended.kept)
        self.outcome.parameters = sum(math.prod(shape) for shape in expected_shapes(training).values())
        return {}

    def classifier(self, training: Training) -> Classifier:
        """A head trained on what the generator makes; the generator is kept beside it, and goes to the sites."""
        generator = Generator(training.header(), self.config, training.model)
        self.outcome.learned = GeneratorSource(generator)
        self._shared = pack_parameters(Parameters(training.header(), training.round, training.model))
        self.recorder.keep(FILE, pack_generator(generator, rounds=training.asked))
        return head_of(generator, self.config, self.device)

    def _broadcast(self) -> Iterable[Message]:
        """Take the generator, not the head, to the sites: each uses it for what it likes."""
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        record = to_record(self._shared, {"bytes": len(self._shared)})
        return [self._message(MessageType.EVALUATE, node, record) for node in used]
