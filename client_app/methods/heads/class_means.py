"""FedCOF at a site: records and mean of each class, or of random groups of its records. No
training.
"""

from __future__ import annotations

import torch

from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.wire.model_proto import pack_parameters


def class_means(task: Task) -> MethodOutput:
    """Records and means of up to `fedcof.groups` random groups of each class; missing groups are
    zero.

    A group has `fedcof.samples-per-group` records or more; a class with fewer is one group. The
    groups do not depend on the run's seed, so that runs which differ in it do not reveal more and
    more about single records.

    Args:
        task: the request.

    Returns:
        Counts (C, groups) and means (C, groups, d) of the site's own classes.

    Source: FedCOF (Goswami et al. 2025, algorithm 1; several means a client are an option there as
    well).
    """
    classes, settings = task.classes, task.run.settings.fedcof
    features, labels, frame = task.own_data(classes)
    most = min(settings.groups, task.limits.components or settings.groups)
    generator = stream("fedcof", task.site, most)
    counts = torch.zeros(len(classes), settings.groups)
    means = torch.zeros(len(classes), settings.groups, features.shape[1])
    for label in range(len(classes)):
        rows = (labels == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        parts = rows.tensor_split(max(1, min(most, len(rows) // settings.samples_per_group)))
        for group, part in enumerate(part for part in parts if len(part)):
            counts[label, group], means[label, group] = len(part), features[part].double().mean(0)
    tensors = {"counts": counts, "means": means}
    header = task.header(classes, frame)
    return MethodOutput(pack_parameters(Parameters(header, 1, tensors, len(labels))))
