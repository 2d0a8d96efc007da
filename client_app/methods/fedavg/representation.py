"""FedRep at a site: the shared representation (body) is trained below a head of its own, which
never leaves the site.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.client_app.methods.evaluation import checked_classifier
from fedsurrogate.client_app.methods.local_training import network, train
from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Network
from fedsurrogate.common.models.head_training import train_on_features
from fedsurrogate.common.models.networks import HEAD, body_of, embed, fresh
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.wire.model_proto import pack_parameters


def update_body(task: Task) -> MethodOutput:
    """Fit this site's head to the received body, then train the body below this head.

    Args:
        task: the request, with the body.

    Returns:
        The body's change.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's, or a body of another network.

    Source: Collins et al. 2021, algorithm 1. Differs from the paper: the head is fitted anew for
    every body, as in the paper's analysis; its experiments continue the last round's head for a few
    steps. So a site keeps no state, and a round that it misses changes nothing.
    """
    run, received = task.run, task.received_model()
    frame = received.header.frame
    features, labels = task.training_data(received.header.classes, frame)
    settings, classes = run.settings.fedavg, len(received.header.classes)
    tensors = _with_own_head(task, received.tensors, features, labels, classes)
    module = network(settings.kind, features.shape[1], classes, tensors)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(HEAD))
    generator = stream(run.settings.seed, task.site, task.round)
    train(module, features, labels, settings, settings.rate(private=False), generator)
    trained = body_of(dict(module.named_parameters()))
    moved = {
        name: parameter.detach() - received.tensors[name] for name, parameter in trained.items()
    }
    header = task.header(received.header.classes, frame)
    answer = Parameters(header, received.round, moved, len(labels))
    return MethodOutput(pack_parameters(answer))


def own_network(task: Task) -> Classifier:
    """The received body with a head that this site fits to its own records. Raises SurrogateError,
    DataError.
    """
    received, kind = checked_classifier(task), task.run.settings.fedavg.kind
    if not isinstance(received, Network) or received.kind != kind:
        raise SurrogateError(f"a model that is no {kind}")
    names, frame = received.header.classes, received.header.frame
    features, labels = task.training_data(names, frame)
    tensors = _with_own_head(task, body_of(received.tensors), features, labels, len(names))
    return Network(task.header(names, frame), kind, features.shape[1], tensors)


def own_head(
    task: Task, body: Tensors, features: Tensor, labels: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """A head trained on the body's outputs for features; an empty body gives the head on these
    themselves.

    Args:
        task: the request; its settings name the network.
        body: parameters of the body, by name.
        features: of the records, (n, d).
        labels: indices of classes, (n,).
        classes: C, number of classes.

    Returns:
        Weight (C, width) and bias (C,).

    Raises:
        SurrogateError: for a body of another network.
    """
    settings = task.run.settings.fedavg
    module = fresh(settings.kind, features.shape[1], classes, settings.width)
    wanted = {name: p.shape for name, p in body_of(dict(module.named_parameters())).items()}
    if {name: tensor.shape for name, tensor in body.items()} != wanted:
        raise SurrogateError(
            f"a body that is not that of a {settings.kind} of width {settings.width}"
        )
    with torch.no_grad():
        embedded = torch.cat([embed(module, body, part) for part in torch.split(features, 1000)])
    return train_on_features(
        embedded, labels, classes, task.run.settings.head, task.run.settings.seed
    )


def _with_own_head(
    task: Task, body: Tensors, features: Tensor, labels: Tensor, classes: int
) -> dict[str, Tensor]:
    weight, bias = own_head(task, body, features, labels, classes)
    return {**body, HEAD + "weight": weight, HEAD + "bias": bias}
