"""Each head in closed form by its formula in numpy, over generated classes of any size, also without
records or without variance, with covariances as matrices and in factors; and the facts of a run.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Gram
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.closed_form.solvers import (
    _unequal_scales,
    balanced_ridge,
    chosen_with_accuracy,
    lda,
    naive_bayes,
    qda,
    ridge,
)
from fedsurrogate.strategies.closed_form.statistics import Factored, Statistics
from fedsurrogate.strategies.fedpft.strategy import (
    _enough,
    one_gaussian_a_class,
)

Array = NDArray[np.float64]
D = 4
few = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 9999)
# Of covariances: all directions, all but one, none.
RANKS = st.sampled_from([D, D, D, D - 1, 0])


def classes_of(
    seed: int, classes: int, rank: int, factors: bool, absent: bool, sampled: bool = True
) -> Statistics:
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 60, classes).astype(float)
    counts[-1] *= not (absent and classes > 1)
    means = 2 * draw.normal(size=(classes, D)) * (counts > 0)[:, None]
    root = draw.normal(size=(D, D)) * (np.arange(D) < rank)
    if factors:
        # What is left without a factor is nothing, or a variance of each column.
        rest = draw.uniform(0.1, 1, D) if rank == D else np.zeros(D)
        covariance: torch.Tensor | Factored = Factored(
            torch.from_numpy(root[:, : D - 1].copy()), torch.from_numpy(rest)
        )
    else:
        covariance = torch.from_numpy(root @ root.T)
    return Statistics(
        torch.from_numpy(counts), torch.from_numpy(means), covariance, sampled=sampled
    )


def parts(statistics: Statistics) -> tuple[Array, Array, Array, Array]:
    counts, means = statistics.counts.numpy(), statistics.means.numpy()
    return counts, counts / counts.sum(), means, statistics.matrix.numpy()


def log_priors(priors: Array) -> Array:
    return np.log(np.maximum(priors, 1e-300))


def solves(weight: torch.Tensor, matrix: Array, added: float, rows: Array) -> None:
    """The weight times the matrix and its stated ridge are the rows."""
    whole = matrix + added * np.abs(matrix.diagonal()).mean() * np.eye(D)
    least = np.linalg.eigvalsh(whole)[0] / np.abs(whole.diagonal()).mean()
    if added:
        assert np.linalg.eigvalsh(matrix)[0] < 1e-12 * np.abs(matrix.diagonal()).mean()
        assert added < 1e-9
    if least > 1e-7:
        np.testing.assert_allclose(weight.numpy(), np.linalg.solve(whole, rows.T).T, rtol=1e-6)


@few
@given(
    SEEDS, st.integers(1, 4), RANKS, st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([0.0, 0.2, 1.0, None]), st.booleans(),
)  # fmt: skip
def test_the_discriminant(
    seed: int,
    classes: int,
    rank: int,
    factors: bool,
    absent: bool,
    sampled: bool,
    shrinkage: float | None,
    diagonal: bool,
) -> None:
    given_ = classes_of(seed, classes, rank, factors, absent, sampled)
    found = (naive_bayes if diagonal else lda)(given_, shrinkage)
    _, priors, means, within = parts(given_)
    if diagonal:
        within = np.diag(within.diagonal())
    variance = within.diagonal().mean()
    # The lower median over classes.
    least = 1e-15 * sorted((means**2).mean(1))[(classes - 1) // 2]
    alike, chosen = variance < least, shrinkage
    if alike:
        within, variance = least * np.eye(D), least
    if variance <= 0:
        assert (found.shrinkage, found.added) == (1.0, 0.0)
        assert not found.weight.any()
        np.testing.assert_allclose(found.bias, log_priors(priors))
        return
    if chosen is None:
        restricted = diagonal or not sampled or alike
        chosen = 0.01 if restricted else chosen_with_accuracy(given_)[0]
        if not restricted and _unequal_scales(torch.tensor(within.diagonal())) is not None:
            return
    assert found.shrinkage == chosen
    shrunk = (1 - chosen) * within + chosen * variance * np.eye(D)
    solves(found.weight, shrunk, 0.0 if alike else found.added, means)
    bias = log_priors(priors) - (found.weight.numpy() * means).sum(1) / 2
    np.testing.assert_allclose(found.bias, bias)
    if alike:
        assert found.added == 1.0
    elif chosen or rank == D:
        assert found.added == 0.0


@few
@given(SEEDS, st.integers(1, 4), RANKS, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_least_squares_weighed_by_records_or_by_classes(
    seed: int, classes: int, rank: int, factors: bool, absent: bool, shrinkage: float
) -> None:
    given_ = classes_of(seed, classes, rank, factors, absent)
    counts, priors, means, within = parts(given_)
    for balanced in (False, True):
        found = (balanced_ridge if balanced else ridge)(given_, shrinkage)
        own = (counts > 0) / (counts > 0).sum() if balanced else priors
        mean = own @ means
        total = within + (means - mean).T @ ((means - mean) * own[:, None])
        variance = float(total.diagonal().mean()) or 1.0
        shrunk = total + shrinkage * variance * np.eye(D)
        if shrinkage or rank == D:
            assert found.added == 0.0
            solves(found.weight, shrunk, 0.0, (means - mean) * own[:, None])
        assert found.shrinkage == shrinkage
        np.testing.assert_allclose(found.bias, own - found.weight.numpy() @ mean, atol=1e-12)


@pytest.mark.parametrize(("ratio", "unequal"), [(24.9, False), (25.0, False), (25.1, True)])
def test_columns_are_unequal_from_the_median_over_the_smallest(ratio: float, unequal: bool) -> None:
    variances = torch.tensor([1.0, ratio, ratio, 9 * ratio, 0.0, 1e-14]).double()
    found = _unequal_scales(variances)
    assert (found is not None) == unequal
    if found is not None:
        wanted = [1.0, ratio**0.5, ratio**0.5, 3 * ratio**0.5, 1.0, 1.0]
        assert found.tolist() == pytest.approx(wanted)


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from([0.003, 0.02, 0.1, 1.0]), st.sampled_from([0.0, 0.2, 1.0]))
def test_a_small_column_has_its_own_unit_where_that_is_expected_to_be_better(
    seed: int, small: float, tells: float
) -> None:
    draw = np.random.default_rng(seed)
    scales = np.array([small, 1.0, 1.0, 1.0])
    root = np.eye(D) + 0.2 * draw.normal(size=(D, D))
    within = (root @ root.T) * scales * scales[:, None]
    means = draw.normal(size=(3, D)) * scales * np.array([2.0, tells, tells, tells])
    given_ = Statistics(
        torch.tensor([40.0, 90.0, 20.0]).double(), torch.from_numpy(means), torch.from_numpy(within)
    )
    shrinkage, accuracy = chosen_with_accuracy(given_)
    found, unit = lda(given_), _unequal_scales(torch.tensor(within.diagonal()))
    if unit is not None:
        other, better = chosen_with_accuracy(given_.divided(unit))
        if better > accuracy + 0.005:
            in_units = lda(given_.divided(unit), other)
            assert found.shrinkage == other
            torch.testing.assert_close(found.weight, in_units.weight / unit)
            torch.testing.assert_close(found.bias, in_units.bias)
            return
    plain = lda(given_, shrinkage)
    assert found.shrinkage == shrinkage
    torch.testing.assert_close(found.weight, plain.weight)
    torch.testing.assert_close(found.bias, plain.bias)


def site(name: str, counts: dict[str, int], full: bool) -> Surrogate:
    classes = len(counts)
    spread = torch.eye(D).repeat(classes, 1, 1)
    covariance = Full(spread) if full else Diagonal(torch.ones(classes, D))
    table = Mixtures(
        torch.tensor(list(counts.values())),
        torch.arange(classes),
        torch.ones(classes),
        torch.zeros(classes, D),
        covariance,
    )
    return Surrogate(Header("fedpft", "r", name, "f", tuple(counts)), table)


COUNTS = st.dictionaries(st.sampled_from("abc"), st.integers(1, 7), min_size=1)


@few
@given(st.lists(COUNTS, min_size=1, max_size=3), st.booleans())
def test_a_class_of_one_site_alone_with_too_few_records_is_left_out(
    sites: list[dict[str, int]], full: bool
) -> None:
    fewest = D + 1 if full else 2
    owners = {name: [own[name] for own in sites if name in own] for name in "abc"}
    there = {name for name, own in owners.items() if own}
    alone = {name for name in there if len(owners[name]) == 1 and owners[name][0] < fewest}
    wanted = there - alone if len(sites) > 1 and alone != there else there
    found = _enough([site(f"s{k}", own, full) for k, own in enumerate(sites)])
    assert set(found) == wanted
    assert len(found) == len(wanted)


def oracle(matrix: Array, n: float) -> float:
    """Chen et al. 2010, equation 23."""
    trace, squares = matrix.trace(), float((matrix**2).sum())
    below = (n + 1 - 2 / D) * (squares - trace**2 / D)
    return 1.0 if below <= 0 else min(1.0, ((1 - 2 / D) * squares + trace**2) / below)


@few
@given(SEEDS, st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.2, None]), RANKS)
def test_quadratic_discriminants_of_classes_of_any_size(
    seed: int, classes: int, sampled: bool, shrinkage: float | None, rank: int
) -> None:
    each = [
        classes_of(seed + k, 1, rank if k == classes - 1 else D, False, False)
        for k in range(classes)
    ]
    if not sampled:
        each = [
            replace(one, covariance=one.matrix.diagonal().diag(), sampled=False) for one in each
        ]
    found, largest, added = qda(each, Header("fedpft", "r", "s", "f", ()), shrinkage)
    used, bias, singular = [], [], False
    for k, one in enumerate(each):
        n, within = float(one.counts[0]), one.matrix.numpy()
        own = shrinkage
        if own is None:
            own = oracle(within, n) if sampled else 0.01
        used.append(own)
        shrunk = (1 - own) * within + (own * within.diagonal().mean() + 1e-30) * np.eye(D)
        singular = singular or np.linalg.eigvalsh(shrunk)[0] < 1e-12 * shrunk.diagonal().mean()
        bias.append(math.log(n) - np.linalg.slogdet(shrunk)[1] / 2)
        np.testing.assert_allclose(found.means[k], one.means[0])
        if not singular:
            whitener = found.whiteners[k].double().numpy()
            whitener = whitener if sampled else np.diag(whitener)
            np.testing.assert_allclose(
                whitener.T @ whitener, np.linalg.inv(shrunk), rtol=1e-3, atol=1e-5
            )
    assert largest == pytest.approx(max(used))
    assert (added > 0) == (singular and sampled)
    if not singular:
        np.testing.assert_allclose(found.bias, np.array(bias) - max(bias), atol=1e-9)


@few
@given(SEEDS, st.integers(1, 4), st.booleans())
def test_pooled_statistics_are_one_gaussian_a_class(seed: int, classes: int, absent: bool) -> None:
    given_ = classes_of(seed, classes, D, False, absent)
    given_ = replace(given_, counts=given_.counts + 0.3)
    table = one_gaussian_a_class(given_)
    assert table.counts.tolist() == [max(1, round(each)) for each in given_.counts.tolist()]
    assert table.labels.tolist() == list(range(classes))
    assert table.weights.tolist() == [1.0] * classes
    torch.testing.assert_close(table.means, given_.means.float())
    assert isinstance(table.covariance, Gram)
    torch.testing.assert_close(table.covariance.matrix, given_.matrix.float())
