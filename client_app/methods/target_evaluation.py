"""How well a received model of another target than classes answers on a site's own test records."""

from __future__ import annotations

import json

from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.methods.evaluation import checked_classifier
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.targets.answers import facts_of
from fedsurrogate.common.targets.measures import MEASURES, measured, packed
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.records import Info

# Who annotates which label, and how a model was learned, says nothing of what it answers.
NOT_ITS_MEANING = {"sets", "code", "moments", "head", "steps", "names"}


def received_model(task: Task, gate: Gate) -> Info:
    """Evaluate the model that was received.

    Args:
        task: the request, with the model.
        gate: of the site.

    Raises:
        SurrogateError: for a model that is not this run's, of another target, or not for this
            site's backbone.
    """
    model, test = checked_classifier(task), task.found.test
    head = of_target(model, task.run.target)
    if test.values is None or not len(test.features):
        return {"correct": 0, "tested": 0}
    sums = measured(head.target, head.header.classes, head.scores(test.features), test.values)
    return {"correct": 0, "tested": len(test.features), MEASURES: packed(sums)}


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
