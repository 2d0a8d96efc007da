"""The sums over a site's records that a head in closed form needs: exact ones, or bounded for
noise.

They are records and feature sums of each class, and in a secure sum one second moment of all
features. Its parts are only added, and no site knows the means of all sites, so this moment is around
zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsurrogate.client_app.features.on_disk import clipped_features, forget
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.client_app.methods.task import SiteStatistic, Task
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import fold, statistics
from fedsurrogate.common.surrogates.columns import in_frame
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.wire.sum_proto import unpack_map
from fedsurrogate.common.wire.surrogate_proto import centre_digest

# Number of records that are in memory in double precision at a time.
ROWS = 8192


def class_moments(task: Task) -> SiteStatistic:
    """Counts (C,), sums of features (C, d) and, in a secure sum of them, squares (d (d + 1) / 2,)
    around zero, folded.

    Exact ones of a message are for the site's own classes; noisy ones, of features of norm at most
    one, for all that its data can have; those of a secure sum for all of the run. A secure sum has a
    public map, which is applied to the features first and may change their dimension.

    Args:
        task: the request.
    """
    summed, public, frame = task.run.settings.secure_sum, PublicMap(), task.public_frame
    classes = task.run.settings.classes if summed else task.found.classes
    if summed:
        public = task.agreed(unpack_map(task.payload or b""))
    claim = task.mechanism(centre_digest(public.centre))
    if claim is not None:
        rows, weights, done = clipped(task.found.train, frame, claim, public)
        own = class_indices(classes, task.found.classes)[task.found.train.labels]
        family, weights = "joint" if "squares" in task.names else "spherical", weights * (own >= 0)
        made = statistics(rows, own.clamp_min(0), weights, len(classes), family, *done)
        return SiteStatistic({each.name: each for each in made}, claim, classes, frame)
    if not summed:
        classes = task.classes
        frame = task.own_frame(classes)
    features, labels = task.training_data(classes, frame)
    features = public.apply(features)
    counts, sums = class_sums(features, labels, len(classes))
    moments = {"counts": counts, "sums": sums}
    if "squares" in task.names:
        moments["squares"] = fold(second_moment(features))
    return SiteStatistic(moments, None, classes, frame, len(features))


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


def clipped(
    train: LabelledFeatures, frame: bytes, claim: Mechanism, public: PublicMap
) -> tuple[Tensor, Tensor, list[Callable[[Tensor], None]]]:
    """Training records for noise.

    Args:
        train: the records.
        frame: of the columns, in which features are put first.
        claim: says where features are clipped.
        public: applied to them after the frame.

    Returns:
        Clipped features (n, d); weights (n,), which sum to one over a unit; and what is called with
        rows of features that have been added, if they are in a file.
    """
    features, _ = clipped_features(
        train.features,
        claim.clip,
        train.folder,
        lambda rows: public.apply(in_frame(rows, frame).to(rows)),
    )
    done = [forget] if train.folder is not None else []
    return features, unit_weights(train.units, len(features)), [*done]
