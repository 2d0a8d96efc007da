"""Sixteen-bit tensors: invalid numbers are refused with the name of the table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogate_pb2 import Halves
from fedsurrogate.common.wire.tensors import pack, unpack


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float, logarithm: bool) -> None:
    halves = pack(torch.tensor([1.0, 2.0]), logarithm=logarithm)
    halves.scale = scale
    with pytest.raises(
        SurrogateError, match=f"means with scale {scale}; a positive number is needed"
    ):
        unpack(halves, "means", (2,))
    # Zeros too, because a product with zero shows nothing.
    empty = Halves(shape=[2], scale=scale, logarithm=logarithm, data=bytes(4))
    with pytest.raises(SurrogateError, match="a positive number is needed"):
        unpack(empty, "means", (2,))


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5))
def test_what_is_packed_comes_back_or_is_refused_but_never_as_something_else(
    values: list[float],
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    try:
        found = unpack(pack(tensor), "means", (len(values),)).double()
    except SurrogateError:
        assert not tensor.isfinite().all() or float(tensor.abs().max()) > 3.4e38
        return
    # Numbers below the range of single precision are zero.
    assert torch.allclose(found, tensor, rtol=1e-3, atol=1e-3 * float(tensor.abs().max()) + 1e-37)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_the_magnitude_costs_no_digits(magnitude: float) -> None:
    values = torch.tensor([1.0, -0.5, 0.25, 0.001], dtype=torch.float64)
    for logarithm in (False, True):
        raw = values.abs() if logarithm else values
        found = unpack(pack(raw * magnitude, logarithm=logarithm), "x", (4,)).double() / magnitude
        assert torch.allclose(found, raw, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1,), (0,), (0, 2), (2, 0)])
def test_another_shape_or_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SurrogateError, match="shape"):
        unpack(pack(torch.ones(2)), "means", shape)
    halves = pack(torch.ones(2))
    halves.data = halves.data[:-1]
    with pytest.raises(SurrogateError, match="3 bytes do not fill"):
        unpack(halves, "means", (2,))


@given(base=st.floats(-300, 30), values=st.lists(st.floats(1, 1e6), min_size=1, max_size=5))
def test_variances_that_are_positive_are_never_refused_however_small(
    base: float, values: list[float]
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64) * 10**base
    found = unpack(pack(tensor, logarithm=True), "variances", (len(values),)).double()
    assert found.isfinite().all()
    # Logarithms have 11 bits; numbers below the range of single precision are zero.
    assert torch.allclose(found, tensor, rtol=0.02, atol=1e-37)


def test_one_number_among_many_zeros_comes_back() -> None:
    values = torch.zeros(200_000)
    values[7] = 3.0
    assert torch.equal(unpack(pack(values), "values", (200_000,)), values)
