"""AFL at a site: what the normal equations of least squares need of its records. No training."""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.methods.moments import ROWS, class_sums, second_moment
from client_app.methods.task import MethodOutput, Task
from common.models.parameters import Parameters
from common.surrogates.class_sums import fold
from common.wire.model_proto import pack_parameters

Sums = dict[str, Tensor]


def normal_equations(task: Task) -> MethodOutput:
    """Records and feature sums of each class, and the second moment of all features around their class means, at 16 bits.

    Source: AFL (He et al. 2025, equations 7 to 9); Fed3R (Fanì et al. 2024, equation 3). Differs from AFL, whose sites send
    their own solution as well: the coordinator finds it from the sums. Moments around the class means, because 16 bits
    cannot hold a variance next to the square of a large mean. FedCGS (Guan et al. 2025) takes the same sums.
    """
    sums = _sums(task)
    return _message(task, {name: sums[name] for name in ("counts", "sums", "squares")})


def gaussians(task: Task) -> MethodOutput:
    """The same, and the variance of every dimension within each class, at 16 bits.

    Source: GH-OFL (Turazza et al. 2026), whose sites send sums, sums of squares of each class, and one second moment.
    Differs: moments around the class means, as above.
    """
    return _message(task, _sums(task))


def _message(task: Task, tensors: Sums) -> MethodOutput:
    records = round(float(tensors["counts"].sum()))
    return MethodOutput(pack_parameters(Parameters(task.header(task.classes), 1, tensors, records)))


def _sums(task: Task) -> Sums:
    classes = task.classes
    features, labels = task.training_data(classes)
    counts, sums = class_sums(features, labels, len(classes))
    means = sums / counts.clamp_min(1)[:, None]
    squares, spreads = second_moment(features, means, labels), torch.zeros_like(sums)
    for rows, own in zip(torch.split(features, ROWS), torch.split(labels, ROWS), strict=True):
        spreads.index_add_(0, own, (rows.double() - means[own]).square())
    variances = spreads / counts.clamp_min(1)[:, None]
    return {"counts": counts, "sums": sums, "squares": fold(squares), "variances": variances}
