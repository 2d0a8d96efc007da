"""Training at one site: a network by plain SGD, with the terms of FedProx and SCAFFOLD where requested, and a
linear head for methods that send it once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.networks import build, of_target
from fedsurrogate.common.models.parameters import Parameters, Tensors, check_update
from fedsurrogate.common.models.training_parts import UncompiledSGD, train_on_features
from fedsurrogate.common.settings import FedAvgSettings, HeadSettings, Model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.target import Objective

from .job import Job, MethodOutput

# Losses of records (n,), from outputs (n, o) and what is known of the records, (n, ...).
Losses = Callable[[Tensor, Tensor], Tensor]


def class_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record (n,)."""
    return cross_entropy(outputs, labels, reduction="none")


@dataclass(frozen=True)
class Variant:
    """Changes to plain local SGD in variants of FedAvg; the defaults change nothing.

    Attributes:
        mu: weight of FedProx's term (mu / 2) |w - w_0|^2 around the start w_0.
        correction: SCAFFOLD's c - c_i, added to every gradient.
        single_step: one batch only (FedSGD).
        losses: of records (n,), from outputs and labels, or the code of another target.
        faster: multiples of the learning rate, by parameter.

    Source: FedProx (Li et al. 2020); SCAFFOLD (Karimireddy et al. 2020).
    """

    mu: float = 0.0
    correction: Tensors | None = None
    single_step: bool = False
    losses: Losses = class_losses
    faster: Mapping[str, float] = field(default_factory=dict)


PLAIN = Variant()


def network(
    kind: Model, inputs: int, classes: int, tensors: Tensors, objective: Objective | None = None
) -> nn.Module:
    """A network with a copy of these parameters.

    Args:
        kind: of the network.
        inputs: d, numbers in the features of a record.
        classes: number of classes.
        tensors: the parameters, by name.
        objective: of another target than classes, whose model is linear.

    Raises:
        SurrogateError: for parameters of another model.
    """
    if objective is None:
        module = build(kind, inputs, classes, tensors)
    else:
        module = of_target(objective, inputs)
        wanted = {name: parameter.shape for name, parameter in module.named_parameters()}
        if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
            raise SurrogateError(f"a model that is not the run's, for {inputs} features")
    module.load_state_dict(dict(tensors))
    return module


def step_length(
    kind: Model, settings: FedAvgSettings, features: Tensor, linear: float = 0.0
) -> float:
    """The learning rate; for a linear model over the mean squared norm of its inputs, the scale of
    its curvature.

    Args:
        kind: of the network.
        settings: the rate before that.
        features: inputs of the network, (n, d).
        linear: default of a linear model of another target than classes; 0 for classes.
    """
    rate = settings.rate(private=False, linear=linear)
    if kind != "linear":
        return rate
    return rate / mean_square(features)


def mean_square(features: Tensor) -> float:
    """Mean squared norm of features (n, d), above zero."""
    return max(float(features.square().sum(1).mean()), 1e-12)


def train(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    settings: FedAvgSettings,
    rate: float,
    generator: torch.Generator,
    variant: Variant = PLAIN,
) -> int:
    """Train a network in place by SGD, `settings.local_epochs` times over the records.

    Parameters that need no gradient stay as they are; without records, all do.

    Args:
        module: the network.
        features: of the records, (n, d).
        labels: indices of classes, (n,), or the code of another target, (n, q).
        settings: epochs, size of a batch and momentum.
        rate: learning rate.
        generator: of the order of the records.
        variant: changes to plain SGD.

    Returns:
        The number of steps.
    """
    if not len(labels):
        return 0
    trained = [(name, own) for name, own in module.named_parameters() if own.requires_grad]
    start = [parameter.detach().clone() for _, parameter in trained] if variant.mu else []
    rates = [rate * variant.faster.get(name, 1.0) for name, _ in trained]
    groups = [{"params": [own], "lr": lr} for (_, own), lr in zip(trained, rates, strict=True)]
    optimiser = UncompiledSGD(groups, lr=rate, momentum=settings.momentum)
    steps = 0
    for rows in batches(len(labels), settings.local_epochs, settings.batch_size, generator):
        optimiser.zero_grad()
        losses = variant.losses(module(features[rows]), labels[rows])
        losses.mean().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for index, (name, parameter) in enumerate(trained):
                assert parameter.grad is not None
                if variant.mu:
                    parameter.grad.add_(parameter - start[index], alpha=variant.mu)
                if variant.correction is not None:
                    parameter.grad.add_(variant.correction[name].to(parameter))
        optimiser.step()
        steps += 1
        if variant.single_step:
            break
    return steps


