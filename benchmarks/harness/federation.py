"""Run every method on the same sites with the code of sites and coordinator, without Flower.

Payloads are packed, counted and unpacked as in a real run. Bytes are those of all payloads from the
sites, at 16 bits.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.harness.seeds import over_seeds
from benchmarks.harness.site_data import SiteData
from fedsurrogate.client_app.datasets.partition import share
from fedsurrogate.client_app.features.site_features import (
    LabelledFeatures,
    SiteFeatures,
    dataset_features,
    usable,
)
from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.methods.evaluation import kept_head
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.backbones.power_transform import with_power
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods.method import load as imported
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.models.generators import Generator
from fedsurrogate.common.models.networks import body_of
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header, Synthetic
from fedsurrogate.common.wire.model_proto import (
    pack_classifier,
    unpack_classifier,
    unpack_parameters,
    unpack_synthetic,
)
from fedsurrogate.common.wire.records import Info, unpack_surrogate
from fedsurrogate.strategies import stored_strategy, strategy_of
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import head_of, take_in
from fedsurrogate.strategies.fedavg import absorb, with_memory
from fedsurrogate.strategies.fedlap import learn

Settings = Mapping[str, Any]
Classes = tuple[str, ...]


@dataclass
class Measured:
    """Result of a run.

    Attributes:
        accuracy: of the model on all test records, in percent.
        bytes: that the sites send.
        own: mean over sites of the accuracy on their own test records, in percent.
        curve: bytes and accuracy after each step.
        seconds: working time of a site in a round.
        model: the shared model, None without one.
        training: the coordinator's state after a training in rounds.
    """

    accuracy: float
    bytes: int
    own: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    model: Classifier | None = None
    training: Training | None = None


@dataclass
class Federation:
    """The sites of one run with their data, and the test records of all sites."""

    sites: list[SiteFeatures]
    test: LabelledFeatures

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, equal at every site."""
        return self.sites[0].classes

    @property
    def sizes(self) -> list[int]:
        """The number of training records of each site."""
        return [len(site.train.labels) for site in self.sites]

    @property
    def given(self) -> list[SiteData]:
        """Each site's records, as the functions that make surrogates take them."""
        return [
            SiteData(s.train.features, s.train.labels, s.classes, s.fingerprint, str(index))
            for index, s in enumerate(self.sites)
        ]

    def judge(self, model: Classifier) -> float:
        """Accuracy of the model in percent, after packing and unpacking as for the sites."""
        received = unpack_classifier(pack_classifier(model))
        right, tested = received.accuracy(self.test.features, self.classes, self.test.labels)
        return 100 * right / tested

    def named(self, settings: Settings) -> dict[str, Any]:
        """The settings; those with a budget also name the classes, which then must be public."""
        public = {"classes": ",".join(self.classes)} if "epsilon" in settings else {}
        return {**settings, **public}


def load(run: Run, sites: int) -> Federation:
    """The run's data, split among its sites, and all test records.

    Args:
        run: with the settings of data, features and partition.
        sites: how many.
    """
    parts = []
    tests: list[LabelledFeatures] = []
    for index in range(sites):
        node = NodeConfig(partition_id=index, num_partitions=sites)
        own = share(run, node, in_simulation=True)
        features = dataset_features(own.dataset, run.settings, node, policy_of(node).cache_mib)
        dataset = own.dataset
        train, test = (usable(dataset, features, rows, run.power) for rows in (own.train, own.test))
        fingerprint = with_power(features.fingerprint, run.power)
        parts.append(site(train.features, train.labels, test, dataset.classes, fingerprint))
        if index == 0 or len(run.settings.dataset) > 1:
            rows = (~dataset.is_train).nonzero().squeeze(1)
            tests.append(usable(dataset, features, rows, run.power))
    return Federation(parts, joined(tests))


def load_seed(settings: Settings, sites: int, seed: int) -> Federation:
    """`load` for settings and a seed."""
    return load(parse_run({**settings, "seed": seed}), sites)


def joined(parts: Sequence[LabelledFeatures]) -> LabelledFeatures:
    """Records of several sites together."""
    features = torch.cat([part.features for part in parts])
    return LabelledFeatures(features, torch.cat([part.labels for part in parts]))


