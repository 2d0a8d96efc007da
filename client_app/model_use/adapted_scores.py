"""A site's own version of a model of labels or of times: its scores moved, scaled, or corrected on own
records, as far as they raise the likelihood of records that were not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.client_app.model_use.adaptation import (
    FEWEST,
    FOLDS,
    PENALTIES,
    SHARED,
    Adaptation,
)
from fedsurrogate.client_app.model_use.adapted_numbers import (
    CORRECTED,
    MOVED,
    SCALED,
    UNCHANGED,
    adapt_numbers,
    judged_versions,
    patient_folds,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.targets.answers import facts_of
from fedsurrogate.common.targets.labels import LABELS, Labels
from fedsurrogate.common.targets.number import NUMBER
from fedsurrogate.common.targets.objective import Objective
from fedsurrogate.common.targets.target import Facts, Target
from fedsurrogate.common.targets.time import TIME, Time

# Deviations of an offset and of the logarithm of a slope, as they are expected before records are
# seen. They keep both finite where all records of a label are alike.
OFFSET, SLOPE = 3.0, 1.0
STEPS = 100
# The loss of each record, (n,), from scores (n, o).
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Seen:
    """Records on which versions are fitted.

    Attributes:
        x: features as the model takes them, (n, d), float64.
        scores: of the shared model, (n, o), float64.
        loss: of each record.
    """

    x: Tensor
    scores: Tensor
    loss: Loss


def adapt_target(shared: Classifier, held: HeldOut, seed: int = 0) -> Adaptation:
    """Judge versions of a model by cross-validation over whole patients, and choose one.

    Moved: an offset is added to the scores. Scaled: they are multiplied as well. Corrected: weights
    change by a ridge, and by an offset. The loss of a record is minus its log likelihood: of its
    annotated labels, or of its time by the hazards of the model's bins. A version replaces the
    shared model only if its loss is lower beyond chance.

    Args:
        shared: the shared model.
        held: the site's records with values of the target.
        seed: of folds and bootstrap.

    Returns:
        The candidates. A chosen model of labels has the site's prevalence as that it has learned.

    Raises:
        ConfigError: for a model of another target.
        DataError: for too few records.

    Source: offset and slope: Cox 1958; van Houwelingen 2000.
    """
    facts = facts_of(shared.target) if isinstance(shared, Head) else {}
    if facts.get("name") == NUMBER.name:
        return adapt_numbers(shared, held, seed)
    if not isinstance(shared, Head) or facts.get("name") not in (LABELS.name, TIME.name):
        raise ConfigError(
            "an adaptation is for models of classes, numbers, labels and times; this one answers "
            f"{', '.join(shared.header.classes)[:200]}"
        )
    values = _checked(held, facts)
    folds = patient_folds(held, seed)
    target, objective = _target_of(facts, shared.header.classes)
    code = target.code(values)

    def seen(rows: Tensor) -> Seen:
        x, own = held.features[rows], code[rows]
        return Seen(
            shared.prepare(x).double(),
            shared.scores(x).double(),
            lambda scores: objective.losses(_outputs(facts, scores), own),
        )

    fits: dict[str, Callable[[Head, Seen], Head]] = {
        SHARED: lambda head, own: head,
        MOVED: _moved,
        SCALED: _scaled,
        CORRECTED: lambda head, own: _corrected(head, own, seed),
    }
    losses = {name: np.zeros(len(values)) for name in fits}
    for number in range(FOLDS):
        rest, rows = seen(folds != number), seen(folds == number)
        for name, fit in fits.items():
            made = fit(shared, rest)
            scores = rows.x @ made.weight.double().T + made.bias.double()
            losses[name][(folds == number).numpy()] = rows.loss(scores).numpy()
    judged, chosen, gain = judged_versions(losses, held, seed)
    if chosen == SHARED:
        return Adaptation(judged, SHARED, None, 0.0, UNCHANGED)
    head = fits[chosen](shared, seen(torch.ones(len(values), dtype=torch.bool)))
    reason = (
        f"its likelihood is higher than the shared model's beyond chance, by {gain:.3f} a record"
    )
    return Adaptation(judged, chosen, _as_learned_here(head, facts, values), 1.0, reason)


def _checked(held: HeldOut, facts: Facts) -> Tensor:
    """Values (n, k) of enough records."""
    values = held.values
    known = 0 if values is None else int((~values.isnan()).any(1).sum())
    if values is None or known < FEWEST:
        raise DataError(
            f"{known} records with values are too few to adapt a model; {FEWEST} needed"
        )
    events = int((values[:, 1] == 1).sum()) if facts["name"] == TIME.name else FOLDS
    if events < FOLDS:
        raise DataError(f"{events} records with an event are too few; {FOLDS} are needed")
    return values


def _target_of(facts: Facts, outputs: tuple[str, ...]) -> tuple[Target, Objective]:
    """What the values mean, and the losses of records."""
    target: Target
    if facts["name"] == LABELS.name:
        target = _Answered(tuple(facts["columns"]), answers=outputs)
    else:
        target = Time(tuple(facts["columns"]), tuple(map(float, facts["edges"])))
    objective = target.objective()
    assert objective is not None
    return target, objective


@dataclass(frozen=True)
class _Answered(Labels):
    """The labels that a model answers, in its order.

    Attributes:
        answers: of the model.
    """

    answers: tuple[str, ...] = ()

    def code(self, values: Tensor) -> Tensor:
        return super().code(values[:, [self.columns.index(name) for name in self.answers]])


def _outputs(facts: Facts, scores: Tensor) -> Tensor:
    """What the losses of a target are of: log odds of labels; log odds of the event in each bin."""
    if facts["name"] == LABELS.name:
        return scores
    if "levels" in facts:
        return torch.tensor(facts["levels"], dtype=torch.float64) + scores
    hazard = torch.tensor(facts["hazard"], dtype=torch.float64).clamp_min(1e-9)
    whole = (hazard * scores.clamp(-30, 30).exp()).clamp_min(1e-12)
    # log(e^h - 1), for any h.
    return whole + (-(-whole).expm1()).log()


def _least(parameters: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Minimise a convex loss, in place."""
    for each in parameters:
        each.requires_grad_(True)
    steps = torch.optim.LBFGS(
        parameters, max_iter=STEPS, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        steps.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    steps.step(closure)  # type: ignore[no-untyped-call]
    for each in parameters:
        each.requires_grad_(False)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def _moved(shared: Head, own: Seen) -> Head:
    offset = _zeros(own.scores.shape[1])
    share = 1 / len(own.x)
    _least(
        [offset],
        lambda: own.loss(own.scores + offset).mean() + share * (offset / OFFSET).square().sum() / 2,
    )
    return replace(shared, bias=(shared.bias.double() + offset).float())


def _scaled(shared: Head, own: Seen) -> Head:
    """Slopes stay above zero, so that no ranking is turned around."""
    offset, slope, middle = (
        _zeros(own.scores.shape[1]),
        _zeros(own.scores.shape[1]),
        own.scores.mean(0),
    )
    share = 1 / len(own.x)

    def loss() -> Tensor:
        scores = slope.exp() * (own.scores - middle) + middle + offset
        prior = (offset / OFFSET).square().sum() + (slope / SLOPE).square().sum()
        return own.loss(scores).mean() + share * prior / 2

    _least([offset, slope], loss)
    weight = slope.exp()[:, None] * shared.weight.double()
    bias = slope.exp() * (shared.bias.double() - middle) + middle + offset
    return replace(shared, weight=weight.float(), bias=bias.float())


def _corrected(shared: Head, own: Seen, seed: int) -> Head:
    """With the penalty that is best on a third of these records."""
    kept = torch.from_numpy(np.random.default_rng(seed).permutation(len(own.x)) % 3 > 0)
    weights = {True: kept.double() / kept.sum(), False: (~kept).double() / (~kept).sum()}
    loss: dict[float, float] = {}
    for penalty in PENALTIES:
        change, offset = _change(own, penalty, weights[True])
        scores = own.scores + own.x @ change.T + offset
        loss[penalty] = float(weights[False] @ own.loss(scores))
    whole = torch.full((len(own.x),), 1 / len(own.x), dtype=torch.float64)
    change, offset = _change(own, min(loss, key=loss.__getitem__), whole)
    return replace(
        shared,
        weight=(shared.weight.double() + change).float(),
        bias=(shared.bias.double() + offset).float(),
    )


def _change(own: Seen, penalty: float, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (o, d) and offset (o,) that are added, by records with these weights (n,)."""
    count = own.scores.shape[1]
    middle = weights @ own.x
    apart = own.x - middle
    strength = penalty * float(weights @ apart.square().sum(1)) / own.x.shape[1]
    change, offset = _zeros(count, own.x.shape[1]), _zeros(count)

    def loss() -> Tensor:
        scores = own.scores + apart @ change.T + offset
        prior = strength * change.square().sum() / 2
        prior = prior + (offset / OFFSET).square().sum() / 2 / len(own.x)
        return weights @ own.loss(scores) + prior

    _least([change, offset], loss)
    return change, offset - change @ middle


def _as_learned_here(head: Head, facts: Facts, values: Tensor) -> Head:
    """With the prevalence of labels at this site, which the offsets now assume."""
    if facts["name"] != LABELS.name:
        return head
    columns = list(facts["columns"])
    shares: list[float] = []
    learned: Mapping[str, float] = dict(
        zip(head.header.classes, facts.get("prevalence", []), strict=False)
    )
    for name in head.header.classes:
        own = values[:, columns.index(name)]
        known = own[~own.isnan()]
        # A label that is annotated nowhere here stays as it was.
        share = (float(known.sum()) + 0.5) / (len(known) + 1)
        shares.append(share if len(known) else learned.get(name, share))
    return replace(head, target=json.dumps({**facts, "prevalence": shares}))
