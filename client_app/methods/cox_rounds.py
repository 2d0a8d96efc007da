"""A site's part in a Cox model in rounds: sums of its records' hazards at the weights of a round.

The coordinator chooses weights, and may choose them so that one record's hazard is larger than all
others' together, or that two sums over half-spaces differ by one record: no rule for the sizes of
bins, or for how even the weights in them are, stops that. So the policy's `exact-sums-at-models`
decides whether any sum leaves (client_app/governance/gate.py). Cells of few records count in
neighbouring ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsurrogate.client_app.methods.coded_sums import values_of
from fedsurrogate.client_app.methods.residual_rounds import (
    course_of,
    large_cells,
    merged_code,
    time_of,
)
from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.models.risk_sums import risk_sums
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.surrogates.columns import in_frame
from fedsurrogate.common.targets.target import CODE
from fedsurrogate.common.targets.time_rounds import (
    BETA,
    EVENT_SUMS,
    FIRST,
    HAZARD,
    LARGEST_SCORE,
    OFFSET,
    SECOND,
    WEIGHTS,
)
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.parts import in_parts, joined


@dataclass(frozen=True)
class Point:
    """Where the sums of a round are computed.

    Attributes:
        beta: weights of the features, (d,), float64.
        offset: that is subtracted from beta z.
        hazard: of each bin, (B,), zero or more.
    """

    beta: Tensor
    offset: float
    hazard: Tensor


def released_round(task: Task) -> MethodOutput:
    """This site's sums of a round.

    Args:
        task: the request, with the point.

    Raises:
        DataError: where the sums would be of fewer records than the policy asks for.
        SurrogateError: for a point that is not this run's.
    """
    parts, (sums, records) = course_of(task.run.target, task.run.private).parts, _sums(task)
    tensors = {
        part: tensor
        for name, whole in sums.items()
        for part, tensor in in_parts(name, whole, parts).items()
    }
    header = task.header(time_of(task.run.target).rows, task.public_frame)
    return MethodOutput(pack_parameters(Parameters(header, task.round, tensors, records)))


def round_sums(task: Task) -> tuple[dict[str, Tensor], Mechanism | None]:
    """The sums of a round for a secure sum, float64; and no claim.

    Args:
        task: the request, with the point.
    """
    return _sums(task)[0], None


def _sums(task: Task) -> tuple[dict[str, Tensor], int]:
    """The sums of a round, and the number of records in them."""
    target, point = time_of(task.run.target), _received(task)
    kept, places = large_cells(task, target)
    values = values_of(task.found.train)[kept]
    features = in_frame(task.found.train.features[kept], task.public_frame).double()
    cells = places[target.cells(values)]
    bins = target.last_bins(cells)
    sums = risk_sums(features, bins, point.beta, point.hazard, point.offset, LARGEST_SCORE)
    return {
        CODE: merged_code(target, values, places).sum(0),
        EVENT_SUMS: features[target.cells(values) < target.bins].sum(0),
        WEIGHTS: sums.weights,
        FIRST: sums.first,
        SECOND: fold(sums.second),
    }, len(features)


def _received(task: Task) -> Point:
    """The point of this round. Raises SurrogateError for one that is not this run's."""
    parts, target = course_of(task.run.target, task.run.private).parts, time_of(task.run.target)
    if not 1 <= task.round <= course_of(task.run.target, task.run.private).rounds:
        raise SurrogateError(
            f"round {task.round} of a run of {course_of(task.run.target, task.run.private).rounds}"
        )
    tensors = task.received_model().tensors
    try:
        beta, offset, hazard = (joined(name, tensors, parts) for name in (BETA, OFFSET, HAZARD))
    except (KeyError, RuntimeError):
        raise SurrogateError("a round without weights, offset or hazards") from None
    dimension = task.found.train.features.shape[1]
    shapes = (tuple(beta.shape), tuple(offset.shape), tuple(hazard.shape))
    if shapes != ((dimension,), (1,), (target.bins,)):
        raise SurrogateError(f"a point of shapes {shapes}, for {dimension} features")
    if float(hazard.min()) < 0:
        raise SurrogateError("a hazard below zero")
    return Point(beta, float(offset), hazard)
