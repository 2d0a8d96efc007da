"""Sixteen-bit tensors, whole covariances in them, and loadings at 8 bits: what travels, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogate_pb2 import Halves
from fedsurrogate.common.surrogates.covariances import Gram
from fedsurrogate.common.surrogates.mixtures import Mixtures, MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.common.wire.tensors import (
    Expectation,
    check_surrogate,
    pack,
    pack_levels,
    unpack,
    unpack_levels,
)

HEADER = Header("fedpft", "run", "site", "backbone", ("a", "b"))


def made(family, n=200, d=30, scale=1.0, **settings):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator) @ torch.randn(d, d, generator=generator) * scale
    labels = torch.arange(n) % 2
    return Surrogate(HEADER, fit(x, labels, 2, MixtureSettings(family, **settings), generator))


def check(surrogate, family="gram", rank=16):
    check_surrogate(surrogate, Expectation("fedpft", "run", family, 1, rank))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e3])
@pytest.mark.parametrize("n", [3, 20, 200])
def test_a_whole_covariance_is_exact_to_half_precision_at_any_scale(n, scale):
    sent = made("gram", n, scale=scale)
    found = unpack_surrogate(pack_surrogate(sent))
    check(found)
    before, after = sent.mixtures.covariance.matrix, found.mixtures.covariance.matrix
    limit = 2**-10 * before.diagonal().sqrt()[:, None] * before.diagonal().sqrt()
    assert ((before - after).abs() <= limit).all()


def test_entries_of_very_different_dimensions_do_not_underflow():
    factors = torch.logspace(-10, 4, 30)
    sent = made("gram")
    matrix = sent.mixtures.covariance.matrix * factors * factors[:, None]
    wide = Surrogate(HEADER, Mixtures(*list(vars(sent.mixtures).values())[:4], Gram(matrix)))
    after = unpack_surrogate(pack_surrogate(wide)).mixtures.covariance.matrix
    variance = matrix.diagonal().mean()
    kept = matrix.diagonal() > 1e-9 * variance
    torch.testing.assert_close(after[kept][:, kept], matrix[kept][:, kept], rtol=3e-3, atol=0.0)


@pytest.mark.parametrize("shape", [(30, 4), (31, 3), (1, 1)])
def test_levels_are_within_half_a_step(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = unpack_levels(pack_levels(matrix), shape)
    reach = matrix.abs().amax(0)
    assert ((found - matrix).abs() <= 1.002 * reach / 127 / 2 + 1e-3 * reach).all()


@pytest.mark.parametrize("bits", [16, 8])
def test_fewer_bits_keep_the_variance_of_every_dimension_and_take_fewer_bytes(bits):
    sent = made("lowrank", d=200, rank=16)
    payload = pack_surrogate(sent, bits)
    found = unpack_surrogate(payload)
    check(found, "lowrank")
    before, after = (each.mixtures.covariance.variances_per_dimension() for each in (sent, found))
    assert ((after - before).abs() <= 0.02 * before).float().mean() > 0.95
    assert len(payload) < 200 * 16 * bits / 8 + 200 * 2 * 3 + 300


@pytest.mark.parametrize("n", [2, 3, 5, 12, 40, 1000])
def test_honest_matrices_pass_for_any_number_of_records(n):
    for seed in range(5):
        x = torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)).clamp_min(0) ** 2
        x[:, :9] = 0
        table = fit(x, torch.arange(n) % 2, 2, MixtureSettings("gram"), torch.Generator())
        check(unpack_surrogate(pack_surrogate(Surrogate(HEADER, table))))


def broken(change, bits=8):
    message = pb.Surrogate()
    message.ParseFromString(pack_surrogate(made("lowrank", rank=4), bits))
    change(message.mixtures)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.levels, "bits", 4), "loadings of 4 bits; 8 are allowed"),
        (lambda m: setattr(m.levels, "data", b"x"), "in 1 bytes"),
        (lambda m: m.levels.shape.append(1), "loadings of shape"),
        (
            lambda m: setattr(m.levels.scales, "logarithm", False),
            "scales of loadings must travel as logarithms",
        ),
        (lambda m: m.levels.shape.__setitem__(1, 2**30), "in 120 bytes"),
    ],
)
def test_broken_levels_are_refused_with_a_reason(change, reason):
    with pytest.raises(SurrogateError, match=reason):
        unpack_surrogate(broken(change))


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
