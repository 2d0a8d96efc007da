"""Counts at a site: records of each class, or cell of another target, and decisions and scores of a
received model on held-out records.

Neighbouring data differ by one record, or by one patient with all of that patient's records. A
record adds one to one cell of a table, or to one cell of each histogram. The weights of a patient's
records sum to one. So `tables_of` bounds what one unit adds, and the noise follows from that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsurrogate.common.errors import LARGEST_PRIVATE, DataError, SurrogateError, norm_of_ones
from fedsurrogate.common.image_histograms import histograms_of
from fedsurrogate.common.methods.counting import scored_classes, tables_in
from fedsurrogate.common.models.classifiers import Classifier, Head, class_indices, scores_alone
from fedsurrogate.common.privacy.exact_sums import ROWS, ExactSum, IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, unit_weights, with_noise
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.targets.counted import CountedTarget, counted
from fedsurrogate.common.targets.metrics import UNFIT, facts_of
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.surrogate_proto import Counts, pack_counts

from ..features.site_features import LabelledFeatures
from .evaluation import checked_classifier, of_target
from .job import Job, MethodOutput, SiteStatistic

# Histograms cover log-odds from -EDGE to EDGE in bins of equal width; the outer bins hold
# everything beyond.
EDGE = 8.0


def counts(job: Job) -> MethodOutput:
    """The tables of a run that counts, exact or with noise."""
    return _released(job, _tables(job))


def summed_counts(job: Job) -> SiteStatistic:
    """The tables for secure aggregation.

    A site whose classes are all too small adds zeros: a refusal would show that.

    Args:
        job: the request.

    Returns:
        The tables without noise (float64), and the claim.
    """
    exact, claim = {name: table.value for name, table in _tables(job).items()}, job.mechanism()
    if claim is None:
        own = job.run.settings.counting
        whole = _large_enough(exact, job.smallest_cell, job.run.target, own)
        exact = {name: table.double() for name, table in whole.items()}
    return SiteStatistic(exact, claim)


def _tables(job: Job) -> dict[str, IntegerSum]:
    if job.run.target is not None:
        return _of_target(job, job.run.target)
    made = {"survey": _surveyed, "evaluation": _evaluated}
    return made[job.run.settings.counting.kind](job)


def _surveyed(job: Job) -> dict[str, IntegerSum]:
    """The number of training records of each class of the run, and of their images in each cell."""
    train, classes = job.found.train, job.run.settings.classes
    labels = class_indices(classes, job.found.classes)[train.labels]
    weights = _weights(train, job.protects_patients) * (labels >= 0)
    counted = ExactSum((len(classes),), 1.0)
    counted.add_at(labels.clamp_min(0), weights, weights)
    own, cells = job.run.settings.counting, job.found.train.features
    return {"records": counted.total} | _images(own, cells, weights)


def _images(own: CountingSettings, cells: Tensor, weights: Tensor) -> dict[str, IntegerSum]:
    if not own.images:
        return {}
    sizes = [len(each.cells) for each in histograms_of(own.images, own.image_bins).values()]
    return {"images": count_images(sizes, cells.long(), weights)}


def count_images(sizes: Sequence[int], cells: Tensor, weights: Tensor) -> IntegerSum:
    """The number of images in each cell of histograms.

    Args:
        sizes: number of cells of each histogram, Q.
        cells: of each record, one in each histogram, (n, Q), int64.
        weights: of the records, (n,).

    Returns:
        The sum over records, of all cells one after the other.

    Example:
        >>> weights = torch.ones(2, dtype=torch.float64)
        >>> count_images([2, 3], torch.tensor([[0, 1], [0, 2]]), weights).value.tolist()
        [2.0, 0.0, 0.0, 1.0, 1.0]
    """
    total = ExactSum((sum(sizes),), norm_of_ones(len(sizes)), most=1.0)
    each = torch.tensor(sizes)
    total.add_cells(cells.clamp(min=0).minimum(each - 1) + each.cumsum(0) - each, weights)
    return total.total


def _evaluated(job: Job) -> dict[str, IntegerSum]:
    """Decisions and scores of the received model on this site's held-out records."""
    model = _received(job)
    test, settings = job.found.test, job.run.settings
    labels = class_indices(settings.classes, job.found.classes)[test.labels]
    scores = scores_alone(model, test.features)
    known, finite = labels >= 0, scores.isfinite().all(1)
    # In secure aggregation, no model decides which sites leave out a class: the difference of two sums
    # would show one of them.
    good = known if settings.secure_aggregation else known & finite
    good = _in_large_classes(labels, good, len(settings.classes), job.smallest_cell) & finite
    weights = _weights(test, job.protects_patients) * good
    kept = weights > 0
    some = scores[kept], labels[kept], weights[kept]
    return count_decisions(*some, len(settings.classes), settings.counting.bins)


