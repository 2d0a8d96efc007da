"""A site's part in a survival run of two rounds: its numbers of records by cell of time and event;
then its features, weighted with the martingale residual of each record's cell.

The coordinator sends the residuals, which follow from the numbers of all sites. It may lie. Under
privacy a residual beyond one would exceed the sensitivity, so it is cut off. Without noise, records
of small cells count in a neighbouring one, in both rounds. So whatever the coordinator sends, this
site's message is a combination of sums over groups of as many records as its policy asks for.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fedsurrogate.client_app.methods.coded_sums import (
    CodedRecords,
    bounded_sums,
    exact_sums,
    values_of,
)
from fedsurrogate.client_app.methods.task import SiteStatistic, Task
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.columns import in_frame
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.targets.time import Time, scored
from fedsurrogate.common.targets.time_rounds import VALUES, merged_cells

log = logging.getLogger("fedsurrogate.site")


def residual_sums(task: Task) -> SiteStatistic:
    """The sums of a round: exact ones around the site's own mean, or around zero in a secure sum; or
    for noise.

    Args:
        task: the request, with the value of each cell.

    Raises:
        DataError: without noise, where too few records have, or lack, an event.
        SurrogateError: for values that are not this run's.
    """
    if task.run.mechanism is not None:
        return bounded_sums(task, _target(task), PublicMap())
    own = _exact(task)
    count = len(own.features)
    centred = count and not task.run.settings.secure_sum
    sums = exact_sums(own, own.features.double().mean(0) if centred else None)
    return task.exact(sums, task.public_frame, count)


def time_of(target: Target | None) -> Time:
    """The target of a run, which is a time."""
    assert isinstance(target, Time)
    return target


def large_cells(task: Task, target: Time) -> tuple[Tensor, Tensor]:
    """The records whose exact sums may leave, and the cell in which the records of each cell count.

    Returns:
        Which records (n,), bool; and (2 B + 1,), int64, the same in all rounds.

    Raises:
        DataError: where fewer have an event, or all together, than the policy asks for. In a secure
            sum nothing may show that, so none are left there.
    """
    cells = target.cells(values_of(task.found.train))
    counts = torch.bincount(cells, minlength=2 * target.bins + 1)
    places = torch.arange(len(counts))
    least = max(task.limits.smallest_class, task.limits.smallest_cell)
    if task.run.settings.secure_sum:
        # A sum over all sites hides what each adds.
        enough = len(cells) >= task.limits.smallest_class
        return torch.full((len(cells),), enough), places
    places = merged_cells(counts, least)
    kept = places[cells] >= 0
    if left := int((~kept[cells < target.bins]).sum()):
        raise DataError(
            f"{left} of the records of this site have an event before the horizon; the policy's "
            f"smallest-class and smallest-cell ask for {least}, or none, in sums without noise"
        )
    if not kept.any():
        raise DataError(
            f"no training records in cells of {least} or more, which the policy's smallest-class "
            "and smallest-cell ask for in sums without noise"
        )
    if not kept.all():
        log.warning(
            "%d records without an event are left out of what this site sends: fewer than %d",
            int((~kept).sum()),
            least,
        )
    return kept, places.clamp_min(0)


def merged_code(target: Time, values: Tensor, places: Tensor) -> Tensor:
    """The one-hot code of records, each in the cell in which its cell counts.

    Args:
        target: of the run.
        values: (n, 2).
        places: see `large_cells`.

    Returns:
        (n, 2 B + 1), float64.
    """
    code = target.code(values)
    return torch.zeros_like(code).index_add_(1, places, code)


def _exact(task: Task) -> CodedRecords:
    """The records whose exact sums may leave, with their code in this round."""
    target = time_of(task.run.target)
    kept, places = large_cells(task, target)
    values = values_of(task.found.train)[kept]
    features = in_frame(task.found.train.features[kept].float(), task.public_frame)
    if _counts(task.round, task.run.planned_rounds):
        return CodedRecords(features, merged_code(target, values, places))
    return CodedRecords(
        features, scored(target, _received(task.received_model(), target)[places]).code(values)
    )


def _target(task: Task) -> Target:
    """The target whose code is summed in this round, with noise."""
    target = time_of(task.run.target)
    return (
        target
        if _counts(task.round, task.run.planned_rounds)
        else scored(target, _received(task.received_model(), target))
    )


def _counts(number: int, rounds: int) -> bool:
    """Whether this round only counts. Raises SurrogateError for a round that the run does not have."""
    if number > rounds:
        raise SurrogateError(f"round {number} of a run of {rounds}")
    return number == 1


def _received(model: Parameters, target: Time) -> Tensor:
    """The value of each cell, (2 B + 1,), float64. Raises SurrogateError for other values."""
    values = model.tensors.get(VALUES)
    if values is None or values.shape != (2 * target.bins + 1,):
        raise SurrogateError("a second round without the value of each cell")
    return values.double()