def batches(count: int, epochs: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of each step, in a new order for each epoch.

    Args:
        count: of records.
        epochs: passes over them.
        size: of a batch at most.
        generator: of the order.
    """
    for _ in range(epochs if count else 0):
        yield from torch.split(torch.randperm(count, generator=generator), size)


def own_head(job: Job) -> MethodOutput:
    """The head that a site releases."""
    features, labels, frame = job.own_data(job.classes)
    header, own = job.header(job.classes, frame), job.run.settings
    return _sent(_trained((own.head, own.seed), features, labels, header), len(labels))


def local_head(job: Job) -> Head:
    """The head that this site has without a federation."""
    features, labels, frame = job.own_data(job.found.classes)
    header, own = job.header(job.found.classes, frame), job.run.settings
    return _trained((own.head, own.seed), features, labels, header)


def _trained(
    own: tuple[HeadSettings, int],
    features: Tensor,
    targets: Tensor,
    header: Header,
    loss: Losses = cross_entropy,
) -> Head:
    """A head, trained by these settings and with this seed."""
    return Head(header, *train_on_features(features, targets, len(header.classes), *own, loss))


def _sent(head: Head, records: int) -> MethodOutput:
    # Training alone needs no messages, and runs where their packages are not installed.
    from fedsurrogate.common.wire.model_proto import pack_parameters

    from .job import MethodOutput

    tensors = {"weight": head.weight, "bias": head.bias}
    return MethodOutput(pack_parameters(Parameters(head.header, 1, tensors, records)))


def distil_chain(job: Job) -> MethodOutput:
    """The chain message that this site passes on. Raises as `distil` and `pass_on`."""
    from .evaluation import pass_on

    return pass_on(job, distil)


def distil(job: Job) -> tuple[MethodOutput, Head]:
    """Train this site's head on its records and on the received head's outputs.

    The loss is (1 - w) cross-entropy + w T^2 KL(teacher || own) at temperature T, both on the
    site's own features. The first site has no teacher.

    Args:
        job: the request, with the received head.

    Returns:
        The chain message for the next site, and the head.

    Raises:
        SurrogateError: for a head of another run, of other classes, or for another backbone; or a
            request without the classes.

    Source: Hinton et al. 2015.
    """
    from fedsurrogate.common.wire.model_proto import unpack_parameters

    classes = _classes(job.info)
    features, labels = job.training_data(classes)
    run, header = job.run, job.header(classes)
    own = run.settings.head, run.settings.seed
    if job.payload is None:
        head = _trained(own, features, labels, header)
        return _sent(head, len(labels)), head
    teacher = unpack_parameters(job.payload)
    stated = teacher.header
    expected = classes, run.digest, job.found.fingerprint
    if (stated.classes, stated.run, stated.fingerprint) != expected:
        raise SurrogateError("a head of another run, of other classes, or for another backbone")
    shapes = {"weight": (len(classes), features.shape[1]), "bias": (len(classes),)}
    check_update(teacher, shapes, 1, private=False)
    lessons = features @ teacher.tensors["weight"].T + teacher.tensors["bias"]
    targets = torch.cat([labels[:, None], lessons], 1)
    head = _trained(own, features, targets, header, _loss(run.settings.baseline.temperature))
    return _sent(head, len(labels)), head


def _loss(t: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of logits (n, C) for targets (n, 1 + C), the label and the teacher's logits, at
    temperature t, half of it for the teacher.
    """

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        own = cross_entropy(logits, wanted[:, 0].long())
        pair = (logits / t).log_softmax(1), (wanted[:, 1:] / t).log_softmax(1)
        taught = torch.nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
        return (own + t**2 * taught) / 2

    return loss


def _classes(info: Mapping[str, object]) -> tuple[str, ...]:
    """The classes of all sites, as the coordinator collected them."""
    try:
        named = json.loads(str(info.get("classes", "")))
    except (ValueError, RecursionError):
        named = None
    if not isinstance(named, list):
        raise SurrogateError("a request without the classes of the run")
    return distinct_names(named, "class")
