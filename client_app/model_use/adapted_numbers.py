"""A site's own version of a model of numbers: moved, scaled, or corrected by a ridge on own records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.client_app.model_use.adaptation import (
    DRAWS,
    FEWEST,
    FOLDS,
    PENALTIES,
    SHARED,
    Adaptation,
    Judgement,
    Losses,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.intervals import bootstrap_weights, means_of
from fedsurrogate.common.targets.answers import facts_of
from fedsurrogate.common.targets.number import NUMBER

UNCHANGED = "no candidate is better than the shared model beyond chance"
MOVED, SCALED, CORRECTED = "moved", "scaled", "corrected by a ridge"
Fit = Callable[[Tensor, Tensor], Head]


def adapt_numbers(shared: Classifier, held: HeldOut, seed: int = 0) -> Adaptation:
    """Judge versions of a model of numbers by cross-validation over whole patients, and choose one.

    Moved: an intercept is added. Scaled: own numbers are a line in what the model predicts.
    Corrected: a ridge on own records explains what the model leaves, around their means. A version
    replaces the shared model only if its squared error is lower beyond chance.

    Args:
        shared: the shared model.
        held: the site's records with values.
        seed: of folds and bootstrap.

    Returns:
        The candidates, whose losses are mean squared errors as shares of the variance of the
        numbers. The chosen model has the deviation of its errors in cross-validation, so that its
        intervals are this site's.

    Raises:
        ConfigError: for a model of another target.
        DataError: for too few records.
    """
    if not isinstance(shared, Head) or facts_of(shared.target).get("name") != NUMBER.name:
        raise ConfigError(
            f"not a model of numbers; this one answers {', '.join(shared.header.classes)[:200]}"
        )
    values, folds = _values(shared, held), patient_folds(held, seed)
    fits: dict[str, Fit] = {
        SHARED: lambda x, y: shared,
        MOVED: lambda x, y: _moved(shared, x, y),
        SCALED: lambda x, y: _scaled(shared, x, y),
        CORRECTED: lambda x, y: _corrected(shared, x, y, seed),
    }
    spread = values.var(0, unbiased=False).clamp_min(1e-12)
    errors = {name: _unseen(fit, held.features, values, folds) for name, fit in fits.items()}
    losses = {name: (each.square() / spread).mean(1).numpy() for name, each in errors.items()}
    judged, chosen, gain = judged_versions(losses, held, seed)
    if chosen == SHARED:
        return Adaptation(judged, SHARED, None, 0.0, UNCHANGED)
    reason = (
        f"its squared error is lower than the shared model's beyond chance, by {gain:.3f} of the "
        "variance"
    )
    head = _with_deviation(fits[chosen](held.features, values), errors[chosen])
    return Adaptation(judged, chosen, head, 1.0, reason)


def judged_versions(
    losses: Mapping[str, Losses], held: HeldOut, seed: int
) -> tuple[tuple[Judgement, ...], str, float]:
    """Versions of a model by their losses on records that they have not seen.

    Args:
        losses: of each version, (n,); one is SHARED.
        held: the records.
        seed: of the bootstrap.

    Returns:
        The versions; the name of the one with the smallest loss that is below the shared model's
        beyond chance, or SHARED; and by how much its loss is smaller.
    """
    weights = bootstrap_weights(len(held.features), held.patients, DRAWS, seed)
    judged = []
    for name, own in losses.items():
        apart = losses[SHARED] - own
        low, high = np.quantile(means_of(apart, weights), [0.025, 0.975])
        share = 0.0 if name == SHARED else 1.0
        judged.append(
            Judgement(
                name, None, float(own.mean()), float(apart.mean()), float(low), float(high), share
            )
        )
    for each in sorted(judged, key=lambda each: each.loss):
        if each.name == SHARED:
            break
        # Several candidates are tried, so each must pass a stricter test.
        gains = means_of(losses[SHARED] - losses[each.name], weights)
        if float(np.quantile(gains, 0.025 / len(losses))) > 0:
            return tuple(judged), each.name, each.gain
    return tuple(judged), SHARED, 0.0


def _values(shared: Head, held: HeldOut) -> Tensor:
    """(n, o), in the order of the model's outputs, within the range."""
    if held.values is None or len(held.values) < FEWEST:
        count = 0 if held.values is None else len(held.values)
        raise DataError(
            f"{count} records with values are too few to adapt a model; {FEWEST} needed"
        )
    facts = facts_of(shared.target)
    order = [list(facts["columns"]).index(name) for name in shared.header.classes]
    low, high = torch.tensor(facts["ranges"], dtype=torch.float64)[order].T
    return held.values[:, order].double().clamp(low, high)


