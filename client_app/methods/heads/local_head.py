"""A site's own head, trained on its own records. One-shot methods send it once; `local` keeps it at
the site.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.head_training import train_on_features
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.wire.model_proto import pack_parameters


def own_head(task: Task) -> MethodOutput:
    """The head that a site releases. FedBE, which labels features at the coordinator, also gets
    their moments.
    """
    features, labels, frame = task.own_data(task.classes)
    return _released(task, features, labels, frame)


def student_head(task: Task) -> MethodOutput:
    """A head that the site's teachers teach.

    `baseline.teachers` heads, trained on disjoint parts of the records, vote on their labels; the
    released head is the teachers' student.

    Args:
        task: the request.

    Source: FedKT (Li et al. 2021).
    """
    features, labels, frame = task.own_data(task.classes)
    return _released(task, features, _votes(task, features, labels, len(task.classes)), frame)


def _released(task: Task, features: Tensor, labels: Tensor, frame: bytes) -> MethodOutput:
    """A head trained on these labels, and what else the method sends: moments of the features of
    all classes together.
    """
    settings = task.run
    weight, bias = train_on_features(
        features, labels, len(task.classes), settings.settings.head, settings.settings.seed
    )
    tensors = {"weight": weight, "bias": bias}
    if any(field.name == "deviation" for field in settings.plan.messages.sends):
        tensors |= {"mean": features.mean(0), "deviation": features.std(0, correction=0)}
    header = task.header(task.classes, frame)
    return MethodOutput(pack_parameters(Parameters(header, 1, tensors, len(labels))))


def local_head(task: Task) -> Head:
    """The head that this site has without a federation."""
    classes = task.found.classes
    features, labels, frame = task.own_data(classes)
    return Head(
        task.header(classes, frame),
        *train_on_features(
            features, labels, len(classes), task.run.settings.head, task.run.settings.seed
        ),
    )


def _votes(task: Task, features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The label (n,) that most of the site's teachers predict for each record."""
    order = torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(task.run.settings.seed)
    )
    parts = [part for part in order.tensor_split(task.run.settings.baseline.teachers) if len(part)]
    votes = torch.zeros(len(labels), classes)
    for part in parts:
        weight, bias = train_on_features(
            features[part], labels[part], classes, task.run.settings.head, task.run.settings.seed
        )
        votes[torch.arange(len(labels)), (features @ weight.T + bias).argmax(1)] += 1
    return votes.argmax(1)