def site(
    features: Tensor,
    labels: Tensor,
    test: LabelledFeatures,
    classes: Classes,
    fingerprint: str,
) -> SiteFeatures:
    """A site with these records. simulated is False, because the harness tests its heads itself.

    Args:
        features: of the training records (n, d).
        labels: of the training records (n,), indices into `classes`.
        test: the test records.
        classes: names.
        fingerprint: of the backbone.
    """
    train = LabelledFeatures(features, labels)
    return SiteFeatures(train, test, classes, fingerprint, 0.0, simulated=False)


def with_rows(
    whole: SiteFeatures,
    rows: Tensor | slice,
    test: LabelledFeatures | None = None,
) -> SiteFeatures:
    """A site with some of another's training records.

    Args:
        whole: the other site.
        rows: of its training records: indices, a mask (n,) or a slice.
        test: its test records; None keeps those of `whole`.
    """
    features, labels = whole.train.features[rows], whole.train.labels[rows]
    return site(features, labels, test or whole.test, whole.classes, whole.fingerprint)


def released(run: Run, features: Tensor, labels: Tensor, classes: Classes) -> AnySurrogate:
    """The surrogate that a site with these records sends, by the site's own code.

    Args:
        run: settings of a method with one message.
        features: (n, d).
        labels: (n,), indices into `classes`.
        classes: names.
    """
    records = LabelledFeatures(features, labels)
    own = SiteFeatures(records, records, classes, "a" * 16, 0.0, True)
    return unpack_surrogate(
        site_function(run.plan.combination)(Job(run, NodeConfig(), "site", own)).payload
    )


def centralised(run: Run, data: Federation) -> Measured:
    """One head on the real features of all sites: the upper reference for federated methods."""
    records = joined([each.train for each in data.sites])
    head = _own_head(run, data, records)
    return Measured(data.judge(head), 2 * records.features.numel(), model=head)


def measure(settings: Settings, own: Settings | None, data: Federation) -> Measured:
    """A row of a table: one run with the base settings and its own, or a head on all real features.

    Args:
        settings: of the data, and the seed.
        own: of the row; None for the head on all real features.
        data: the federation.
    """
    if own is None:
        return centralised(parse_run(settings), data)
    return federate(parse_run({**settings, **own}), data)


def run_rows(
    settings: Settings,
    rows: Mapping[str, Settings | None] | Callable[[Federation], Mapping[str, Settings | None]],
    seeds: int,
    load: Callable[[int], Federation],
) -> dict[str, list[Measured]]:
    """Measure every row at every seed, on data that the rows of a seed share.

    Args:
        settings: of the data.
        rows: settings of each row, as for `measure`; or a function of a seed's data that gives
            them.
        seeds: how many, from zero.
        load: the federation of a seed.

    Returns:
        Results in the order of the seeds, by the row's name.
    """

    def one(seed: int, data: Federation, own: Settings | None) -> Measured:
        return measure({**settings, "seed": seed}, None if own is None else data.named(own), data)

    return over_seeds(seeds, load, rows, one)


def accuracies(results: Sequence[Measured]) -> list[float]:
    """The accuracy of each result, in percent."""
    return [each.accuracy for each in results]


def federate(
    run: Run, data: Federation, step: Callable[[Training, list[Synthetic], str], object] = learn
) -> Measured:
    """One run of any method.

    Args:
        run: of the method.
        data: the federation.
        step: what FedLAP's coordinator does in a round, for scripts that look into it.
    """
    with tempfile.TemporaryDirectory() as folder:
        node = NodeConfig(state_dir=str(Path(folder) / "state"))
        tasks = [Job(run, node, str(index), own) for index, own in enumerate(data.sites)]
        if run.plan.kind == "rounds":
            return _in_rounds(run, data, tasks, step)
        if run.plan.kind == "chain":
            return _along(run, data, tasks)
        if run.plan.kind == "alone":
            models: list[Classifier] = [_own_head(run, data, each.train) for each in data.sites]
            return Measured(statistics.mean(map(data.judge, models)), 0, _own(models, data))
        payloads = [site_function(run.plan.combination)(job).payload for job in tasks]
        strategy = stored_strategy(run)(run, Unrecorded())
        received = [strategy.unpack(payload) for payload in payloads]
        model = strategy.learn(strategy.in_one_frame(received), data.classes).model
        own = _own([model] * len(tasks), data)
        return Measured(data.judge(model), sum(map(len, payloads)), own, model=model)


def _own_head(run: Run, data: Federation, train: LabelledFeatures) -> Head:
    """A head trained on these records alone."""
    count = len(data.classes)
    trained = train_on_features(
        train.features, train.labels, count, run.settings.head, run.settings.seed
    )
    return Head(Header("", "", "", data.sites[0].fingerprint, data.classes), *trained)


