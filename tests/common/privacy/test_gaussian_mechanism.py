"""The Gaussian mechanism: shares divide the budget, and sensitivity is bounded."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.methods.fedpft.surrogate import Clipped
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import (
    BoundedSum,
    Noisy,
    clip,
    unit_weights,
)
from fedsurrogate.common.privacy.shares import budget_shares
from fedsurrogate.common.surrogates.class_sums import fold, statistics, unfold

FAMILIES = ("spherical", "diag", "full", "lowrank")


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_a_noisy_statistic_has_the_entries_of_the_exact_one_also_if_it_has_none(
    shape: list[int],
) -> None:
    noisy = BoundedSum("a", IntegerSum.of(torch.zeros(shape), 1.0), 1.0).noisy(3.0)
    assert list(noisy.value.shape) == shape
    assert torch.isfinite(noisy.value).all()


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.7, 100.0])
@pytest.mark.parametrize("family", [*FAMILIES, "distributed"])
def test_shares_of_every_family_sum_to_one(family: str, noise: float) -> None:
    shares = budget_shares(family, noise)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0


def test_second_moments_get_half_of_a_large_budget_little_of_a_small_one_and_counts_least() -> None:
    for epsilon, low, high in (
        (0.5, 0.0, 0.05),
        (1.0, 0.05, 0.15),
        (8.0, 0.45, 0.55),
        (1e4, 0.5, 0.56),
    ):
        shares = budget_shares("full", gaussian_noise_multiplier(epsilon, 1e-5))
        assert low < shares["squares"] < high
        assert shares["counts"] < 0.1 * shares["sums"]
    assert budget_shares("spherical", 1.0).keys() == {"counts", "sums"}


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


def _sums(
    features: Tensor, labels: Tensor, units: Sequence[str] | None, family: str
) -> dict[str, Tensor]:
    data = Clipped.of(features, labels, units)
    return {
        each.name: each.value
        for each in statistics(data.features, data.labels, data.weights, 3, family)
    }


def _worst(family: str, units: bool) -> dict[str, float]:
    """The largest change from adding one unit, for each statistic and for all together, over
    adversarial attempts.
    """
    generator = torch.Generator().manual_seed(1)
    worst: dict[str, float] = {}
    for attempt in range(300):
        n, own, d = 5, 1 + attempt % 4 if units else 1, 4
        scale = 10.0 ** torch.randint(-6, 7, (n + own, 1), generator=generator)
        features = torch.randn(n + own, d, generator=generator) * scale
        labels = torch.randint(0, 3, (n + own,), generator=generator)
        if attempt % 3 == 0:
            # All records of the added unit are equal and along one axis: this gives the longest
            # squares.
            features[n:], labels[n:] = torch.eye(d)[attempt % d] * scale[n:], attempt % 3
        if attempt % 7 == 0:
            features[n:] = 0
        names = [*"abcde", *("p" * own)] if units else None
        more = _sums(features, labels, names, family)
        less = _sums(features[:n], labels[:n], names[:n] if names else None, family)
        moved = {name: float((more[name] - less[name]).norm()) for name in more}
        shares = budget_shares(family, 1.0)
        moved["together"] = math.sqrt(sum(shares[name] * moved[name] ** 2 for name in shares))
        worst = {name: max(moved[name], worst.get(name, 0.0)) for name in moved}
    return worst


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_unit_moves_each_sum_by_at_most_its_bound_and_comes_close(
    family: str, units: bool
) -> None:
    worst = _worst(family, units)
    assert worst.keys() >= {"counts", "sums", "together"}
    for name, moved in worst.items():
        assert 0.95 < moved <= 1 + 1e-9, name


@pytest.mark.parametrize("n", [20, 100])
def test_theorem_4_1_moves_by_what_its_claim_is_reckoned_with(n: int) -> None:
    """The mean moves 2 / n, the covariance 4 / n, both together 2 sqrt(5) / n (removing one of n
    records of a class).
    """
    generator = torch.Generator().manual_seed(0)
    worst = dict.fromkeys(("mean", "covariance", "together"), 0.0)
    for attempt in range(200):
        others = clip(torch.randn(n - 1, 4, generator=generator, dtype=torch.float64), 0.0)[0]
        one = (
            others[:1]
            if attempt % 2
            else clip(torch.randn(1, 4, generator=generator, dtype=torch.float64), 0.0)[0]
        )
        if attempt % 4 == 0:
            others, one = (
                torch.eye(4, dtype=torch.float64)[:1].expand(n - 1, 4),
                -torch.eye(4, dtype=torch.float64)[:1],
            )
        every = torch.cat([others, one])
        mean = float((every.mean(0) - others.mean(0)).norm())
        covariance = float(
            (torch.cov(every.T, correction=0) - torch.cov(others.T, correction=0)).norm()
        )
        moved = {"mean": mean, "covariance": covariance, "together": math.hypot(mean, covariance)}
        worst = {name: max(worst[name], moved[name]) for name in moved}
    for name, bound in (("mean", 2 / n), ("covariance", 4 / n), ("together", 2 * 5**0.5 / n)):
        assert 0.95 * bound * (n - 1) / n < worst[name] <= bound * (1 + 1e-9), name


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
