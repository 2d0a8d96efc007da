"""The Gaussian mechanism: shares divide the budget, and sensitivity is bounded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import (
    BoundedSum,
    Noisy,
    clip,
    unit_weights,
    with_noise,
)
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import fold, unfold


def test_signal_to_noise_is_estimated_from_the_release_alone() -> None:
    signal = torch.full((100_000,), 3.0)
    noisy = BoundedSum("a", IntegerSum.of(signal, 1.0), 1.0).noisy(2.0)
    assert noisy.signal_to_noise() == pytest.approx(1.5, rel=0.02)
    assert Noisy("a", torch.zeros(5), 2.0, 1.0).signal_to_noise() == 0
    for sigma in (0.5, 3.0):
        exact = Noisy("a", torch.full((5,), 4.0), sigma, 1.0)
        assert exact.signal_to_noise() == pytest.approx(math.sqrt((4.0 / sigma) ** 2 - 1))


def test_a_symmetric_matrix_keeps_its_length_as_a_vector() -> None:
    matrix = torch.randn(7, 7, dtype=torch.float64)
    matrix = matrix + matrix.T
    assert float(fold(matrix).norm()) == pytest.approx(float(matrix.norm()))
    assert torch.allclose(unfold(fold(matrix), 7), matrix)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32), min_size=3, max_size=3), st.floats(0, 1e6))
def test_whatever_the_features_clipped_ones_are_never_longer_than_one(
    values: list[float], norm: float
) -> None:
    for dtype in (torch.float32, torch.float64):
        clipped, _ = clip(torch.tensor([values], dtype=dtype), norm)
        assert float(clipped.double().norm()) <= 1
        assert clipped.isfinite().all()


def test_the_clip_tells_which_share_it_shortened() -> None:
    features = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped, fraction = clip(features, 1.0)
    assert fraction == pytest.approx(1 / 3)
    assert torch.allclose(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]), atol=1e-5)
    assert torch.allclose(
        clip(features, 0.0)[0].norm(dim=1), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5
    )


def test_a_patient_weighs_one_however_many_records_there_are() -> None:
    weights = unit_weights(["a", "b", "a", "a"], 4)
    assert torch.allclose(weights, torch.tensor([1 / 3, 1, 1 / 3, 1 / 3], dtype=torch.float64))
    assert unit_weights(None, 2).tolist() == [1, 1]
    assert unit_weights([], 0).tolist() == []


@settings(max_examples=40, deadline=None)
@given(
    sigma=st.floats(1e-3, 1e3),
    bound=st.sampled_from([0.5, 1.0, 3.0]),
    rounding=st.none() | st.floats(0, 2),
    pairs=st.booleans(),
)
def test_the_variance_in_steps_covers_sigma_roundings_and_discreteness(
    sigma: float, bound: float, rounding: float | None, pairs: bool
) -> None:
    total = IntegerSum.of(torch.zeros(4), bound)
    twice = torch.tensor([False, True, True, False]) if pairs else None
    drawn: list[tuple[int, int]] = []

    def draw(variance: int, count: int) -> Tensor:
        drawn.append((variance, count))
        return torch.ones(count, dtype=torch.int64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian_mechanism, "_drawn", draw)
        own = BoundedSum("a", total, bound, twice)
        noisy = own.noisy(sigma) if rounding is None else own.noisy(sigma, rounding)
    steps = sigma / total.step * (1 + (rounding or 0.0) / bound)
    parts = [(1, 2), (2, 2)] if pairs else [(1, 4)]
    assert [count for _, count in drawn] == [count for _, count in parts]
    for (variance, _), (of, _) in zip(drawn, parts, strict=True):
        assert variance == pytest.approx(steps**2 / of + 32, rel=3e-8, abs=1.0)
        assert variance >= steps**2 / of * (1 + 1e-8)
    scale = math.sqrt(2) if pairs else 1.0
    assert noisy.value.tolist() == pytest.approx(
        [total.step, scale * total.step, scale * total.step, total.step]
    )
    assert (noisy.name, noisy.sigma, noisy.sensitivity) == ("a", sigma, bound)


@pytest.mark.parametrize(
    ("kind", "less"),
    [
        (torch.float16, 2 * 2.0**-10),
        (torch.bfloat16, 2 * 2.0**-7),
        (torch.float32, 1e-6),
        (torch.float64, 1e-6),
    ],
)
def test_a_clip_leaves_room_for_the_rounding_of_its_numbers(kind: torch.dtype, less: float) -> None:
    clipped, share = clip(torch.tensor([[3.0], [-0.25]], dtype=kind), 0.0)
    assert clipped.dtype == kind
    assert clipped.double().abs().flatten().tolist() == pytest.approx([1 - less] * 2, abs=1e-7)
    assert share == 1


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "c"), ()])
def test_noise_is_added_to_the_sums_that_a_mechanism_names(names: tuple[str, ...]) -> None:
    claim = Mechanism("x", 1.0, 1e-5, "record", 1.0, 0.0, {"b": (2.0, 1.0), "a": (3.0, 1.0)})

    def sums(chosen: tuple[str, ...]) -> list[BoundedSum]:
        return [BoundedSum(name, IntegerSum.of(torch.ones(2), bound=1.0), 1.0) for name in chosen]

    found = with_noise(sums(("a", "b")), claim)
    assert [(each.name, each.sigma) for each in found] == [("b", 2.0), ("a", 3.0)]
    with pytest.raises(ConfigError) as refusal:
        with_noise(sums(names), claim)
    assert str(refusal.value) == f"sums {', '.join(names)}; the mechanism has noise for b, a"
