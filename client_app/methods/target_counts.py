"""Counts of records with another target than classes: of their cells, and of what a model answers."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.exact_sums import ROWS, ExactSum, IntegerSum
from fedsurrogate.common.targets.answers import UNFIT, facts_of
from fedsurrogate.common.targets.counted import CountedTarget


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
    sizes = torch.tensor([len(question.cells) for question in how.questions])
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
    kept = (counts == 0) | (counts >= least)
    if len(how.questions) > 1:
        sizes = [len(each.cells) for each in how.questions]
        kept = torch.cat([part.all().expand(len(part)) for part in torch.split(kept, sizes)])
    return counts * kept


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