def patient_folds(held: HeldOut, seed: int) -> Tensor:
    """The fold of each record; patients stay whole.

    Args:
        held: the records.
        seed: of the folds.

    Returns:
        (n,), int64.

    Raises:
        DataError: for too few patients.
    """
    groups = np.arange(len(held.features))
    if held.patients is not None:
        groups = np.unique(held.patients, return_inverse=True)[1]
    units = int(groups.max()) + 1
    if units < FOLDS:
        raise DataError(f"records of {units} patients are too few; {FOLDS} are needed")
    order = np.random.default_rng(seed).permutation(units) % FOLDS
    return torch.from_numpy(order[groups])


def _unseen(fit: Fit, features: Tensor, values: Tensor, folds: Tensor) -> Tensor:
    """Errors (n, o) of each record by a model that was fitted without its fold."""
    errors = torch.zeros_like(values)
    for number in range(FOLDS):
        rest, rows = folds != number, folds == number
        errors[rows] = values[rows] - fit(features[rest], values[rest]).scores(features[rows])
    return errors


def _moved(shared: Head, features: Tensor, values: Tensor) -> Head:
    shift = (values - shared.scores(features)).mean(0)
    return replace(shared, bias=(shared.bias.double() + shift).float())


def _scaled(shared: Head, features: Tensor, values: Tensor) -> Head:
    scores = shared.scores(features).double()
    apart = scores - scores.mean(0)
    slope = (apart * values).sum(0) / apart.square().sum(0).clamp_min(1e-12)
    bias = slope * (shared.bias.double() - scores.mean(0)) + values.mean(0)
    weight = slope[:, None] * shared.weight.double()
    return replace(shared, weight=weight.float(), bias=bias.float())


def _corrected(shared: Head, features: Tensor, values: Tensor, seed: int) -> Head:
    """With the penalty that is best on a third of these records."""
    kept = torch.from_numpy(np.random.default_rng(seed).permutation(len(values)) % 3 > 0)

    def error(penalty: float) -> float:
        head = _ridge(shared, features[kept], values[kept], penalty)
        spread = values.var(0, unbiased=False).clamp_min(1e-12)
        return float(((values[~kept] - head.scores(features[~kept])).square() / spread).mean())

    return _ridge(shared, features, values, min(PENALTIES, key=error))


def _ridge(shared: Head, features: Tensor, values: Tensor, penalty: float) -> Head:
    x = shared.prepare(features).double()
    rest = values - shared.scores(features).double()
    mean = x.mean(0)
    centred = x - mean
    # With fewer records than dimensions, the dual form solves a smaller system.
    kernel = centred @ centred.T
    kernel.diagonal().add_(penalty * float(centred.square().sum(1).mean()) + 1e-12)
    change = (centred.T @ torch.linalg.solve(kernel, rest - rest.mean(0))).T
    bias = shared.bias.double() + rest.mean(0) - change @ mean
    return replace(shared, weight=(shared.weight.double() + change).float(), bias=bias.float())


def _with_deviation(head: Head, errors: Tensor) -> Head:
    deviation = errors.square().mean(0).sqrt().tolist()
    return replace(head, target=json.dumps({**facts_of(head.target), "deviation": deviation}))
