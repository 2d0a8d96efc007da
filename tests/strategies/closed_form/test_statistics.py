"""Statistics of parts add up to those of all records, whatever the parts; against numpy and
scikit-learn on all records.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as drawn
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

import fedsurrogate.strategies.closed_form
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.statistics import Factored, Statistics, of_total, sum_of
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.examples import CLASSES, records, statistics_of, three_hospitals

MODULES = [
    f"fedsurrogate.strategies.closed_form.{each.name}"
    for each in pkgutil.iter_modules(fedsurrogate.strategies.closed_form.__path__)
]
EYE = torch.eye(2, dtype=torch.float64)


def table(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@drawn.composite
def data(draw: drawn.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Features (n, d) around a mean of any size, labels, the part of each record, and the number of
    classes.

    Classes and parts may be empty, or have one record.
    """
    count, classes, parts = (
        draw(drawn.integers(1, 40)),
        draw(drawn.integers(1, 5)),
        draw(drawn.integers(1, 4)),
    )
    generator = torch.Generator().manual_seed(draw(drawn.integers(0, 2**16)))
    offset, scale = (
        draw(drawn.sampled_from((0.0, 3.0, 1e4))),
        draw(drawn.sampled_from((1e-3, 1.0, 50.0))),
    )
    dimension = draw(drawn.integers(1, 6))
    features = offset + scale * torch.randn(
        count, dimension, generator=generator, dtype=torch.float64
    )
    labels = torch.randint(0, classes, (count,), generator=generator)
    return features, labels, torch.randint(0, parts, (count,), generator=generator), classes


def close(ours: Statistics, exact: Statistics) -> None:
    """Equal up to float64 rounding. Of a variance, that is the rounding of the square of the
    largest mean.
    """
    square = 1e-15 * max(1.0, float(exact.means.abs().max())) ** 2
    torch.testing.assert_close(ours.counts, exact.counts, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.means, exact.means, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.matrix, exact.matrix, rtol=1e-9, atol=square)


@given(data())
def test_the_sum_over_parts_is_the_statistics_of_all_records(
    drawn_data: tuple[Tensor, Tensor, Tensor, int],
) -> None:
    features, labels, parts, classes = drawn_data
    of_parts = [
        statistics_of(features[parts == k], labels[parts == k], classes)
        for k in parts.unique().tolist()
    ]
    exact = statistics_of(features, labels, classes)
    close(sum_of(of_parts), exact)
    close(sum_of(reversed(of_parts)), exact)
    one_by_one = of_parts[0]
    for each in of_parts[1:]:
        one_by_one = one_by_one + each
    close(one_by_one, exact)


