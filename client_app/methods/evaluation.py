"""How well the model received at the end of a run answers on a site's own test records, by method; and in a
simulation its comparison with the paper's baselines on the whole data.

One step of a chain: open the received chain message, extend it, keep the site's own head, and pass the
chain message on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.data_report import DATA
from fedsurrogate.common.errors import DataError, SealError, SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.class_metrics import QUALITY, packed_quality, quality_of
from fedsurrogate.common.models.classifiers import Classifier, Head, class_indices
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import Run
from fedsurrogate.common.security.sealing import open_sealed, seal
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.targets.metrics import METRIC_VALUES, facts_of, measured, packed
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import Info

from ..datasets.dataset import class_order
from ..datasets.partition import share, whole
from ..features.site_features import dataset_features, in_simulation, usable, with_broken
from ..governance.gate import Gate
from ..governance.policy import policy_of
from ..node_config import NodeConfig
from ..offline.keys import private_key, received_keys
from .job import Job, MethodOutput


def received_model(job: Job, gate: Gate) -> Info:
    """Evaluate the model that was received.

    Args:
        job: the request, with the model.
        gate: of the site.

    Raises:
        SurrogateError: for a model that is not this run's, or not for this site's backbone.
    """
    test, model = job.found.test, checked_classifier(job)
    return counted(model.accuracy(test.features, job.found.classes, test.labels))


def own_model(job: Job, gate: Gate) -> Info:
    """Evaluate the classifier of its own that this site makes for the method (`personal` in the
    registry).

    Args:
        job: the request.
        gate: of the site.
    """
    test = job.found.test
    return counted(own_classifier(job).accuracy(test.features, job.found.classes, test.labels))


def own_classifier(job: Job) -> Classifier:
    """The classifier of its own that this site makes for the method."""
    classifier: Classifier = load(job.run.plan.combination.personal)(job)
    return classifier


def received_classifier(payload: bytes | None, run: str) -> Classifier:
    """The model in a message.

    Args:
        payload: of the message.
        run: digest of the run; empty where a model of any run may come.

    Raises:
        SurrogateError: when there is none, or when it is of another run.
    """
    if payload is None:
        raise SurrogateError("a message without a model")
    model = unpack_classifier(payload)
    if run and model.header.run != run:
        raise SurrogateError(
            f"a model of run {model.header.run!r}, but these settings are run {run!r}"
        )
    return model


def checked_classifier(job: Job) -> Classifier:
    """The received model. Raises SurrogateError unless it is for this run and this site's backbone."""
    # The digest in the settings of an evaluation names the model, which is that of another run.
    model = received_classifier(job.payload, "" if job.run.plan.counts else job.run.digest)
    if job.found.fingerprint != model.header.fingerprint:
        raise SurrogateError(
            f"a model for backbone {model.header.fingerprint!r}, this site has "
            f"{job.found.fingerprint!r}"
        )
    if model.dimension != (own := job.found.test.features.shape[1]):
        raise SurrogateError(
            f"a model for features of dimension {model.dimension}, this site has {own}"
        )
    return model


def counted(pair: tuple[int, int]) -> Info:
    """Numbers of correct predictions and of tested records, by name."""
    return {"correct": pair[0], "tested": pair[1]}


# Who annotates which label, and how a model was learned, says nothing of what it answers.
NOT_ITS_MEANING = {"sets", "code", "moments", "head", "steps", "names"}


def received_target_model(job: Job, gate: Gate) -> Info:
    """Evaluate the model that was received.

    Args:
        job: the request, with the model.
        gate: of the site.

    Raises:
        SurrogateError: for a model that is not this run's, of another target, or not for this
            site's backbone.
    """
    model, test = checked_classifier(job), job.found.test
    head = of_target(model, job.run.target)
    if test.values is None or not len(test.features):
        return {"correct": 0, "tested": 0}
    sums = measured(head.target, head.header.classes, head.scores(test.features), test.values)
    return {"correct": 0, "tested": len(test.features), METRIC_VALUES: packed(sums)}


def of_target(model: Classifier, target: Target | None) -> Head:
    """The model, if it answers the target of a run.

    Args:
        model: that was received.
        target: of the run.

    Raises:
        SurrogateError: for a model of another target.
    """
    if not isinstance(model, Head) or target is None:
        raise SurrogateError("a model that answers no target of this run")
    facts, own = facts_of(model.target), _as_json(target)
    if not facts or any(facts.get(key) != own[key] for key in own.keys() - NOT_ITS_MEANING):
        raise SurrogateError(f"a model of another target than {target.title[:200]!r}")
    return model


