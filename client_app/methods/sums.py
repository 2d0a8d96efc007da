"""The sums over a site's records that a head in closed form needs: exact ones, or bounded for noise.

They are records and feature sums of each class, and one second moment of all features. A message
has the second moment around the class means, since 16 bits cannot hold a variance next to the
square of a large mean. The parts of a secure sum are only added, and no site knows the means of all
sites, so its second moment is around zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.features.on_disk import clipped_features, forget
from client_app.methods.task import MethodOutput, Task
from common.models.classifiers import class_indices
from common.models.parameters import Parameters
from common.privacy.gaussian_mechanism import unit_weights
from common.privacy.mechanism import Mechanism
from common.surrogates.class_sums import fold, statistics
from common.surrogates.public_map import PublicMap
from common.wire.model_proto import pack_parameters
from common.wire.sum_proto import unpack_map
from common.wire.surrogate_proto import centre_digest

# Number of records that are in memory in double precision at a time.
ROWS = 8192


def normal_equations(task: Task) -> MethodOutput:
    """Counts (C,), sums (C, d) and squares around the class means, folded, at 16 bits.

    Source: AFL (He et al. 2025, equations 7 to 9); Fed3R (Fanì et al. 2024, equation 3). FedCGS
    (Guan et al. 2025) takes the same sums. Differs from AFL, whose sites send their own solution as
    well: the coordinator finds it from the sums.
    """
    return _message(task, variances=False)


def gaussians(task: Task) -> MethodOutput:
    """As `normal_equations`, and the variance of each dimension within each class (C, d).

    Source: GH-OFL (Turazza et al. 2026), whose sites send sums, sums of squares of each class, and
    one second moment. Differs: moments around the class means.
    """
    return _message(task, variances=True)


def class_moments(task: Task) -> tuple[dict[str, Tensor], Mechanism | None]:
    """The sums for a secure sum, of all classes of the run, float64: counts (C,), sums (C, d) and
    squares (d (d + 1) / 2,) around zero, folded; and the claim.

    The request has a public map, applied to the features first; it may change their dimension d.
    Under privacy a unit adds a vector of norm at most one to each.
    """
    public = unpack_map(task.question or b"")
    if task.run.settings.epsilon:
        return _bounded_moments(task, public)
    features, labels = task.training_data(task.run.settings.classes)
    features = public.apply(features)
    counts, sums = class_sums(features, labels, len(task.run.settings.classes))
    return {"counts": counts, "sums": sums, "squares": fold(second_moment(features))}, None


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Records of each class (C,) and the sums of their features (C, d), float64."""
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    for rows, own in zip(torch.split(features, ROWS), torch.split(labels, ROWS), strict=True):
        sums.index_add_(0, own, rows.double())
    return torch.bincount(labels, minlength=classes).double(), sums


def second_moment(features: Tensor, means: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """Sum (d, d) of the outer products of features (n, d); around the `means` (C, d) of their
    classes if given.
    """
    squares = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for start in range(0, len(features), ROWS):
        rows = features[start : start + ROWS].double()
        if means is not None and labels is not None:
            rows = rows - means[labels[start : start + ROWS]]
        squares.addmm_(rows.T, rows)
    return squares


def _message(task: Task, variances: bool) -> MethodOutput:
    """The exact sums of the site's own classes, around their means."""
    classes = task.classes
    features, labels = task.training_data(classes)
    counts, sums = class_sums(features, labels, len(classes))
    divisors = counts.clamp_min(1)[:, None]
    means = sums / divisors
    squares = fold(second_moment(features, means, labels))
    tensors = {"counts": counts, "sums": sums, "squares": squares}
    if variances:
        spreads = torch.zeros_like(sums)
        for rows, own in zip(torch.split(features, ROWS), torch.split(labels, ROWS), strict=True):
            spreads.index_add_(0, own, (rows.double() - means[own]).square())
        tensors["variances"] = spreads / divisors
    sent = Parameters(task.header(classes), 1, tensors, round(float(counts.sum())))
    return MethodOutput(pack_parameters(sent))


def _bounded_moments(task: Task, public: PublicMap) -> tuple[dict[str, Tensor], Mechanism | None]:
    """Sums of features that are clipped as for noisy class sums, without the noise; and the claim."""
    run, train = task.run, task.found.train
    claim = run.mechanism_for("record" if train.units is None else "patient", centre_digest(public.centre))
    assert claim is not None
    labels = class_indices(run.settings.classes, task.found.classes)[train.labels]
    features, _ = clipped_features(train.features, claim.clip, train.folder, public.apply)
    weights = unit_weights(train.units, len(labels)) * (labels >= 0)
    done = [forget] if train.folder is not None else []
    bounded = statistics(
        features, labels.clamp_min(0), weights, len(run.settings.classes), "joint", claim.noise_multiplier, *done
    )
    return {each.name: each.value for each in bounded}, claim
