"""Personalization of a federated head: FedLambda mixes in a local head, kNN-Per the site's nearest
records.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.methods.evaluation import checked_classifier, counted
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.common.models.classifiers import Classifier, class_indices
from fedsurrogate.common.models.head_training import train_on_features
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.wire.records import Info

# Candidate weights of the site's own part in the mixture.
SHARES = torch.linspace(0, 1, 11)
# Class probabilities (n, C) of features (n, d), and what makes them from the features, labels and
# number of classes of the site's own records.
Scores = Callable[[Tensor], Tensor]
Fit = Callable[[Tensor, Tensor, int], Scores]


def with_head(task: Task, gate: Gate) -> Info:
    """Evaluate the received head mixed with a head of the site's own (FedLambda).

    Args:
        task: the request, with the received head.
        gate: of the site.

    Raises:
        SurrogateError: for a head that is not this run's.
    """
    own = task.run.settings
    fit = partial(own_head, head=own.head, seed=own.seed)
    return counted(personal_accuracy(task, checked_classifier(task), fit))


def with_neighbours(task: Task, gate: Gate) -> Info:
    """Evaluate the received head mixed with the site's nearest records (kNN-Per).

    Args:
        task: as in `with_head`.
        gate: as in `with_head`.

    Raises:
        SurrogateError: for a head that is not this run's.
    """
    fit = partial(nearest_records, neighbours=task.run.settings.baseline.neighbours)
    return counted(personal_accuracy(task, checked_classifier(task), fit))


def personal_accuracy(task: Task, model: Classifier, fit: Fit) -> tuple[int, int]:
    """Evaluate a mixture of the site's own and federated probabilities.

    The weight of the own part, 0 to 1, maximises validation accuracy; among equals, the likelihood
    decides. The share `baseline.validation` of the training records is held out for that.

    Args:
        task: the request.
        model: the federated head.
        fit: makes the site's own part.

    Returns:
        Numbers of correct predictions and of test records.

    Source: kNN-Per (Marfoq et al. 2022).
    """
    names = model.header.classes
    features, labels = task.training_data(names)
    order = torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(task.run.settings.seed)
    )
    held = max(1, round(task.run.settings.baseline.validation * len(labels)))
    if held == len(labels):
        return model.accuracy(task.found.test.features, task.found.classes, task.found.test.labels)
    validation, rest = order[:held], order[held:]
    own = fit(model.framed(features[rest]), labels[rest], len(names))
    share = _share(
        own(model.framed(features[validation])),
        model.scores(features[validation]).softmax(1),
        labels[validation],
    )
    test, truth = (
        task.found.test.features.float(),
        class_indices(names, task.found.classes)[task.found.test.labels],
    )
    if not len(truth):
        return 0, 0
    mixed = share * own(model.framed(test)) + (1 - share) * model.scores(test).softmax(1)
    return int((mixed.argmax(1) == truth).sum()), len(truth)


def _share(own: Tensor, federated: Tensor, labels: Tensor) -> float:
    mixed = SHARES[:, None, None] * own + (1 - SHARES[:, None, None]) * federated
    right = (mixed.argmax(2) == labels).float().mean(1)
    likely = (
        mixed.gather(2, labels.expand(len(SHARES), -1)[:, :, None])
        .clamp_min(1e-6)
        .log()
        .mean((1, 2))
    )
    return float(SHARES[int((right + 1e-3 * torch.tanh(likely)).argmax())])


def own_head(
    features: Tensor, labels: Tensor, classes: int, head: HeadSettings, seed: int
) -> Scores:
    """Probabilities of a head that is trained on the site's own records.

    Args:
        features: (n, d).
        labels: indices of classes, (n,).
        classes: their number, C.
        head: how it is trained.
        seed: of the training.
    """
    weight, bias = train_on_features(features, labels, classes, head, seed)
    return lambda asked: (asked @ weight.T + bias).softmax(1)


def nearest_records(features: Tensor, labels: Tensor, classes: int, neighbours: int) -> Scores:
    """Shares of the classes among the nearest of the site's own records, weighted by distance.

    Args:
        features: as in `own_head`.
        labels: as in `own_head`.
        classes: as in `own_head`.
        neighbours: number of records, or all if there are fewer.
    """
    memory = torch.nn.functional.normalize(features, dim=1)
    count = min(neighbours, len(labels))

    def scores(asked: Tensor) -> Tensor:
        distances = torch.cdist(torch.nn.functional.normalize(asked, dim=1), memory)
        near, index = distances.topk(count, largest=False)
        weights = (-near / near.mean().clamp_min(1e-9)).softmax(1)
        return torch.zeros(len(asked), classes).scatter_add_(1, labels[index], weights)

    return scores