@given(data())
def test_the_covariance_of_all_records_and_the_means_are_numpys(
    drawn_data: tuple[Tensor, Tensor, Tensor, int],
) -> None:
    features, labels, parts, classes = drawn_data
    of_parts = [
        statistics_of(features[parts == k], labels[parts == k], classes)
        for k in parts.unique().tolist()
    ]
    ours, x = sum_of(of_parts), features.numpy()
    square = 1e-14 * max(1.0, float(ours.means.abs().max())) ** 2
    exact = np.cov(x.T, bias=True).reshape(x.shape[1], x.shape[1])
    np.testing.assert_allclose(ours.total(), exact, rtol=1e-9, atol=square)
    np.testing.assert_allclose(
        ours.between().T @ ours.between(), ours.total() - ours.matrix, rtol=1e-6, atol=square
    )
    np.testing.assert_allclose(ours.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    for label in labels.unique().tolist():
        own = x[labels.numpy() == label]
        np.testing.assert_allclose(ours.means[label], own.mean(0), rtol=1e-12, atol=1e-12)


@given(data(), drawn.integers(1, 5))
def test_a_part_of_the_weight_is_as_many_records_fewer(
    drawn_data: tuple[Tensor, Tensor, Tensor, int], times: int
) -> None:
    features, labels, parts, classes = drawn_data
    whole = statistics_of(features, labels, classes)
    repeated = statistics_of(features.repeat(times, 1), labels.repeat(times), classes)
    close(whole.scaled(times), repeated)
    close(repeated.scaled(1 / times), whole)
    other = statistics_of(features[parts == parts[0]], labels[parts == parts[0]], classes)
    close(repeated.scaled(1 / times) + other, whole + other)


@given(data())
def test_classes_without_records_may_be_left_out(
    drawn_data: tuple[Tensor, Tensor, Tensor, int],
) -> None:
    features, labels, _, classes = drawn_data
    present, renamed = labels.unique(return_inverse=True)
    exact = statistics_of(features, renamed, len(present))
    whole = statistics_of(features, labels, classes)
    for kept in (present, whole.counts > 0):
        ours = whole.within(kept)
        close(ours, exact)
        torch.testing.assert_close(ours.total(), whole.total())


def test_what_hospitals_of_one_class_each_send_has_the_covariance_of_scikit_learn() -> None:
    whole = records()
    ours = sum_of(
        statistics_of(each.features, torch.full_like(each.labels, at), 3)
        for at, each in enumerate(three_hospitals(whole))
    )
    known = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(
        whole.features.numpy(), whole.labels.numpy()
    )
    # In a message, the root of two off the diagonal is in single precision.
    np.testing.assert_allclose(ours.matrix, known.covariance_, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(ours.means, known.means_, rtol=1e-9)


def test_secure_aggregation_has_the_statistics_of_all_records_for_the_classes_that_have_any() -> (
    None
):
    whole = records()
    x, y = whole.features, whole.labels
    exact = statistics_of(x, y, 4)
    tensors = {
        "counts": exact.counts,
        "sums": exact.counts[:, None] * exact.means,
        "squares": fold(x.T @ x),
    }
    ours, header = of_total(
        Total(Header("fedpft", "run", "coordinator", "f", ("a", "b", "c", "none")), tensors)
    )
    assert header.classes == CLASSES
    torch.testing.assert_close(ours.counts, exact.counts[:3])
    torch.testing.assert_close(ours.means, exact.means[:3])
    torch.testing.assert_close(ours.matrix, exact.matrix)


def test_secure_aggregation_without_a_record_of_any_class_is_refused() -> None:
    none = {"counts": torch.zeros(3), "sums": torch.zeros(3, 4), "squares": torch.zeros(10)}
    total = Total(
        Header("fedpft", "run", "coordinator", "f", CLASSES),
        {name: tensor.double() for name, tensor in none.items()},
    )
    with pytest.raises(RunError, match="no record of any class"):
        of_total(total)


def test_divided_columns_are_those_of_divided_records() -> None:
    whole, scales = records(), torch.linspace(0.1, 10, 6).double()
    exact = statistics_of(whole.features / scales, whole.labels, 3)
    close(statistics_of(whole.features, whole.labels, 3).divided(scales), exact)
    thin = Factored(torch.ones(6, 2).double(), torch.ones(6).double())
    assert torch.allclose(thin.divided(scales).dense(), thin.dense() / scales / scales[:, None])


def test_factors_are_kept_while_they_are_few() -> None:
    few = Factored(torch.ones(9, 1, dtype=torch.float64), torch.ones(9, dtype=torch.float64))
    part = Statistics(table(2, 2), torch.zeros(2, 9, dtype=torch.float64), few)
    assert isinstance((part + part).covariance, Factored)
    torch.testing.assert_close((part + part).matrix, part.matrix)
    assert isinstance(sum_of([part] * 7).covariance, Tensor)
    torch.testing.assert_close(sum_of([part] * 7).matrix, part.matrix)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((table(1, 1).float(), EYE, EYE), r"counts of shape \(2,\) in torch\.float32; \(2,\) in torch\.float64"),
        ((table(1, 1), EYE.float(), EYE), r"means of shape .* in torch\.float32"),
        ((table(1, 1), EYE, EYE.float()), r"covariance of shape .* in torch\.float32"),
        ((table(1, 1), EYE, Factored(EYE.float(), table(1, 1))), r"covariance's factor of shape .* in torch\.float32"),
        ((table(1, 1, 1), EYE, EYE), r"counts of shape \(3,\) in torch\.float64; \(2,\)"),
        ((table(1, 1), EYE[0], EYE), r"means of shape \(2,\), which must be \(C, d\)"),
        ((table(1, 1), EYE, EYE[:1]), r"covariance of shape \(1, 2\) in torch\.float64; \(2, 2\)"),
        ((table(1, 1), EYE, Factored(EYE[:1], table(1, 1))), r"covariance's factor of shape \(1, 2\)"),
        ((table(1, 1), EYE, Factored(EYE, table(1))), r"covariance's variances of shape \(1,\)"),
    ],
)  # fmt: skip
def test_single_precision_and_shapes_that_do_not_agree_are_refused(
    parts: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Statistics(*parts)


def test_only_statistics_of_the_same_classes_and_dimensions_can_be_added() -> None:
    whole = Statistics(table(1, 1), EYE, EYE)
    with pytest.raises(ValueError, match="other classes or dimensions"):
        whole + whole.within(table(1).long())
    with pytest.raises(ValueError, match="no statistics"):
        sum_of([])


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_documentation_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted or name.rpartition(".")[2] not in ("statistics", "solvers")
