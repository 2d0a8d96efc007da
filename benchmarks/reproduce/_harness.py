"""Run every method on the same sites, with the functions of sites and coordinator but without Flower.

Payloads are packed, counted and unpacked as in a real run. Bytes are those of all payloads from the sites, at 16 bits.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _report import described, shared

from client_app.datasets.partition import share
from client_app.features.site_features import LabelledFeatures, SiteFeatures, dataset_features, usable
from client_app.governance.release import method_of
from client_app.methods.chain_step import kept_head
from client_app.methods.fedavg.personalization import personal_accuracy
from client_app.methods.task import Task
from client_app.node_config import NodeConfig
from common.backbones.feature_power import with_power
from common.files import replace_file
from common.methods import METHODS
from common.methods.method import load as imported
from common.models.classifiers import Classifier, Head
from common.models.devices import pick_device
from common.models.generators import Generator
from common.models.head_training import train_on_features
from common.models.networks import body_of
from common.run import Run
from common.settings.flat import Scalar, parse_overrides
from common.surrogates.surrogates import Header
from common.wire.model_proto import pack_classifier, unpack_classifier, unpack_parameters, unpack_synthetic
from common.wire.records import Info
from strategies import stored_strategy, strategy_of
from strategies.base.collection import Unrecorded
from strategies.base.training import Training
from strategies.dpcvae.generating import head_of, take_in
from strategies.fedavg.strategy import absorb, with_memory
from strategies.fedlap.landscapes import learn


@dataclass
class Measured:
    """Result of a run: accuracy on all test data, and bytes that the sites send.

    own: mean over sites of the accuracy on their own test data. curve: (bytes, accuracy) after each step. seconds: working
    time of a site in a round. model: the shared model, None without one.
    """

    accuracy: float
    bytes: int
    own: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    model: Classifier | None = None


@dataclass
class Federation:
    """The sites of one run with their data, and the test records of all sites."""

    sites: list[SiteFeatures]
    test: LabelledFeatures

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, equal at every site."""
        return self.sites[0].classes

    def judge(self, model: Classifier) -> float:
        """Accuracy of the model in percent, after packing and unpacking as for the sites."""
        received = unpack_classifier(pack_classifier(model))
        right, tested = received.accuracy(self.test.features, self.classes, self.test.labels)
        return 100 * right / tested


def load(run: Run, sites: int) -> Federation:
    """The run's data, split among its sites, and all test records."""
    found = []
    tests: list[LabelledFeatures] = []
    for index in range(sites):
        node = NodeConfig(partition_id=index, num_partitions=sites)
        own = share(run, node, in_simulation=True)
        features = dataset_features(own.dataset, run, node)
        train, test = (usable(own.dataset, features, rows, run.power) for rows in (own.train, own.test))
        found.append(
            site(train.features, train.labels, test, own.dataset.classes, with_power(features.fingerprint, run.power))
        )
        if index == 0 or len(run.settings.dataset) > 1:
            tests.append(usable(own.dataset, features, (~own.dataset.is_train).nonzero().squeeze(1), run.power))
    return Federation(found, joined(tests))


def joined(parts: Sequence[LabelledFeatures]) -> LabelledFeatures:
    """Records of several sites together."""
    return LabelledFeatures(torch.cat([part.features for part in parts]), torch.cat([part.labels for part in parts]))


def settings_of(options: argparse.Namespace, stand_in: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], str]:
    """Settings for the user's data and backbone (`-c`), or for the sample data next to the checkout; and a description."""
    given = parse_overrides(options.run_config)
    if given:
        kept = {key: value for key, value in given.items() if key not in ("data-dir", "weights-path")}
        return given, ", ".join(f"{key}={value}" for key, value in kept.items())
    folder = shared("features/cifar10-train.safetensors").parent
    base: dict[str, Scalar] = {"data": "safetensors", "data-dir": str(folder)}
    return base | stand_in, f"STAND-IN: MobileNetV2 features of {stand_in['dataset']}, not the paper's backbone and data"


def arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Parser with the options of all these scripts."""
    parser = described(doc)
    parser.add_argument("--name", default=name, help="of the files in benchmarks/results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-c", "--run-config", action="append", default=[], metavar="'key=value ...'")
    return parser


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation as a table cell."""
    return f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}"


def site(
    features: Tensor, labels: Tensor, test: LabelledFeatures, classes: tuple[str, ...], fingerprint: str
) -> SiteFeatures:
    """A site with these records. simulated is False, because the harness tests its heads itself."""
    return SiteFeatures(LabelledFeatures(features, labels), test, classes, fingerprint, 0.0, simulated=False)


def centralised(run: Run, data: Federation) -> Measured:
    """One head on the real features of all sites: the upper reference for federated methods."""
    features, labels = (torch.cat([getattr(s.train, name) for s in data.sites]) for name in ("features", "labels"))
    weight, bias = train_on_features(features, labels, len(data.classes), run.settings.head, run.settings.seed)
    head = Head(Header("", "", "", data.sites[0].fingerprint, data.classes), weight, bias)
    return Measured(data.judge(head), 2 * features.numel())