def _in_rounds(
    run: Run,
    data: Federation,
    tasks: Sequence[Job],
    step: Callable[[Training, list[Synthetic], str], object],
) -> Measured:
    first = data.sites[0]
    dimension = first.train.features.shape[1]
    training = with_memory(Training.begin(run, data.classes, first.fingerprint, dimension))
    if run.plan.combination.personal:
        training.model = body_of(training.model)
    sent, curve, seconds = 0, [], 0.0
    generates = run.plan.messages.first is not None
    while training.round < run.trained.rounds:
        reported: Info = {"round": training.round + 1, "lineage": training.lineage}
        reported["confirmed"] = training.round
        question = training.payload()
        started = time.perf_counter()
        made = [
            site_function(run.plan.combination)(replace(job, payload=question, info=reported))
            for job in tasks
        ]
        seconds += time.perf_counter() - started
        for each in made:
            _keep(each.keep)
        payloads = [each.payload for each in made]
        if run.trained is run.settings.fedlap:
            synthetic = [unpack_synthetic(payload) for payload in payloads]
            step(training, synthetic, pick_device(run.settings.device))
        elif generates:
            take_in(training, [unpack_parameters(payload) for payload in payloads])
        else:
            absorb(training, [unpack_parameters(payload) for payload in payloads], len(tasks))
        sent += sum(map(len, payloads))
        if not generates or training.round == run.trained.rounds:
            model = head_of(_generator(training), run.settings) if generates else _shared(training)
            models = _personal(model, tasks) if run.plan.combination.personal else [model]
            curve.append((sent, statistics.mean(map(data.judge, models))))
    own = _own(models * len(tasks), data) if generates else _evaluated(model, tasks)
    seconds = seconds / run.trained.rounds / len(tasks)
    return Measured(curve[-1][1], sent, own, curve, seconds, model, training)


def _keep(files: Mapping[Path, bytes]) -> None:
    """Write what a site keeps for the next round."""
    for file, content in files.items():
        replace_file(file, content)


def _shared(training: Training) -> Classifier:
    """The model of all sites; FedRep's is a body with a head of zeros."""
    strategy: Any = strategy_of(training.config.plan)(training.config)
    model: Classifier = strategy.classifier(training)
    return model


def _personal(model: Classifier, tasks: Sequence[Job]) -> list[Classifier]:
    """The model that each site makes for itself of the one of all sites."""
    question = pack_classifier(model)
    return [
        imported(job.run.plan.combination.personal)(replace(job, payload=question)) for job in tasks
    ]


def _evaluated(model: Classifier, tasks: Sequence[Job]) -> float:
    """Mean accuracy of what the sites make of the model, each on its own test records, percent."""
    question = pack_classifier(model)
    metric_values = [
        imported(asked.run.plan.combination.evaluate)(
            asked, open_gate(asked.node, asked.run.settings.data, "harness")
        )
        for asked in (replace(job, payload=question) for job in tasks)
    ]
    pairs = [(cast(int, each["correct"]), cast(int, each["tested"])) for each in metric_values]
    return statistics.mean([100 * right / tested for right, tested in pairs if tested] or [0.0])


def _generator(training: Training) -> Generator:
    return Generator(training.header(), training.config, training.model)


def _along(run: Run, data: Federation, tasks: Sequence[Job]) -> Measured:
    sent, curve, relay = 0, [], None
    heads = []
    for number, job in enumerate(tasks, start=1):
        reported: Info = {"hop": number, "lineage": "harness", "classes": json.dumps(data.classes)}
        asked = replace(job, payload=relay, info=reported)
        made = site_function(run.plan.combination)(asked)
        _keep(made.keep)
        relay = made.payload
        sent += len(relay)
        heads.append(kept_head(asked.state))
        curve.append((sent, data.judge(heads[-1])))
    # The last site does not send its surrogate.
    return Measured(curve[-1][1], sent - len(relay or b""), _own(heads, data), curve)


def _own(models: Sequence[Classifier], data: Federation) -> float:
    """Mean over sites with test records of the accuracy of each one's model on them, in percent."""
    pairs = [
        model.accuracy(each.test.features, each.classes, each.test.labels)
        for model, each in zip(models, data.sites, strict=True)
    ]
    return statistics.mean([100 * right / tested for right, tested in pairs if tested] or [0.0])