def _of_target(job: Job, target: Target) -> dict[str, IntegerSum]:
    """The table of a run whose records have another target than classes."""
    own, train = job.run.settings.counting, job.found.train
    how = counted(target, own)
    if own.kind == "survey":
        values = target.of_site(train.targets(), job.site)
        weights = _weights(train, job.protects_patients)
        return {"records": count_cells(how, values, weights)} | _images(
            own, train.features, weights
        )
    model, test = of_target(_received(job), target), job.found.test
    if wrong := [name for name in model.header.classes if name not in target.outputs]:
        raise SurrogateError(f"a model that answers {wrong[0][:100]!r}, which is not in the target")
    values = target.of_site(test.targets(), job.site)
    scores = scores_alone(model, test.features)
    finite = scores.isfinite().all(1)
    topics = torch.ones(how.table.shape[0], dtype=torch.bool)
    if not job.run.settings.epsilon:
        # As for classes: in secure aggregation, no model decides which sites leave out a topic.
        judged = torch.ones_like(finite) if job.run.settings.secure_aggregation else finite
        topics = large_topics(how, values, judged, job.limits.smallest_cell)
    weights = _weights(test, job.protects_patients)[finite]
    table = count_answers(how, model, scores[finite], values[finite], weights, topics)
    return {how.table.name: table}


def _in_large_classes(labels: Tensor, kept: Tensor, classes: int, least: int) -> Tensor:
    """Of the records `kept` (n,), those of classes with at least so many of them."""
    sizes = torch.bincount(labels[kept], minlength=classes)
    return kept & (sizes[labels.clamp_min(0)] >= least)


def count_decisions(
    scores: Tensor, labels: Tensor, weights: Tensor, classes: int, bins: int
) -> dict[str, IntegerSum]:
    """Exact tables of decisions and scores.

    Args:
        scores: logits (n, C).
        labels: indices of classes, (n,).
        weights: of each record, (n,).
        classes: C, number of classes.
        bins: B, number of bins of a histogram.

    Returns:
        Decisions (C, C), by true and by predicted class, and scores (S, 2, B).
    """
    decisions = ExactSum((classes * classes,), 1.0)
    decisions.add_at(labels * classes + scores.argmax(1), weights, weights)
    scored = scored_classes(classes)
    histograms = ExactSum((scored * 2 * bins,), norm_of_ones(scored), most=1.0)
    columns = torch.arange(classes - scored, classes)
    for some, own, weight in zip(
        *(torch.split(each, ROWS) for each in (scores, labels, weights)), strict=True
    ):
        row = 2 * torch.arange(scored) + (own[:, None] == columns).long()
        histograms.add_cells(row * bins + histogram_bins(some, bins)[:, columns], weight)
    return {
        "decisions": decisions.total.map(lambda table: table.reshape(classes, classes)),
        "scores": histograms.total.map(lambda table: table.reshape(scored, 2, bins)),
    }