def federate(run: Run, data: Federation) -> Measured:
    """One run of any method."""
    with tempfile.TemporaryDirectory() as folder:
        node = NodeConfig(state_dir=str(Path(folder) / "state"))
        tasks = [Task(run, node, str(index), found) for index, found in enumerate(data.sites)]
        if run.plan.kind == "rounds":
            return _in_rounds(run, data, tasks)
        if run.plan.kind == "chain":
            return _along(run, data, tasks)
        if run.plan.kind == "alone":
            heads = [
                train_on_features(s.train.features, s.train.labels, len(s.classes), run.settings.head, run.settings.seed)
                for s in data.sites
            ]
            header = Header("", "", "", data.sites[0].fingerprint, data.classes)
            models: list[Classifier] = [Head(header, *head) for head in heads]
            return Measured(statistics.mean(map(data.judge, models)), 0, _own(models, data))
        payloads = [method_of(run)(task).payload for task in tasks]
        strategy = stored_strategy(run)(run, Unrecorded())
        model = strategy.learn([strategy.unpack(payload) for payload in payloads], data.classes).model
        own = _own([model] * len(tasks), data)
        return Measured(data.judge(model), sum(map(len, payloads)), own, model=model)


def _in_rounds(run: Run, data: Federation, tasks: Sequence[Task]) -> Measured:
    training = with_memory(
        Training.begin(run, data.classes, data.sites[0].fingerprint, data.sites[0].train.features.shape[1])
    )
    if run.plan.combination.personal:
        training.model = body_of(training.model)
    sent, curve, seconds = 0, [], 0.0
    generates = run.plan.messages.first is not None
    while training.round < run.trained.rounds:
        reported: Info = {"round": training.round + 1, "lineage": training.lineage, "confirmed": training.round}
        question = training.question()
        started = time.perf_counter()
        made = [method_of(run)(replace(task, question=question, info=reported)) for task in tasks]
        seconds += time.perf_counter() - started
        for each in made:
            for file, content in each.keep.items():
                replace_file(file, content)
        payloads = [each.payload for each in made]
        if run.trained is run.settings.fedlap:
            learn(training, [unpack_synthetic(payload) for payload in payloads], pick_device(run.settings.device))
        elif generates:
            take_in(training, [unpack_parameters(payload) for payload in payloads])
        else:
            absorb(training, [unpack_parameters(payload) for payload in payloads], len(tasks))
        sent += sum(map(len, payloads))
        if not generates or training.round == run.trained.rounds:
            model = head_of(_generator(training), run) if generates else _shared(training)
            models = _personal(model, tasks) if run.plan.combination.personal else [model]
            curve.append((sent, statistics.mean(map(data.judge, models))))
    if run.plan.combination.evaluate == METHODS["fedlambda"].usual.combination.evaluate:
        pairs = [personal_accuracy(task, model) for task in tasks]
        own = statistics.mean(100 * right / tested for right, tested in pairs if tested)
    else:
        own = _own(models if run.plan.combination.personal else models * len(tasks), data)
    return Measured(curve[-1][1], sent, own, curve, seconds / run.trained.rounds / len(tasks), model)


def _shared(training: Training) -> Classifier:
    """The model of all sites; FedRep's is a body with a head of zeros."""
    strategy: Any = strategy_of(training.config)(training.config)
    model: Classifier = strategy.classifier(training)
    return model


def _personal(model: Classifier, tasks: Sequence[Task]) -> list[Classifier]:
    """The model that each site makes for itself of the one of all sites."""
    question = pack_classifier(model)
    return [imported(task.run.plan.combination.personal)(replace(task, question=question)) for task in tasks]


def _generator(training: Training) -> Generator:
    return Generator(training.header(), training.config, training.model)


def _along(run: Run, data: Federation, tasks: Sequence[Task]) -> Measured:
    sent, curve, relay = 0, [], None
    heads = []
    for number, task in enumerate(tasks, start=1):
        reported: Info = {"hop": number, "lineage": "harness", "classes": json.dumps(data.classes)}
        asked = replace(task, question=relay, info=reported)
        made = method_of(run)(asked)
        for file, content in made.keep.items():
            replace_file(file, content)
        relay = made.payload
        sent += len(relay)
        heads.append(kept_head(asked))
        curve.append((sent, data.judge(heads[-1])))
    # The last site does not send its surrogate.
    return Measured(curve[-1][1], sent - len(relay or b""), _own(heads, data), curve)


def _own(models: Sequence[Classifier], data: Federation) -> float:
    found = [m.accuracy(s.test.features, s.classes, s.test.labels) for m, s in zip(models, data.sites, strict=True)]
    return statistics.mean(100 * right / tested for right, tested in found if tested) if any(t for _, t in found) else 0.0
