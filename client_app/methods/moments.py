"""The sums over a site's records that a head in closed form needs: records and sums by class, and one second moment."""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.features.on_disk import clipped_features, forget
from client_app.methods.task import Task
from common.models.classifiers import class_indices
from common.privacy.gaussian_mechanism import unit_weights
from common.privacy.mechanism import Mechanism
from common.surrogates.class_sums import fold, statistics
from common.wire.sum_proto import unpack_map
from common.wire.surrogate_proto import centre_digest

# Number of records that are in memory in double precision at a time.
ROWS = 8192


def class_moments(task: Task) -> tuple[dict[str, Tensor], Mechanism | None]:
    """counts (C,), sums (C, d) and squares (d (d + 1) / 2,), folded, for all classes of the run, float64;
    and the claim.

    The request has a public map, applied to the features first; it may change their dimension d. Under privacy a unit
    adds a vector of norm at most one to each: features are clipped as for noisy class sums.
    """
    run, train, public = task.run, task.found.train, unpack_map(task.question or b"")
    if run.settings.epsilon:
        claim = run.mechanism_for("record" if train.units is None else "patient", centre_digest(public.centre))
        assert claim is not None
        labels = class_indices(run.settings.classes, task.found.classes)[train.labels]
        features, _ = clipped_features(train.features, claim.clip, train.folder, public.apply)
        weights = unit_weights(train.units, len(labels)) * (labels >= 0)
        multiplier, done = claim.noise_multiplier, [forget] if train.folder is not None else []
        found = statistics(features, labels.clamp_min(0), weights, len(run.settings.classes), "joint", multiplier, *done)
        return {each.name: each.value for each in found}, claim
    features, labels = task.training_data(run.settings.classes)
    features = public.apply(features)
    counts, sums = class_sums(features, labels, len(run.settings.classes))
    return {"counts": counts, "sums": sums, "squares": fold(second_moment(features))}, None


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Records of each class (C,) and the sums of their features (C, d), float64."""
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    for rows, own in zip(torch.split(features, ROWS), torch.split(labels, ROWS), strict=True):
        sums.index_add_(0, own, rows.double())
    return torch.bincount(labels, minlength=classes).double(), sums


def second_moment(features: Tensor, means: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """Sum (d, d) of the outer products of features (n, d); around the `means` (C, d) of their classes if given."""
    squares = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for start in range(0, len(features), ROWS):
        rows = features[start : start + ROWS].double()
        if means is not None and labels is not None:
            rows = rows - means[labels[start : start + ROWS]]
        squares.addmm_(rows.T, rows)
    return squares