def histogram_bins(scores: Tensor, bins: int) -> Tensor:
    """The bin of each class's log-odds.

    Args:
        scores: logits (n, C).
        bins: number of bins, of equal width from -EDGE to EDGE; the outer ones hold everything
            beyond.

    Returns:
        Bins (n, C), from 0 to bins - 1.

    Example:
        >>> histogram_bins(torch.tensor([[-20.0, 20.0], [0.0, 0.0]]), 4).tolist()
        [[0, 3], [2, 2]]
    """
    log_odds = torch.stack([_log_odds(scores, index) for index in range(scores.shape[1])], 1)
    return ((log_odds + EDGE) * (bins / (2 * EDGE))).floor().long().clamp(0, bins - 1)


def _log_odds(scores: Tensor, index: int) -> Tensor:
    others = [each for each in range(scores.shape[1]) if each != index]
    if not others:
        return torch.full_like(scores[:, index], EDGE)
    return (
        (scores[:, index] - scores[:, others].logsumexp(1))
        .nan_to_num(nan=0.0)
        .clamp(-2 * EDGE, 2 * EDGE)
    )


def _received(job: Job) -> Classifier:
    """The model of the request. Raises SurrogateError unless it is the one that the settings name;
    depends on no record.
    """
    if hashlib.sha256(job.payload or b"").hexdigest() != job.run.settings.counting.digest:
        raise SurrogateError("the model is not the one that counting.digest names")
    model = checked_classifier(job)
    # What a model of another target answers is checked with its target.
    of_classes = job.run.target is None
    if of_classes and model.header.classes != job.run.settings.classes:
        raise SurrogateError("the model has other classes than the run, or in another order")
    if job.run.settings.epsilon and not all(
        each.abs().max() < LARGEST_PRIVATE for each in model.arrays().values() if each.numel()
    ):
        raise SurrogateError(
            f"a model with a number beyond {LARGEST_PRIVATE:g}, which private runs refuse"
        )
    return model


def _weights(records: LabelledFeatures, of_patients: bool) -> Tensor:
    """The weight of each record (n,): one over the number of its patient's, where noise hides
    patients.
    """
    if of_patients and records.units is None:
        raise DataError("the held-out records have no patient IDs, but this site protects patients")
    return unit_weights(records.units if of_patients else None, len(records.labels))


def _released(job: Job, sums: Mapping[str, IntegerSum]) -> MethodOutput:
    run, header = job.run, job.header(job.run.settings.classes)
    exact = {name: sum_.value for name, sum_ in sums.items()}
    answer = {
        "exact": json.dumps({name: table.round().long().tolist() for name, table in exact.items()})
    }
    reported = (answer if job.found.simulated else {}) | (
        {"show": True} if job.limits.show_evaluation else {}
    )
    claim = job.mechanism()
    if claim is None:
        whole = _large_enough(exact, job.smallest_cell, run.target, run.settings.counting)
        if not any(bool(table.any()) for table in whole.values()):
            raise DataError(
                f"smallest-cell = {job.limits.smallest_cell}: no class has so many records, so no "
                "count leaves"
            )
        return MethodOutput(pack_counts(Counts(header, whole)), answer=dict(reported))
    released = tables_in(run.settings.counting, len(run.settings.classes), run.target)
    bounded = [BoundedSum(each.name, sums[each.name], each.bound) for each in released]
    noisy = with_noise(bounded, claim)
    tables = {each.name: each.value.round().long() for each in noisy}
    facts = {f"signal-to-noise-{each.name}": each.signal_to_noise() for each in noisy}
    payload = pack_counts(Counts(header, tables, claim))
    return MethodOutput(payload, claim, facts, dict(reported))


