"""The paper's baselines on the whole data of a simulation: a centralized head, ensemble and average of heads,
on all test records.

They run at one simulated site: only site code may use data and backbone, and every simulated site
can read all data of the run. A hospital's own data never comes here: `whole` refuses unless the
site is a share of the run's data.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.data_report import DATA
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.class_metrics import QUALITY, packed_quality, quality_of
from fedsurrogate.common.models.classifiers import Classifier, Head, class_indices
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.targets.metrics import METRIC_VALUES, measured, packed
from fedsurrogate.common.wire.records import Info

from ..datasets.dataset import class_order
from ..datasets.partition import share, whole
from ..features.site_features import dataset_features, in_simulation, usable, with_broken
from ..governance.policy import policy_of
from ..node_config import NodeConfig
from .evaluation import of_target

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
        assert test.values is not None
        scores.append(model.scores(test.features))
        values.append(test.values)
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
