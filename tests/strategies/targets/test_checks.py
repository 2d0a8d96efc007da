"""What honest records and honest noise give passes; each limit is in test_limits_of_checks.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.strategies.targets.sums import (
    CodedSums,
    check_cells,
    check_labels,
    check_numbers,
)
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


def test_numbers_without_products_are_refused() -> None:
    sums = replace(numbers(4, 50), products=None)
    with pytest.raises(SurrogateError, match="lack their products"):
        check_numbers(sums)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("table", ["code", "sums"])
def test_what_is_not_finite_is_refused(table: str, value: float) -> None:
    for sums, check in (
        (numbers(1, 100), check_numbers),
        (labels(1, 100), lambda given, largest: check_labels(given, 3, largest)),
        (cells(1, 100), check_cells),
    ):
        changed = getattr(sums, table).clone()
        changed[0] = value
        with pytest.raises(SurrogateError, match="not finite"):
            check(replace(sums, **{table: changed}), 1.0)  # type: ignore[operator]