def _large_enough(
    exact: Mapping[str, Tensor], least: int, target: Target | None, own: CountingSettings
) -> dict[str, Tensor]:
    """Exact tables as whole numbers, without classes of fewer records than `least`.

    Such a class looks like one without records. An evaluation has left their records out already.
    """
    whole = {name: table.round().long() for name, table in exact.items()}
    if "records" not in whole:
        return whole
    records, kept = whole["records"], whole
    if target is not None:
        kept = {"records": large_cells(counted(target, own), records, least)}
    else:
        kept = {"records": records * (records >= least)}
    if "images" in whole:
        # Each histogram counts all records, so a cell that is left out alone would follow from others.
        histograms = histograms_of(own.images, own.image_bins).values()
        sizes = [len(each.cells) for each in histograms]
        images = large_questions(whole["images"], sizes, least)
        shown = bool((kept["records"] == records).all())
        kept |= {"images": images * shown}
    return kept


def count_cells(how: CountedTarget, values: Tensor, weights: Tensor) -> IntegerSum:
    """The number of records in each cell of a survey.

    Args:
        how: the target is counted.
        values: (n, k), float64.
        weights: of the records, (n,).

    Returns:
        The sum over records, in the order of `CountedTarget.rows`.
    """
    total = ExactSum((len(how.rows),), how.bound, most=1.0)
    sizes = torch.tensor([len(each) for each in how.questions.values()])
    total.add_cells(how.cells(values) + sizes.cumsum(0) - sizes, weights)
    return total.total


def large_cells(how: CountedTarget, counts: Tensor, least: int) -> Tensor:
    """Exact counts without cells of fewer records than a site's smallest cell.

    Of several questions, each counts all records. So a cell that is left out alone would follow from
    the others, and its question is left out as a whole.

    Args:
        how: the target is counted.
        counts: of the cells.
        least: the smallest cell.
    """
    if len(how.questions) > 1:
        return large_questions(counts, [len(each) for each in how.questions.values()], least)
    return counts * (counts >= least)


def large_questions(counts: Tensor, sizes: Sequence[int], least: int) -> Tensor:
    """Counts of the questions of which each cell has no record, or enough.

    Args:
        counts: of all cells.
        sizes: number of cells of each question.
        least: the smallest cell.
    """
    kept = (counts == 0) | (counts >= least)
    whole = [part.all().expand(len(part)) for part in torch.split(kept, list(sizes))]
    return counts * torch.cat(whole)


def large_topics(how: CountedTarget, values: Tensor, good: Tensor, least: int) -> Tensor:
    """Topics of an evaluation of which exact counts may leave: of each kind of record that is there,
    there are enough.

    Args:
        how: the target is counted.
        values: (n, k), float64.
        good: records that count, (n,), bool.
        least: the smallest cell.

    Returns:
        (T,), bool.
    """
    kinds = how.kinds(values[good])
    sizes = torch.stack([(kinds == kind).sum(0) for kind in (0, 1)])
    return ((sizes == 0) | (sizes >= least)).all(0) & (sizes.sum(0) > 0)


def count_answers(
    how: CountedTarget, model: Head, scores: Tensor, values: Tensor, weights: Tensor, topics: Tensor
) -> IntegerSum:
    """The table of an evaluation.

    Args:
        how: the target is counted.
        model: that is evaluated.
        scores: of the records, finite, (n, o), float64.
        values: of the records, (n, k), float64.
        weights: of the records, (n,).
        topics: that are counted, (T,), bool.

    Returns:
        The sum over records, in the shape of `CountedTarget.table`.

    Raises:
        SurrogateError: for a model whose facts do not allow it.
    """
    table, facts = how.table, facts_of(model.target)
    total = ExactSum(table.shape, table.bound, most=table.most)
    sides = (1,) * (len(table.shape) - 1)
    parts = (torch.split(each, ROWS) for each in (scores, values, weights))
    try:
        # Without records there is one empty part, so what is refused does not depend on them.
        for own, true, weight in zip(*parts, strict=True):
            added = how.judged(facts, model.header.classes, own, true)
            rows = added * topics.reshape(-1, *sides) * weight.reshape(-1, 1, *sides)
            total.add(rows, weight)
    except UNFIT as error:
        raise SurrogateError(
            f"a model whose target cannot be counted ({str(error)[:100]})"
        ) from None
    return total.total
