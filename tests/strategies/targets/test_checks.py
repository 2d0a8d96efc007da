"""What coded sums cannot be is refused; what honest records and honest noise give passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.targets.sums import CodedSums, check_cells, check_labels, check_numbers
from tests.coded import coded, exact_code, noisy, number_sums


def features(seed: int, n: int, d: int = 5) -> Tensor:
    """Of norm at most one."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True).clamp_min(1)


def numbers(seed: int, n: int) -> CodedSums:
    x = features(seed, n)
    return number_sums((2 * x[:, :2]).clamp(-1, 1), x, -1, 1)


def labels(seed: int, n: int) -> CodedSums:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 3, (n, 3), generator=draw).double()
    values[values == 2] = torch.nan
    return coded(exact_code(values), features(seed, n))


def cells(seed: int, n: int) -> CodedSums:
    at = torch.randint(0, 7, (n,), generator=torch.Generator().manual_seed(seed))
    return coded(torch.nn.functional.one_hot(at, 7).double(), features(seed, n))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 80), scale=st.sampled_from([0.0, 1.0, 30.0]))
def test_sums_of_records_pass_with_any_honest_noise(seed: int, n: int, scale: float) -> None:
    for sums, check in (
        (numbers(seed, n), check_numbers),
        (labels(seed, n), lambda s, largest: check_labels(s, 3, largest)),
        (cells(seed, n), check_cells),
    ):
        if scale:
            sd = torch.full_like(sums.code, scale)
            sums = noisy(sums, sd, sd, scale, seed, products=scale, centre=True)
        check(sums, 1.0)  # type: ignore[operator]


def changed(sums: CodedSums, name: str, row: int, factor: float, added: float = 0.0) -> CodedSums:
    table = getattr(sums, name).clone()
    table[row] = factor * table[row] + added
    return replace(sums, **{name: table})


@pytest.mark.parametrize(
    ("name", "row", "factor", "added", "match"),
    [
        ("code", 0, 0.0, -50.0, "records below zero"),
        ("code", 1, 0.0, 150.0, "sum of number 1: 150, more than the 100"),
        ("code", 2, 0.0, -150.0, "sum of number 2"),
        ("products", 0, 0.0, 120.0, "squares of number 1"),
        ("products", 1, 0.0, -50.0, "squares below zero of number 2"),
        ("sums", 1, 1.0, 90.0, "sums of row 2"),
        ("sums", 1, 0.0, float("nan"), "not finite"),
        ("products", 0, 0.0, 2.0, "eigenvalue"),
    ],
)
def test_numbers_that_no_records_have_are_refused(
    name: str, row: int, factor: float, added: float, match: str
) -> None:
    with pytest.raises(SurrogateError, match=match):
        check_numbers(changed(numbers(1, 100), name, row, factor, added), 1.0)


@pytest.mark.parametrize(
    ("name", "row", "factor", "added", "match"),
    [
        ("code", 1, 0.0, -3.0, "labels below zero"),
        ("code", 1, 1.0, 100.0, "annotated records of a label"),
        ("sums", 2, 1.0, 60.0, "sums of row 2"),
        ("code", 3, 0.0, float("inf"), "not finite"),
    ],
)
def test_labels_that_no_records_have_are_refused(
    name: str, row: int, factor: float, added: float, match: str
) -> None:
    with pytest.raises(SurrogateError, match=match):
        check_labels(changed(labels(1, 100), name, row, factor, added), 3, 1.0)


@pytest.mark.parametrize(
    ("name", "row", "factor", "added", "match"),
    [
        ("code", 6, 0.0, -3.0, "records of a cell below zero"),
        ("sums", 6, 1.0, 60.0, "sums of cell 7"),
        ("sums", 0, 0.0, float("nan"), "not finite"),
    ],
)
def test_cells_that_no_records_have_are_refused(
    name: str, row: int, factor: float, added: float, match: str
) -> None:
    with pytest.raises(SurrogateError, match=match):
        check_cells(changed(cells(1, 100), name, row, factor, added), 1.0)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_moment_with_a_negative_direction_is_refused(scale: float) -> None:
    sums = cells(2, 300)
    direction = torch.zeros(5, dtype=torch.float64)
    direction[0] = 1
    moment = sums.moment
    wrong = moment.matrix - torch.outer(direction, direction)
    sums = replace(sums, moment=Statistics(moment.counts, moment.means, wrong))
    if scale:
        sd = torch.full((7,), scale, dtype=torch.float64)
        sums = noisy(sums, sd, sd, scale, 0, centre=True)
    with pytest.raises(SurrogateError, match="eigenvalue"):
        check_cells(sums, 1.0)


def test_a_lie_far_beyond_the_noise_is_refused_and_one_within_it_is_not() -> None:
    sd = torch.full((3,), 5.0, dtype=torch.float64)
    sums = noisy(numbers(3, 200), sd, sd, 5.0, 0, products=5.0)
    check_numbers(changed(sums, "code", 1, 1.0, 10.0), 1.0)
    with pytest.raises(SurrogateError, match="sum of number 1"):
        check_numbers(changed(sums, "code", 1, 1.0, 400.0), 1.0)
    with pytest.raises(SurrogateError, match="sums of row 2"):
        check_numbers(changed(sums, "sums", 1, 1.0, 300.0), 1.0)


def test_numbers_without_products_are_refused() -> None:
    sums = replace(numbers(4, 50), products=None)
    with pytest.raises(SurrogateError, match="lack their products"):
        check_numbers(sums)
