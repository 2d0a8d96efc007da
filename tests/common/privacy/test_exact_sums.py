"""Exact sums under privacy: a record's contribution does not depend on the order or on other
records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.privacy.exact_sums import (
    COARSE,
    FINE,
    ExactSum,
    IntegerSum,
    power_above,
    toward_zero,
)
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, unit_weights, with_noise
from fedsurrogate.common.privacy.mechanism import NoisySums


def contributions(count: int, width: int, bound: float, seed: int = 0) -> Tensor:
    """Contributions of all norms up to the bound, with full precision, all of one sign so that sums
    are large.
    """
    generator = torch.Generator().manual_seed(seed)
    small = 10.0 ** (-6 * torch.rand(count, width, generator=generator, dtype=torch.float64))
    parts = torch.rand(count, width, generator=generator, dtype=torch.float64) * small * bound
    return parts / width**0.5


def exact(parts: Tensor) -> list[Fraction]:
    return [sum(map(Fraction, column), Fraction(0)) for column in parts.T.tolist()]


@given(bound=st.floats(1e-6, 1e6))
def test_the_unit_is_the_next_power_of_two(bound: float) -> None:
    unit = power_above(bound)
    assert unit / 2 < bound <= unit
    assert Fraction(unit).numerator & (Fraction(unit).numerator - 1) == 0
    assert Fraction(unit).denominator & (Fraction(unit).denominator - 1) == 0
    assert power_above(unit) == unit


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), power=st.integers(-40, 4))
def test_rounding_is_toward_zero_by_less_than_a_step(values: list[float], power: int) -> None:
    step, given_ = 2.0**power, torch.tensor(values, dtype=torch.float64)
    rounded = toward_zero(given_, step)
    for before, after in zip(given_.tolist(), rounded.tolist(), strict=True):
        assert Fraction(after) % Fraction(step) == 0
        assert abs(after) <= abs(before)
        assert abs(Fraction(before) - Fraction(after)) < Fraction(step)
        assert before * after >= 0


@pytest.mark.parametrize("bound", [1e-6, 0.7, 1.0, 1e6])
def test_a_sum_is_that_of_the_rounded_contributions_to_the_last_bit(bound: float) -> None:
    parts = contributions(5000, 3, bound)
    wanted = exact(toward_zero(parts, power_above(bound) * FINE))
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    whole, pieces, at = (ExactSum((3,), bound) for _ in range(3))
    whole.add(parts)
    for piece in torch.split(parts[order], 7):
        pieces.add(piece)
    table = ExactSum((2, 3), bound)
    table.add_at(torch.ones(5000, dtype=torch.int64), parts[order])
    at.add_at(torch.arange(3), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(whole.value, pieces.value)
    assert torch.equal(table.value[1], whole.value)
    assert not table.value[0].any()
    # Only the last addition, of both parts, rounds.
    assert whole.value.tolist() == [float(each) for each in wanted]
    assert torch.allclose(
        whole.value, parts.sum(0), rtol=1e-12, atol=5000 * power_above(bound) * FINE
    )


def test_a_sum_of_many_contributions_as_large_as_the_bound_is_exact() -> None:
    """All bits of a double are used: 20,000 times nearly one needs fifteen more bits than one."""
    fine = torch.randint(2**43, 2**44, (20_000,), generator=torch.Generator().manual_seed(0))
    parts = fine.double()[:, None] * FINE
    wanted = float(sum(fine.tolist()) * Fraction(FINE))
    for piece in (20_000, 3):
        total = ExactSum((1,), 1.0)
        for some in torch.split(parts, piece):
            total.add(some)
        assert total.value.item() == wanted
    table = ExactSum((1, 1), 1.0)
    table.add_at(torch.zeros(20_000, dtype=torch.int64), parts)
    assert table.value.item() == wanted


@pytest.mark.parametrize("bound", [1e-6, 0.7, 1.0, 1e6])
def test_products_add_up_to_the_last_bit_in_any_order_and_company(bound: float) -> None:
    left, right = contributions(3000, 4, bound, 1), contributions(3000, 3, 1.0, 2)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(3))
    sums = [ExactSum((4, 3), bound) for _ in range(3)]
    sums[0].add_products(left, right)
    sums[1].add_products(left[order], right[order])
    for piece in torch.split(order, 11):
        sums[2].add_products(left[piece], right[piece])
    assert torch.equal(sums[0].value, sums[1].value)
    assert torch.equal(sums[0].value, sums[2].value)
    unit = power_above(bound)
    rounded = toward_zero(left, unit * COARSE)[:, :, None] * toward_zero(right, COARSE)[:, None, :]
    assert sums[0].value.flatten().tolist() == [float(each) for each in exact(rounded.flatten(1))]
    # The error relative to the real products is that of the grid: on average half a step per record
    # and factor.
    assert torch.allclose(sums[0].value, left.T @ right, rtol=0, atol=3000 * 2 * unit * COARSE)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bound=st.sampled_from([1e-6, 0.7, 1.0, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.integers(-90, 90),
)
def test_a_length_that_moves_to_the_other_factor_moves_without_rounding(
    seed: int, bound: float, dtype: torch.dtype, size: int
) -> None:
    """Rows of the right factor have lengths of their own, up to 2^size; no product of a row exceeds
    that of the factors, and the sum is that of the products, in any order and company.
    """
    generator, count = torch.Generator().manual_seed(seed), 600
    powers = 2.0 ** torch.randint(-8, 9, (count, 1), generator=generator).double() * 2.0**size
    right = (contributions(count, 3, 1.0, seed) * powers).to(dtype)
    left = contributions(count, 4, bound, seed + 1) / powers
    whole, pieces = ExactSum((4, 3), bound), ExactSum((4, 3), bound)
    whole.add_products(left, right, powers)
    order = torch.randperm(count, generator=generator)
    for piece in torch.split(order, 11):
        pieces.add_products(left[piece], right[piece], powers[piece])
    assert torch.equal(whole.value, pieces.value)
    unit = power_above(bound)
    rounded = (
        toward_zero(left * powers, unit * COARSE)[:, :, None]
        * toward_zero(right.double() / powers, COARSE)[:, None, :]
    )
    assert whole.value.flatten().tolist() == [float(each) for each in exact(rounded.flatten(1))]
    assert bool((rounded.abs() <= (left[:, :, None] * right.double()[:, None, :]).abs()).all())


def test_nothing_adds_nothing() -> None:
    empty = ExactSum((2, 3), 1.0)
    empty.add(torch.zeros(0, 2, 3, dtype=torch.float64))
    empty.add_products(
        torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.float64)
    )
    empty.add_at(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.float64))
    assert torch.equal(empty.value, torch.zeros(2, 3, dtype=torch.float64))


hostile = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 3.5, -7e5, 1e160, 1e308, math.inf, math.nan])
rows_of_a_unit = st.lists(st.tuples(hostile, hostile, hostile), min_size=1, max_size=6)
HONEST = torch.tensor([[0.6, 0.0, -0.8], [0.0, 1.0, 0.0]], dtype=torch.float64)


def added(way: str, bound: float, parts: Sequence[tuple[Tensor, Tensor]]) -> IntegerSum:
    """The sum of these rows, each with its weights, in one of the ways to add."""
    total = ExactSum((3, 3) if way == "products" else (3,), bound, most=min(bound, 1.0))
    for rows, own in parts:
        weighted = rows * own[:, None]
        if way == "rows":
            total.add(weighted, own)
        elif way == "cells":
            # As often in a cell as a hostile head names it.
            total.add_cells(rows.nan_to_num(0, 0, 0).long() % 3, own)
        elif way == "entries":
            total.add_at(torch.arange(len(rows)) % 3, weighted[:, 0], own)
        else:
            powers = None if way == "products" else torch.ones(len(rows), 1).double()
            total.add_products(weighted, rows, powers, own)
    return total.total


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_of_a_unit,
    way=st.sampled_from(["rows", "cells", "entries", "products"]),
    bound=st.sampled_from([1e-6, 1.0, 1.5, 64.0]),
    lie=st.sampled_from([1.0, 5.0, -1.0]),
)
def test_a_unit_adds_its_bound_at_most_whatever_its_rows_are(
    rows: list[tuple[float, ...]], way: str, bound: float, lie: float
) -> None:
    """Nor does it change what honest records add, of which none is shortened."""
    unit = torch.tensor(rows, dtype=torch.float64)
    weights = unit_weights(["one"] * len(rows), len(rows))
    if len(rows) == 1:
        weights = lie * weights
    others = bound * HONEST, torch.ones(2, dtype=torch.float64)
    if way == "products":
        others = math.sqrt(bound) * HONEST.clone(), others[1]
    alone, among = (
        added(way, bound, [(unit, weights)]),
        added(way, bound, [others, (unit, weights)]),
    )
    assert float(alone.value.norm()) <= bound * (1 + 1e-9)
    rest = added(way, bound, [others])
    both = replace(rest, coarse=rest.coarse + alone.coarse, fine=rest.fine + alone.fine)
    nothing = torch.zeros_like(both.fine)
    assert torch.equal(among.plus(nothing).coarse, both.plus(nothing).coarse)
    assert torch.equal(among.plus(nothing).fine, both.plus(nothing).fine)


def test_noise_for_less_than_a_unit_may_add_is_refused() -> None:
    total = ExactSum((3,), 2.0)
    total.add(HONEST)
    with pytest.raises(ValueError, match="may add 2, but the noise is for 1"):
        BoundedSum("code", total.total, 1.0)
    mechanism = NoisySums("counts", 1.0, 1e-5, {"code": 1.0}).mechanism()
    with pytest.raises(ValueError, match="may add 2, but the noise is for 1"):
        with_noise([BoundedSum("code", total.total, 2.0)], mechanism)
