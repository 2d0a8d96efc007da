"""A site's part in a logistic loss in rounds: a sum of features to centre them, then sums of clipped
gradients at the received head. With noise of its own, or without for secure aggregation.

A record's gradient is its residual, which is shortened, times its feature, which has norm at most
one. So a unit adds at most one to each sum, whatever head and map the coordinator sends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods import logistic_rounds as logistic
from fedsurrogate.common.methods.method import count
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import OwnParts
from fedsurrogate.common.surrogates.class_sums import coded_statistics
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.surrogate_proto import public_digest

from ...features.extraction import chunks, written
from ...features.site_features import LabelledFeatures
from ..dp.record_gradients import per_record
from ..job import Clipped, Job, SiteStatistic

# Number of chunks of records whose features are in memory at a time.
CHUNKS = 7
# Bytes of features that a process keeps between rounds.
MOST_KEPT = 2**27


def bounded_round(job: Job) -> SiteStatistic:
    """The sums of a round, to each of which a unit adds one at most.

    Args:
        job: the request, with the head and the map.

    Returns:
        In the first round "records" (1,) and "totals" (k,), of features that are divided by the
        bound, or by their norm if it is larger, and where the bound is zero "code" (BINS,), how many
        have which length; in the others "sums" (C, k + 1), of residuals times features, and "gaps"
        (FACTORS,).

    Raises:
        SurrogateError: for a message that is not this run's.
    """
    train, (weight, bias, public, content, bound) = job.found.train, _received(job)
    claim = job.run.mechanism_for("record" if train.units is None else "patient")
    assert claim is not None
    classes = job.run.settings.classes
    labels = class_indices(classes, job.found.classes)[train.labels]
    first = job.round == 1
    counts_lengths = first and not bound
    # Of a site without records, which sends zeros, no part has any.
    lengths = [torch.zeros(0, dtype=torch.float64)]
    mean_weight = job.run.plan.mean_over_columns_weight(train.features.shape[1])
    change = _map_of(public, mean_weight, lengths if counts_lengths else None)
    if first:
        data = Clipped.of(train, bound, change)
        weights = data.weights * (labels >= 0)
        bounds = {name: claim.noise[name][1] for name in (RECORDS, TOTALS)}
        code = torch.ones(len(labels), 1, dtype=torch.float64)
        if counts_lengths:
            bounds, code = bounds | {CODE: claim.noise[CODE][1]}, in_bins(torch.cat(lengths))
        made = coded_statistics(data.features, code, weights, bounds, *data.done)
        return SiteStatistic({each.name: each for each in made}, claim, classes)
    data = _kept(
        train, (content, mean_weight, claim.clip), lambda: Clipped.of(train, claim.clip, change)
    )
    features, weights = data.features, data.weights * (labels >= 0)
    labels = labels.clamp_min(0)
    head = torch.cat([weight, bias[:, None] / logistic.CONSTANT], 1)
    code, sure = residuals(features, labels, head), gaps(features, labels, head)
    (sums,) = coded_statistics(features, code, weights, {SUMS: claim.noise[SUMS][1]}, *data.done)
    (counted,) = coded_statistics(features, sure, weights, {CODE: claim.noise[logistic.GAPS][1]})
    sums_and_gaps = {SUMS: sums, logistic.GAPS: replace(counted, name=logistic.GAPS)}
    return SiteStatistic(sums_and_gaps, claim, classes)


def with_constant(features: Tensor) -> Tensor:
    """Features with a constant entry for the bias.

    Args:
        features: (n, k), of norm at most one.

    Returns:
        (n, k + 1), of norm at most one.
    """
    constant = torch.full((len(features), 1), logistic.CONSTANT, dtype=torch.float64)
    return torch.cat([features, constant], 1) / logistic.LENGTH


def in_bins(lengths: Tensor) -> Tensor:
    """One in the column of each feature's length, whose logarithm is rounded to half octaves. The
    first and the last column hold all that are shorter and longer.

    Args:
        lengths: (n,), float64; what is not finite counts as zero.

    Returns:
        (n, BINS), float64.

    Example:
        >>> in_bins(torch.tensor([0.0, 1.0, 2.0, 1e30]).double()).argmax(1).tolist()
        [0, 32, 34, 63]
    """
    finite = lengths.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    exponents = (logistic.BINS_OF_TWICE * finite.log2()).round() + logistic.BINS // 2
    columns: Tensor = one_hot(exponents.clamp(0, logistic.BINS - 1).long(), logistic.BINS)
    return columns.double()


def residuals(features: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    """What a softmax head leaves of each record's class, divided by CLIP or by its norm if that is
    larger. To the last bit, that of a record depends on no other record.

    Args:
        features: with the constant, (n, k + 1), float64.
        labels: indices of classes, (n,).
        head: weight and bias, (C, k + 1), for features without the factor of `with_constant`.

    Returns:
        One for a record's class minus the probabilities, (n, C), of norm at most one.
    """

    def each(scores: Tensor, own: Tensor) -> Tensor:
        return clip(own - scores.softmax(1), logistic.CLIP)[0]

    return _of_scores(each, "softmax residuals", features, labels, head)


def gaps(features: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    """By how much the score of each record's class is above what the head expects of it, at each of
    FACTORS; the slope of the log likelihood in that factor. To the last bit, that of a record depends
    on no other record.

    Args:
        features: as of `residuals`.
        labels: as of `residuals`.
        head: as of `residuals`.

    Returns:
        In units of the range of a record's scores, (n, FACTORS), over the root of their number, and
        so of norm at most one.
    """
    factors = torch.tensor(logistic.FACTORS, dtype=torch.float64)[:, None, None]

    def each(scores: Tensor, own: Tensor) -> Tensor:
        apart = (own - (factors * scores).softmax(2)) * scores
        range_ = scores.max(1).values - scores.min(1).values
        parts = apart.sum(2) / range_.clamp_min(1e-300)
        return (parts.clamp(-1, 1) / math.sqrt(len(logistic.FACTORS))).T

    return _of_scores(each, "gaps of scores", features, labels, head, len(logistic.FACTORS))


def _of_scores(
    each: Callable[[Tensor, Tensor], Tensor],
    kind: str,
    features: Tensor,
    labels: Tensor,
    head: Tensor,
    count: int = 0,
) -> Tensor:
    """What follows from each record's scores (n, C) and one-hot class, float64; `count` columns, or as
    many as classes.
    """
    scaled = head * logistic.LENGTH

    def alone(some: Tensor, classes: Tensor) -> list[Tensor]:
        return [each(linear(some, scaled), one_hot(classes, len(scaled)).double())]

    parts = per_record(alone, (features, labels), kind, [scaled], CHUNKS)
    none = torch.zeros(0, count or len(head), dtype=torch.float64)
    return torch.cat([none, *(part for (part,) in parts)])


# Of the latest sites of this process, by what they are made of: data for all rounds after the first.
_latest: dict[Hashable, Clipped] = {}


def _kept(train: LabelledFeatures, how: Hashable, make: Callable[[], Clipped]) -> Clipped:
    """Clipped features, with the constant; the same in each round, and so made once where they are small.

    Args:
        train: records they are made of.
        how: what else decides them.
        make: makes them without the constant.
    """

    def made() -> Clipped:
        data = make()
        return replace(data, features=_with_constant(data.features, train.folder))

    if train.folder is not None:
        return made()
    content = hashlib.sha256(train.features.cpu().contiguous().view(torch.uint8).numpy().data)
    key = content.digest(), train.labels.cpu().numpy().tobytes(), train.units, how
    if key not in _latest:
        _latest[key] = data = made()
        while sum(each.features.nbytes for each in [*_latest.values()]) > MOST_KEPT:
            _latest.pop(next(iter(_latest)))
        return data
    return _latest[key]


def _with_constant(features: Tensor, folder: Path | None) -> Tensor:
    """As `with_constant`; with a folder, in a file there."""
    if folder is None:
        return with_constant(features)
    parts = (with_constant(features[rows]) for rows in chunks(*features.shape))
    return written(parts, features.shape[1] + 1, folder, torch.float64)


def _map_of(
    public: PublicMap, weight: OwnParts, lengths: list[Tensor] | None
) -> Callable[[Tensor], Tensor]:
    """The map of features, by which a record's features depend on no other record's; it adds their
    lengths to the list, if there is one.
    """
    matrix, centre = public.projection, public.centre
    assert centre is not None

    def mapped(features: Tensor) -> Tensor:
        apart = weigh_mean_over_columns(features, weight) - centre
        if matrix is None:
            return apart
        parts = per_record(
            lambda some: [linear(some, matrix)], (apart,), "projection", [matrix], CHUNKS
        )
        return torch.cat([apart.new_zeros(0, len(matrix)), *(part for (part,) in parts)])

    def measured(features: Tensor) -> Tensor:
        assert lengths is not None
        rows = mapped(features)
        parts = per_record(
            lambda some: [torch.linalg.vector_norm(some, dim=1)], (rows,), "lengths", [], CHUNKS
        )
        lengths.extend(part for (part,) in parts)
        return rows

    return mapped if lengths is None else measured


def _received(job: Job) -> tuple[Tensor, Tensor, PublicMap, bytes, float]:
    """Weight (C, k), float64, and bias (C,) of the received head; the map of the features, after what
    they keep of their own mean and length, and a digest of its numbers; and what divides a feature
    that is longer, in the first round. Raises SurrogateError for others than the run's.
    """
    model = job.received_model(_unpacked).tensors
    sizes = job.run.plan.messages.sizes(
        len(job.run.settings.classes), job.found.train.features.shape[1], 1
    )
    fields = job.run.plan.messages.receives
    wanted = {field.name: field.sizes(sizes) for field in fields if count([field], sizes)}
    shapes = {name: tuple(each.shape) for name, each in model.items()}
    if shapes != wanted:
        raise SurrogateError(f"a head and map of shapes {shapes}, expected {wanted}")
    bound = float(model[logistic.BOUND])
    if bound < 0 or (bound > 0) != bool(job.run.settings.fedpft.public):
        raise SurrogateError(
            f"a bound of {bound:g}; it is above zero where the run has public features, else zero"
        )
    public, name, content = _map_in(job.payload or b"")
    job.check_agreed(name, job.round > 1)
    return model[logistic.WEIGHT].double(), model[logistic.BIAS].double(), public, content, bound


# All sites of a simulation receive the same bytes.
_unpacked = lru_cache(maxsize=1)(unpack_parameters)


@lru_cache(maxsize=1)
def _map_in(payload: bytes) -> tuple[PublicMap, str, bytes]:
    """The map in a model that was checked, float64; its digest in settings, which leaves out rows of
    zeros; and one of all its numbers.
    """
    model = _unpacked(payload).tensors
    parts = (model.get(logistic.PROJECTION), model[logistic.CENTRE])
    public = PublicMap(*(each if each is None else each.double() for each in parts))
    numbers = b"".join(each.numpy().tobytes() for each in parts if each is not None)
    return public, public_digest(public), hashlib.sha256(numbers).digest()
