"""The sums over a site's records that a head in closed form needs: exact ones, or bounded for
noise.

They are records and feature sums of each class, and in a secure sum one second moment of all
features. Its parts are only added, and no site knows the means of all sites, so this moment is around
zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.client_app.features.on_disk import clipped_features, forget
from fedsurrogate.client_app.features.site_features import SiteFeatures
from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, unit_weights, with_noise
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import fold, statistics
from fedsurrogate.common.surrogates.columns import in_frame
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.sum_proto import unpack_map
from fedsurrogate.common.wire.surrogate_proto import centre_digest

# Number of records that are in memory in double precision at a time.
ROWS = 8192


def released_sums(task: Task) -> MethodOutput:
    """This site's counts (C,) and sums (C, d) at 16 bits: exact ones, for its own classes; with a
    budget noisy ones of features of norm at most one, for all classes that the data can have.

    Args:
        task: the request.
    """
    claim = task.mechanism(centre_digest(PublicMap().centre))
    if claim is None:
        return _exact(task)
    frame, classes = task.public_frame, task.found.classes
    bounded = _bounded(task.found, claim, PublicMap(), frame, classes)
    noisy = with_noise(bounded, claim)
    tensors = {each.name: each.value for each in noisy}
    facts = {f"signal-to-noise-{each.name}": each.signal_to_noise() for each in noisy}
    sent = Parameters(task.header(classes, frame), 1, tensors, 0, claim)
    return MethodOutput(pack_parameters(sent), claim, facts)


def class_moments(task: Task) -> tuple[dict[str, Tensor], Mechanism | None]:
    """The sums for a secure sum, of all classes of the run.

    The request has a public map, applied to the features first; it may change their dimension d.
    Under privacy a unit adds a vector of norm at most one to each.

    Args:
        task: the request.

    Returns:
        Counts (C,), sums (C, d) and squares (d (d + 1) / 2,) around zero, folded, float64, those
        that the run adds up; and the claim.
    """
    public = task.agreed(unpack_map(task.payload or b""))
    classes = task.run.settings.classes
    squares = "squares" in {each.name for each in task.run.plan.combination.sums}
    claim = task.mechanism(centre_digest(public.centre))
    if claim is not None:
        bounded = _bounded(task.found, claim, public, task.public_frame, classes, squares)
        return {each.name: each.value for each in bounded}, claim
    features, labels = task.training_data(classes, task.public_frame)
    features = public.apply(features)
    counts, sums = class_sums(features, labels, len(classes))
    moments = {"counts": counts, "sums": sums}
    return moments | ({"squares": fold(second_moment(features))} if squares else {}), None


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Records of each class and the sums of their features.

    Args:
        features: of the records, (n, d).
        labels: indices of classes, (n,).
        classes: C, number of classes.

    Returns:
        Counts (C,) and sums (C, d), float64.

    Example:
        >>> features = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> counts, sums = class_sums(features, torch.tensor([1, 1]), 2)
        >>> counts.tolist(), sums.tolist()
        ([0.0, 2.0], [[0.0, 0.0], [4.0, 6.0]])
    """
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    for rows, own in zip(torch.split(features, ROWS), torch.split(labels, ROWS), strict=True):
        sums.index_add_(0, own, rows.double())
    return torch.bincount(labels, minlength=classes).double(), sums


def second_moment(features: Tensor, centre: Tensor | None = None) -> Tensor:
    """Sum of the outer products of features.

    Args:
        features: of the records, (n, d).
        centre: from which features are measured, (d,); None for zero.

    Returns:
        The sum (d, d), float64.

    Example:
        >>> second_moment(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[10.0, 14.0], [14.0, 20.0]]
    """
    squares = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for start in range(0, len(features), ROWS):
        rows = features[start : start + ROWS].double()
        if centre is not None:
            rows = rows - centre
        squares.addmm_(rows.T, rows)
    return squares


def _exact(task: Task) -> MethodOutput:
    """The exact sums of the site's own classes."""
    classes = task.classes
    features, labels, frame = task.own_data(classes)
    counts, sums = class_sums(features, labels, len(classes))
    tensors = {"counts": counts, "sums": sums}
    sent = Parameters(task.header(classes, frame), 1, tensors, round(float(counts.sum())))
    return MethodOutput(pack_parameters(sent))


def _bounded(
    found: SiteFeatures,
    claim: Mechanism,
    public: PublicMap,
    frame: bytes,
    classes: tuple[str, ...],
    squares: bool = False,
) -> list[BoundedSum]:
    """Sums of features that are clipped as for noisy class sums, without the noise."""
    train = found.train
    labels = class_indices(classes, found.classes)[train.labels]
    features, _ = clipped_features(
        train.features,
        claim.clip,
        train.folder,
        lambda rows: public.apply(in_frame(rows, frame).to(rows)),
    )
    weights = unit_weights(train.units, len(labels)) * (labels >= 0)
    done = [forget] if train.folder is not None else []
    family = "joint" if squares else "spherical"
    return statistics(features, labels.clamp_min(0), weights, len(classes), family, *done)
