"""A generator received at the end of a run: the site keeps it for its own use, and evaluates it."""

from __future__ import annotations

import logging
from pathlib import Path

from fedsurrogate.client_app.features.site_features import SiteFeatures
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.kept_files import has_room
from fedsurrogate.client_app.methods.dpcvae.downstream import (
    LabelledEmbeddings,
    fidelity,
    head_on,
    mix,
)
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.generators import Generator, labels_evenly
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.records import Info

log = logging.getLogger("fedsurrogate.site")


def generators(node: NodeConfig) -> Path:
    """Folder of the generators of runs that the site took part in; files are named by Flower's
    number of the run.
    """
    return node.state / "generators"


def use_generator(task: Task, gate: Gate) -> Info:
    """Keep the received generator and evaluate it on this site's records.

    The caller decides which results may leave.

    Args:
        task: the request, with the generator.
        gate: of the site; its ledger names the runs in which the site took part.

    Raises:
        SurrogateError: for a generator of another run, or of a run in which the site took no part.
        DataError: where it cannot be evaluated.
    """
    if not any(entry.get("flower_run") == task.flower_run for entry in gate.ledger.entries()):
        raise SurrogateError(
            f"a generator of run {task.flower_run}, in which this site has taken no part"
        )
    received = task.received_model()
    generator = Generator(received.header, task.run, received.tensors).checked()
    content = pack_generator(generator)
    if has_room(task.node, gate.policy.kept_mib, len(content)):
        replace_file(generators(task.node) / f"{task.flower_run}-{task.site}.safetensors", content)
    return _judged(task, generator)


def _judged(task: Task, generator: Generator) -> Info:
    classes = generator.header.classes
    if not len(task.found.test.labels):
        return {"correct": 0, "tested": 0}
    own, test = (site_records(task.found, classes, part) for part in ("train", "test"))
    labels = labels_evenly(len(classes), task.run.settings.dpcvae.synthetic)
    synthetic = LabelledEmbeddings(
        generator.draw(labels, stream(task.run.settings.seed, "site", task.site)), labels
    )
    shared = head_on(synthetic, generator.header, task.run.settings.head, task.run.settings.seed)
    measures = mix(
        own,
        shared,
        task.run.settings.head,
        task.run.settings.seed,
        task.run.settings.baseline.validation,
    ).measures(test)
    like = generator.draw(test.labels, stream(task.run.settings.seed, "fidelity", task.site))
    if len(test.labels) > 1:
        measures |= fidelity(test.features, like, task.run.settings.seed)
    right = round(measures["accuracy-mixed"] * len(test.labels))
    log.info(
        "the site's own, synthetic and mixed heads: %s",
        {name: round(value, 4) for name, value in measures.items()},
    )
    answer: Info = {"correct": right, "tested": len(test.labels)}
    return answer | {f"downstream.{key}": value for key, value in measures.items()}


def site_records(
    site_features: SiteFeatures, classes: tuple[str, ...], part: str
) -> LabelledEmbeddings:
    """The site's training or test records of the given classes, scaled to norm one.

    Args:
        site_features: all records of the site.
        classes: names of classes, whose indices are the labels.
        part: "train" or "test".

    Raises:
        DataError: when there is none.
    """
    chosen = site_features.train if part == "train" else site_features.test
    labels = class_indices(classes, site_features.classes)[chosen.labels]
    if not bool((labels >= 0).any()):
        raise DataError(f"no {part} record of the classes {', '.join(classes)[:200]}")
    return LabelledEmbeddings(
        clip(chosen.features.double(), 0.0)[0].float()[labels >= 0], labels[labels >= 0]
    )
