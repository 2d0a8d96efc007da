"""A site's own head, trained on its own records. One-shot methods send it once; `local` keeps it at
the site; in distillation along a chain the received head teaches it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters, check_update
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters

from ..chain_step import pass_on
from ..task import MethodOutput, Task


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


def distil_chain(task: Task) -> MethodOutput:
    """The relay that this site passes on. Raises as `distil` and `pass_on`."""
    return pass_on(task, distil)


def distil(task: Task) -> tuple[MethodOutput, Head]:
    """Train this site's head on its records and on the received head's outputs.

    The loss is (1 - w) cross-entropy + w T^2 KL(teacher || own) at temperature T, both on the
    site's own features. The first site has no teacher.

    Args:
        task: the request, with the received head.

    Returns:
        The relay for the next site, and the head.

    Raises:
        SurrogateError: for a head of another run, of other classes, or for another backbone; or a
            request without the classes.

    Source: Hinton et al. 2015.
    """
    classes = _classes(task.info)
    features, labels = task.training_data(classes)
    run = task.run
    if task.payload is None:
        weight, bias = train_on_features(
            features, labels, len(classes), run.settings.head, run.settings.seed
        )
    else:
        teacher = unpack_parameters(task.payload)
        header = teacher.header
        if (header.classes, header.run, header.fingerprint) != (
            classes,
            run.digest,
            task.found.fingerprint,
        ):
            raise SurrogateError("a head of another run, of other classes, or for another backbone")
        check_update(
            teacher,
            {"weight": (len(classes), features.shape[1]), "bias": (len(classes),)},
            1,
            private=False,
        )
        lessons = features @ teacher.tensors["weight"].T + teacher.tensors["bias"]
        weight, bias = train_on_features(
            features,
            torch.cat([labels[:, None], lessons], 1),
            len(classes),
            run.settings.head,
            run.settings.seed,
            _loss(run.settings.baseline.temperature, run.settings.baseline.received),
        )
    head = Head(task.header(classes), weight, bias)
    made = MethodOutput(
        pack_parameters(Parameters(head.header, 1, {"weight": weight, "bias": bias}, len(labels)))
    )
    return made, head


def _loss(t: float, share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of logits (n, C) for targets (n, 1 + C), the label and the teacher's logits, at
    temperature t with that share for the teacher.
    """

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        own = torch.nn.functional.cross_entropy(logits, wanted[:, 0].long())
        taught = torch.nn.functional.kl_div(
            (logits / t).log_softmax(1),
            (wanted[:, 1:] / t).log_softmax(1),
            reduction="batchmean",
            log_target=True,
        )
        return (1 - share) * own + share * t**2 * taught

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
