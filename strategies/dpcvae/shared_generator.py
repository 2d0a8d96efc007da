"""What the coordinator makes of a trained generator, however its updates came: a head, stored
files, and a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message, MessageType

from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.generators import Generator, labels_evenly
from fedsurrogate.common.models.head_training import Batch
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.records import to_record
from fedsurrogate.strategies.base.federation import Federation
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae.generating import expected_shapes, head_of

FILE = "generator.safetensors"


@dataclass(frozen=True)
class GeneratorSource:
    """Synthetic embeddings for figures.

    Attributes:
        generator: whose embeddings a head was trained on.
    """

    generator: Generator

    def sample(self, seed: int, limit: int) -> Batch:
        """Synthetic embeddings, for figures.

        Args:
            seed: of the random stream.
            limit: about so many embeddings.

        Returns:
            Embeddings (n, d), and labels (n,).
        """
        classes = len(self.generator.header.classes)
        labels = labels_evenly(classes, max(1, limit // classes))
        return self.generator.draw(labels, stream(seed, "picture")), labels


class SharedGenerator(Federation):
    """A run in rounds whose result is a generator."""

    _shared = b""

    def classifier(self, training: Training) -> Classifier:
        """A head trained on the generator's embeddings. The generator is stored with it, and is
        sent to the sites.
        """
        generator = Generator(training.header(), self.config, training.model)
        self.outcome.learned = GeneratorSource(generator)
        self.outcome.parameters = sum(
            math.prod(shape) for shape in expected_shapes(training).values()
        )
        self._shared = pack_parameters(
            Parameters(training.header(), training.round, training.model)
        )
        self.recorder.keep(FILE, pack_generator(generator, rounds=training.asked))
        return head_of(generator, self.config.settings, self.device)

    def _broadcast(self) -> Iterable[Message]:
        """Messages with the generator, not the head: each site can use it for its own purposes."""
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        # A record for each site: the receipts of its ledger are added to it.
        records = {node: to_record(self._shared, {"bytes": len(self._shared)}) for node in used}
        return [
            self._message(MessageType.EVALUATE, node, record) for node, record in records.items()
        ]
