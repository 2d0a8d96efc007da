"""How well the model received at the end of a run answers on a site's own test records; by method."""

from __future__ import annotations

import json

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.targets.metrics import METRIC_VALUES, facts_of, measured, packed
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.model_proto import unpack_classifier
from fedsurrogate.common.wire.records import Info

from ..governance.gate import Gate
from .job import Job


def received_model(job: Job, gate: Gate) -> Info:
    """Evaluate the model that was received.

    Args:
        job: the request, with the model.
        gate: of the site.

    Raises:
        SurrogateError: for a model that is not this run's, or not for this site's backbone.
    """
    return counted(
        checked_classifier(job).accuracy(
            job.found.test.features, job.found.classes, job.found.test.labels
        )
    )


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