def _as_json(target: Target) -> dict[str, object]:
    """The facts as a model carries them."""
    found: dict[str, object] = json.loads(json.dumps(target.public))
    return found


PICTURE_POINTS = 1500


def compare(model: Classifier, run: Run, node: NodeConfig, baselines: bool) -> Info:
    """Accuracy of a model on all test records of the run's data, and points for a picture.

    With `baselines` also what scikit-learn measures of it, with intervals. With `run.compare` also
    these baselines, and the bytes that each would send at 16 bits:
    - centralized: a head trained on the real features of all sites together,
    - ensemble: mean of the class probabilities of the sites' own heads,
    - average: mean of the sites' own heads.

    Args:
        model: to compare.
        run: whose data and settings are used.
        node: the settings of a simulated site.
        baselines: False: only the model's own accuracy.

    Raises:
        DataError: at a site that has data of its own.
    """
    check_comparable(node)
    share(run, node, in_simulation())
    if run.target is not None:
        return _of_target(of_target(model, run.target), run, node)
    names = model.header.classes
    parts: list[tuple[Tensor, Tensor]] = []
    tests: list[tuple[Tensor, list[str]]] = []
    reports: list[dict[str, Any]] = []
    patients: list[tuple[str, ...] | None] = []
    for dataset, rows in whole(run.settings, None, node.num_partitions):
        all_features = dataset_features(dataset, run.settings, node, policy_of(node).cache_mib)
        index = class_indices(names, dataset.classes)
        for part in rows if run.settings.compare and baselines else ():
            train = usable(dataset, all_features, part, run.power)
            parts.append((train.features, index[train.labels]))
        broken = (~torch.as_tensor(all_features.ok)).nonzero().flatten().tolist()
        reports.append(with_broken(dataset, broken, "images", reopen=True).facts())
        test = usable(dataset, all_features, (~dataset.is_train).nonzero().flatten(), run.power)
        tests.append((test.features, [dataset.classes[at] for at in test.labels.tolist()]))
        patients.append(test.units)
    features, truth = torch.cat([x for x, _ in tests]), [name for _, own in tests for name in own]
    # A class that no site has, or that noise has hidden: the model gives it a probability of zero.
    every = (*names, *class_order({*truth} - {*names}))
    labels = class_indices(every, truth)
    scores = model.scores(features)
    info: Info = {"accuracy.model": _accuracy(scores, labels)}
    if not baselines:
        return info
    # What a model reaches that always gives the largest class: the least that a useful model must
    # exceed.
    info["accuracy.majority"] = int(torch.bincount(labels, minlength=1).max()) / max(1, len(labels))
    info[DATA] = json.dumps(reports)
    lowest, more = torch.finfo(scores.dtype).min, len(every) - len(names)
    padded = torch.nn.functional.pad(scores, (0, more), value=lowest)
    if (found := quality_of(padded, labels, every, _of_all(patients))) is not None:
        info[QUALITY] = packed_quality(found)
    if run.settings.compare:
        info |= _baselines(
            parts, (features, labels), len(names), run.settings.head, run.settings.seed
        )
    some = torch.randperm(len(labels), generator=torch.Generator().manual_seed(run.settings.seed))
    some = some[labels[some] < len(names)][:PICTURE_POINTS]
    if (plane := model.plane()) is None:
        return info
    x, y = (model.prepare(features[some]) @ plane).T.tolist()
    return info | {"points.x": x, "points.y": y, "points.label": labels[some].tolist()}


def _of_all(patients: list[tuple[str, ...] | None]) -> list[str] | None:
    """The patients of all data sets; those of two data sets are two patients."""
    if None in patients:
        return None
    return [f"{at} {name}" for at, names in enumerate(patients) for name in names or ()]


def _of_target(model: Head, run: Run, node: NodeConfig) -> Info:
    """How well a model of another target than classes answers on all test records."""
    scores, values, reports = [], [], []
    for dataset, _ in whole(run.settings, run.target, node.num_partitions):
        features = dataset_features(dataset, run.settings, node, policy_of(node).cache_mib)
        test = usable(dataset, features, (~dataset.is_train).nonzero().flatten(), run.power)
        scores.append(model.scores(test.features))
        values.append(test.targets())
        reports.append(dataset.report.facts())
    sums = measured(model.target, model.header.classes, torch.cat(scores), torch.cat(values))
    return {METRIC_VALUES: packed(sums), DATA: json.dumps(reports)}


