"""The sums over the code of a site's records that a head for another target than classes needs:
exact ones, or bounded for noise.

A message has them around the mean of the site's features, since 16 bits cannot hold a covariance
next to the product of large means. The parts of a secure sum are only added, and no site knows the
mean of all sites, so these are around zero.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.client_app.features.columns import frame_of, framed
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.client_app.methods.sums import ROWS, clipped, second_moment
from fedsurrogate.client_app.methods.task import SiteStatistic, Task
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.surrogates.coded_sums import coded_statistics
from fedsurrogate.common.surrogates.columns import in_frame
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)
from fedsurrogate.common.wire.sum_proto import unpack_map
from fedsurrogate.common.wire.surrogate_proto import centre_digest

log = logging.getLogger("fedsurrogate.site")


@dataclass(frozen=True)
class CodedRecords:
    """Records of a site with the code of their target.

    Attributes:
        features: (n, d).
        code: (n, q), float64.
    """

    features: Tensor
    code: Tensor


def coded_moments(task: Task) -> SiteStatistic:
    """This site's coded sums: exact ones around its own mean, or around zero in a secure sum, which has
    a public map that is applied to the features first; or for noise.

    Args:
        task: the request.

    Raises:
        DataError: without noise, for a site with fewer records than its policy demands.
    """
    target, least, summed = (
        task.run.target,
        task.limits.smallest_class,
        task.run.settings.secure_sum,
    )
    assert target is not None
    public = task.agreed(unpack_map(task.payload or b"")) if summed else PublicMap()
    if task.run.mechanism is not None:
        return bounded_sums(task, target, public)
    own, frame, centre = _released(task, target), task.public_frame, None
    if summed:
        # A refusal would show that this site has few records, so it adds zeros.
        kept = len(own.features) * (len(own.features) >= least)
        features = public.apply(in_frame(own.features, frame))
        own = CodedRecords(features[:kept], own.code[:kept])
    else:
        own, frame = _in_frame(own, task.found.train.folder)
        if len(own.features) < max(1, least):
            raise DataError(
                f"{len(own.features)} training records with a target; the policy's smallest-class "
                f"is {least}"
            )
        centre = _total(own.features) / len(own.features)
    sums = exact_sums(own, centre)
    if summed and target.blocks:
        sums = in_block(sums, target.block(task.site), target.blocks)
    return task.exact(sums, frame, len(own.features))


def exact_sums(own: CodedRecords, centre: Tensor | None) -> dict[str, Tensor]:
    """The sums of records, float64.

    Args:
        own: the records.
        centre: from which features are measured in `sums` and `squares`, and the mean of the code
            in `products`, (d,); None for zero.

    Returns:
        By statistic: records (1,), totals (d,), code (q,), sums (q, d), and squares and products
        folded.
    """
    features, code = own.features, own.code
    count, dimension = len(features), features.shape[1]
    around = torch.zeros(dimension, dtype=torch.float64) if centre is None else centre
    sums = torch.zeros(code.shape[1], dimension, dtype=torch.float64)
    for rows, t in zip(torch.split(features, ROWS), torch.split(code, ROWS), strict=True):
        sums.addmm_(t.T, rows.double() - around)
    apart = code if centre is None else code - code.mean(0)
    squares = second_moment(features, centre)
    return {
        RECORDS: torch.tensor([float(count)], dtype=torch.float64),
        TOTALS: _total(features),
        CODE: code.sum(0),
        SUMS: sums,
        SQUARES: fold(squares),
        PRODUCTS: fold(apart.T @ apart),
    }


def in_block(sums: dict[str, Tensor], block: int, blocks: int) -> dict[str, Tensor]:
    """Sums whose records, totals and squares are those of one of several blocks of sites.

    Args:
        sums: of a site, from `exact_sums`.
        block: of the site.
        blocks: their number.

    Returns:
        The same, with records (blocks,), totals (blocks, d) and squares (blocks, ...).
    """
    found = dict(sums)
    for name in (RECORDS, TOTALS, SQUARES):
        own = sums[name].reshape(-1) if name != RECORDS else sums[name][0]
        found[name] = torch.zeros(blocks, *own.shape, dtype=torch.float64)
        found[name][block] = own
    return found


def _total(features: Tensor) -> Tensor:
    total = torch.zeros(features.shape[1], dtype=torch.float64)
    for rows in torch.split(features, ROWS):
        total += rows.double().sum(0)
    return total


def _released(task: Task, target: Target) -> CodedRecords:
    """The records whose exact sums may leave, and of their code what may.

    Raises:
        DataError: for a target of which no exact sum of this site may leave.
    """
    train, values = task.found.train, target.of_site(values_of(task.found.train), task.site)
    code, why = target.large_enough(
        target.code(values), task.limits.smallest_class, task.run.settings.secure_sum
    )
    if why and not task.run.settings.secure_sum:
        log.warning("%s", why)
    return CodedRecords(train.features.float(), code)


def _in_frame(own: CodedRecords, folder: Path | None) -> tuple[CodedRecords, bytes]:
    """The records with their features in a frame of this site's own, which says more of its columns
    than public ranges do; and that frame, empty where columns need none.
    """
    found = frame_of(own.features)
    frame = b"" if found is None else found.packed()
    return replace(own, features=framed(own.features, frame, folder)), frame


def values_of(records: LabelledFeatures) -> Tensor:
    """The values of records, (n, k). Raises DataError without them."""
    if records.values is None:
        raise DataError("the records have no values of the run's target")
    return records.values


def bounded_sums(task: Task, target: Target, public: PublicMap) -> SiteStatistic:
    """Sums of features that are clipped, without the noise: those that a round of the run has.

    Args:
        task: the request.
        target: whose code is summed.
        public: applied to the features first.
    """
    assert task.run.target is not None
    claim = task.mechanism(centre_digest(public.centre))
    assert claim is not None
    features, weights, done = clipped(task.found.train, task.public_frame, claim, public)
    code = target.code(values_of(task.found.train))
    bounds = {name: bound for name, (_, bound) in claim.noise.items() if name in task.names}
    made = coded_statistics(features, code, weights, bounds, *done)
    sums = {each.name: each for each in made}
    return SiteStatistic(sums, claim, task.run.target.rows, task.public_frame)
