"""Personalization of a federated head: FedLambda mixes in a local head, kNN-Per the site's nearest
records.
"""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.governance.gate import Gate
from client_app.methods.evaluation import checked_classifier, counted
from client_app.methods.task import Task
from common.models.classifiers import Classifier, class_indices
from common.models.head_training import train_on_features
from common.wire.records import Info

# Candidate weights of the site's own part in the mixture.
SHARES = torch.linspace(0, 1, 11)


def personal(task: Task, gate: Gate, flower_run: str) -> Info:
    """Evaluate the received head mixed with the site's own part.

    Args:
        task: the request, with the head.
        gate: of the site.
        flower_run: id of the run.

    Raises:
        SurrogateError: for a head that is not this run's.
    """
    return counted(personal_accuracy(task, checked_classifier(task)))


def personal_accuracy(task: Task, model: Classifier) -> tuple[int, int]:
    """Evaluate a mixture of the site's own and federated probabilities.

    The weight of the own part, 0 to 1, maximises validation accuracy; among equals, the likelihood
    decides. The share `baseline.validation` of the training records is held out for that.
    FedLambda: the own part is a head. kNN-Per: it is the nearest records, weighted by distance.

    Args:
        task: the request.
        model: the federated head.

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
    own = _Own(task, features[rest], labels[rest], len(names))
    share = _share(
        own(features[validation]), model.scores(features[validation]).softmax(1), labels[validation]
    )
    test, truth = (
        task.found.test.features.float(),
        class_indices(names, task.found.classes)[task.found.test.labels],
    )
    if not len(truth):
        return 0, 0
    mixed = share * own(test) + (1 - share) * model.scores(test).softmax(1)
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


class _Own:
    """Class probabilities (n, C) from the site's own records."""

    def __init__(self, task: Task, features: Tensor, labels: Tensor, classes: int) -> None:
        self.classes, self.labels, self.neighbours = (
            classes,
            labels,
            min(task.run.settings.baseline.neighbours, len(labels)),
        )
        self.memory = (
            torch.nn.functional.normalize(features, dim=1)
            if task.run.settings.method == "knn-per"
            else None
        )
        self.head = (
            train_on_features(
                features, labels, classes, task.run.settings.head, task.run.settings.seed
            )
            if self.memory is None
            else None
        )

    def __call__(self, features: Tensor) -> Tensor:
        if self.head is not None:
            return (features @ self.head[0].T + self.head[1]).softmax(1)
        assert self.memory is not None
        distances = torch.cdist(torch.nn.functional.normalize(features, dim=1), self.memory)
        near, index = distances.topk(self.neighbours, largest=False)
        weights = (-near / near.mean().clamp_min(1e-9)).softmax(1)
        return torch.zeros(len(features), self.classes).scatter_add_(1, self.labels[index], weights)