def check_comparable(node: NodeConfig) -> None:
    """Raise DataError at a site that has data of its own, before anything reads them."""
    if node.data:
        raise DataError(
            "a comparison needs the data of all sites; it is possible in a simulation only"
        )


def _baselines(
    parts: list[tuple[Tensor, Tensor]],
    test: tuple[Tensor, Tensor],
    classes: int,
    head: HeadSettings,
    seed: int,
) -> Info:
    features, labels = test
    parts = [(x[y >= 0], y[y >= 0]) for x, y in parts]
    pooled = [torch.cat(column) for column in zip(*parts, strict=True)]
    weight, bias = train_on_features(pooled[0], pooled[1], classes, head, seed)
    heads = [train_on_features(x, y, classes, head, seed) for x, y in parts]
    logits = torch.stack([features @ w.T + b for w, b in heads])
    mean_weight, mean_bias = (torch.stack(tensors).mean(0) for tensors in zip(*heads, strict=True))
    dimension = features.shape[1]
    head_bytes = 2 * classes * (dimension + 1) * len(heads)
    return {
        "accuracy.centralized": _accuracy(features @ weight.T + bias, labels),
        "accuracy.ensemble": _accuracy(logits.softmax(2).mean(0), labels),
        "accuracy.average": _accuracy(features @ mean_weight.T + mean_bias, labels),
        "bytes.centralized": 2 * pooled[0].numel(),
        "bytes.ensemble": head_bytes,
        "bytes.average": head_bytes,
    }


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).double().mean())


Step = Callable[[Job], tuple[MethodOutput, Head]]
OPEN_HEAD = "head.pb"


def pass_on(job: Job, step: Step) -> MethodOutput:
    """The chain message that this site passes on: `step` makes it from the received one.

    Args:
        job: the request, with the received chain message; the first site of a chain has none.
        step: makes the output and the site's own head.

    Raises:
        SealError: for a chain message that was changed, or was not sealed for this site; and as `step`.
    """
    sealed = job.run.settings.fedpft.seal
    payload = _opened(job) if sealed and job.payload is not None else job.payload
    made, head = step(replace(job, payload=payload))
    if sealed:
        named = str(job.info.get("readers", "")).split(",")
        readers = {name: key for name, key in _keys(job.node, job.info).items() if name in named}
        context = _context(job.run.digest, job.lineage, job.site, job.info.get("hop"))
        message = seal(made.payload, private_key(job.node, job.site), readers, context)
        made = replace(made, payload=message, sealed=True)
    # Only the head of an open chain can be requested later. A head from sealed or private chain messages
    # has another file name, so no later request finds it, whatever settings that request has.
    confidential = sealed or job.run.private
    file = job.state / ("confidential-head.pb" if confidential else OPEN_HEAD)
    return replace(made, answer=_worth(job, head), keep={file: pack_classifier(head)})


def kept_head(state: Path) -> Classifier:
    """The head that this site kept from its step of an unsealed chain.

    Args:
        state: folder of the run at this site.

    Raises:
        DataError: when it has none.
    """
    file = state / OPEN_HEAD
    if not file.is_file():
        raise DataError(f"no head of this run in {str(file)!r}")
    return unpack_classifier(file.read_bytes())


def _opened(job: Job) -> bytes:
    sender, keys = str(job.info.get("sender", "")), _keys(job.node, job.info)
    if sender not in keys:
        raise SealError(f"a sealed chain message from {sender[:64]!r}, whose key was not received")
    assert job.payload is not None
    context = _context(job.run.digest, job.lineage, sender, job.info.get("sent-hop"))
    return open_sealed(
        job.payload, job.site, private_key(job.node, job.site), keys[sender], context
    )


def _keys(node: NodeConfig, info: Mapping[str, object]) -> dict[str, bytes]:
    return received_keys(node, info.get("keys", "{}"))


def _context(run: str, lineage: str, sender: str, number: object) -> bytes:
    return "\0".join((run, lineage, sender, str(number))).encode()


def _worth(job: Job, head: Head) -> Info:
    """The head's accuracy on all test data of a simulation. A hospital reports one only when an
    evaluation is requested.
    """
    if not job.found.simulated:
        return {}
    return {"accuracy.model": compare(head, job.run, job.node, baselines=False)["accuracy.model"]}
