"""The sums over a site's records that a head in closed form needs, and their message: by class, or over
the code of another target than classes; exact ones, or bounded for noise.

A message has coded sums around the mean of the site's features, since 16 bits cannot hold a covariance
next to the product of large means. The parts of secure aggregation (client_app/secure_aggregation)
are only added, and no
site knows the mean of all sites, so these, and the second moment of class sums, are around zero.

A site's part in a survival run of two rounds: its numbers of records by cell of time and event;
then its features, weighted with the martingale residual of each record's cell.

The coordinator sends the residuals, which follow from the numbers of all sites. It may lie. Under
privacy a residual beyond one would exceed the sensitivity, so it is cut off. Without noise, records
of small cells count in a neighbouring one, in both rounds. So whatever the coordinator sends, this
site's message is a combination of sums over groups of as many records as its policy asks for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import LOG, DataError, SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.gaussian_mechanism import weigh_mean_over_columns, with_noise
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import coded_statistics, fold, statistics
from fedsurrogate.common.surrogates.mixtures import PublicMap, in_frame
from fedsurrogate.common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
)
from fedsurrogate.common.targets.time import VALUES, Time, merged_cells, scored
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.surrogate_proto import centre_digest, unpack_map

from ..features.site_features import frame_of, framed
from .job import Clipped, Job, MethodOutput, SiteStatistic

# Number of records that are in memory in double precision at a time.
ROWS = 8192


def class_moments(job: Job) -> SiteStatistic:
    """Counts (C,), sums of features (C, d) and, in secure aggregation of them, squares (d (d + 1) / 2,)
    around zero, folded.

    Exact ones of a message are for the site's own classes; noisy ones, of features of norm at most
    one, for all that its data can have; those of secure aggregation for all of the run. Secure aggregation has a
    public map, which is applied to the features first and may change their dimension.

    Args:
        job: the request.
    """
    summed, public, frame = job.run.settings.secure_aggregation, PublicMap(), job.public_frame
    classes = job.run.settings.classes if summed else job.found.classes
    if summed:
        public = job.agreed(unpack_map(job.payload or b""))
    columns = job.found.train.features.shape[1]
    claim = job.mechanism(job.run.plan.subtracted(columns, centre_digest(public.centre)))
    if claim is not None:
        data = clipped(job, claim, public)
        own = class_indices(classes, job.found.classes)[data.labels]
        family = "distributed" if "squares" in job.names else "spherical"
        weights, labels = data.weights * (own >= 0), own.clamp_min(0)
        made = statistics(data.features, labels, weights, len(classes), family, *data.done)
        return SiteStatistic({each.name: each for each in made}, claim, classes, frame)
    if not summed:
        classes = job.classes
        frame = job.own_frame(classes)
    features, labels = job.training_data(classes, frame)
    features = public.apply(features)
    counts, sums = class_sums(features, labels, len(classes))
    moments = {"counts": counts, "sums": sums}
    if "squares" in job.names:
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


def clipped(job: Job, claim: Mechanism, public: PublicMap) -> Clipped:
    """Training records for noise.

    Args:
        job: the request, whose run says in which frame features are put first, and what they keep of
            their own mean and length.
        claim: says where they are clipped.
        public: applied to them between.
    """
    train, frame = job.found.train, job.public_frame
    weight = job.run.plan.mean_over_columns_weight(train.features.shape[1])

    def change(rows: Tensor) -> Tensor:
        return public.apply(weigh_mean_over_columns(in_frame(rows, frame).to(rows), weight))

    return Clipped.of(train, claim.clip, change)


def message(job: Job) -> MethodOutput:
    """What the method's function at the site has computed, at 16 bits; with noise under privacy.

    Args:
        job: the request.
    """
    made: SiteStatistic = load(job.run.plan.combination.site_sums)(job)
    header, claim = job.header(made.classes, made.frame), made.claim
    if claim is None:
        sent = Parameters(header, job.round, made.values, made.records)
        return MethodOutput(pack_parameters(sent))
    # Of a claim for several rounds, what this one has.
    noise = {each.name: claim.noise[each.name] for each in made.bounded}
    noisy = with_noise(made.bounded, replace(claim, noise=noise))
    facts = {f"signal-to-noise-{each.name}": each.signal_to_noise() for each in noisy}
    sent = Parameters(header, job.round, {each.name: each.value for each in noisy}, 0, claim)
    return MethodOutput(pack_parameters(sent), claim, facts)


def coded_moments(job: Job) -> SiteStatistic:
    """This site's coded sums: exact ones around its own mean, or around zero in secure aggregation, which has
    a public map that is applied to the features first; or for noise.

    Args:
        job: the request.

    Raises:
        DataError: without noise, for a site with fewer records than its policy demands.
    """
    target, summed = job.run.target, job.run.settings.secure_aggregation
    assert target is not None
    public = job.agreed(unpack_map(job.payload or b"")) if summed else PublicMap()
    if job.run.mechanism is not None:
        return bounded_sums(job, target, public)
    frame, centre = job.public_frame if summed else b"", None
    features, code = job.training_data((), frame)
    if summed:
        features = public.apply(features)
    else:
        # A frame of this site's own says more of its columns than public ranges do.
        if (own := frame_of(features)) is not None:
            frame = own.packed()
            features = framed(features, frame, job.found.train.folder)
        centre = _total(features) / len(features)
    sums = exact_sums(features, code, centre)
    if summed and target.blocks:
        sums = in_block(sums, target.block(job.site), target.blocks)
    return job.exact(sums, frame, len(features))


def exact_sums(features: Tensor, code: Tensor, centre: Tensor | None) -> dict[str, Tensor]:
    """The sums of records, float64.

    Args:
        features: of the records, (n, d).
        code: of their target, (n, q), float64.
        centre: from which features are measured in `sums` and `squares`, and the mean of the code
            in `products`, (d,); None for zero.

    Returns:
        By statistic: records (1,), totals (d,), code (q,), sums (q, d), and squares and products
        folded.
    """
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


def bounded_sums(job: Job, target: Target, public: PublicMap) -> SiteStatistic:
    """Sums of features that are clipped, without the noise: those that a round of the run has.

    Args:
        job: the request.
        target: whose code is summed.
        public: applied to the features first.
    """
    assert job.run.target is not None
    plan, digest = job.run.plan, centre_digest(public.centre)
    # In rounds, the digest of the run alone says it.
    once = plan.kind == "one-shot"
    columns = job.found.train.features.shape[1]
    claim = job.mechanism(plan.subtracted(columns, digest) if once else digest)
    assert claim is not None
    data = clipped(job, claim, public)
    code = target.code(job.found.train.targets())
    bounds = {name: bound for name, (_, bound) in claim.noise.items() if name in job.names}
    made = coded_statistics(data.features, code, data.weights, bounds, *data.done)
    sums = {each.name: each for each in made}
    return SiteStatistic(sums, claim, job.run.target.rows, job.public_frame)


def residual_sums(job: Job) -> SiteStatistic:
    """The sums of a round: exact ones around the site's own mean, or around zero in secure aggregation; or
    for noise.

    Args:
        job: the request, with the value of each cell.

    Raises:
        DataError: without noise, where too few records have, or lack, an event.
        SurrogateError: for values that are not this run's.
    """
    if job.run.mechanism is not None:
        return bounded_sums(job, _target(job), PublicMap())
    features, code = _exact(job)
    centred = len(features) and not job.run.settings.secure_aggregation
    sums = exact_sums(features, code, features.double().mean(0) if centred else None)
    return job.exact(sums, job.public_frame, len(features))


def time_of(target: Target | None) -> Time:
    """The target of a run, which is a time."""
    assert isinstance(target, Time)
    return target


def large_cells(job: Job, target: Time) -> tuple[Tensor, Tensor]:
    """The records whose exact sums may leave, and the cell in which the records of each cell count.

    Returns:
        Which records (n,), bool; and (2 B + 1,), int64, the same in all rounds.

    Raises:
        DataError: where fewer have an event, or all together, than the policy asks for. In secure
            aggregation nothing may show that, so none are left there.
    """
    cells = target.cells(job.found.train.targets())
    counts = torch.bincount(cells, minlength=2 * target.bins + 1)
    places = torch.arange(len(counts))
    least = max(job.limits.smallest_class, job.limits.smallest_cell)
    if job.run.settings.secure_aggregation:
        # A sum over all sites hides what each adds.
        enough = len(cells) >= job.limits.smallest_class
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
        LOG.warning(
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


def _exact(job: Job) -> tuple[Tensor, Tensor]:
    """The records whose exact sums may leave, with their code in this round."""
    target = time_of(job.run.target)
    kept, places = large_cells(job, target)
    values = job.found.train.targets()[kept]
    features = in_frame(job.found.train.features[kept].float(), job.public_frame)
    if _counts(job.round, job.run.planned_rounds):
        return features, merged_code(target, values, places)
    now = scored(target, _received(job.received_model(), target)[places])
    return features, now.code(values)


def _target(job: Job) -> Target:
    """The target whose code is summed in this round, with noise."""
    target = time_of(job.run.target)
    if _counts(job.round, job.run.planned_rounds):
        return target
    return scored(target, _received(job.received_model(), target))


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
