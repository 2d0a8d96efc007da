"""Intervals are as wide as the spread that they state, neither narrower nor wider: against noise
that is drawn, and against the inequalities that they solve.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.strategies.counting.intervals import UNDEFINED, Z, auroc, rate, total

CELLS = st.lists(st.integers(60, 400), min_size=3, max_size=8)


def areas(histograms: Tensor) -> Tensor:
    """AUROC of many pairs of histograms (n, 2, B), ties counted half."""
    others, own = histograms[:, 0], histograms[:, 1]
    below = others.cumsum(1) - others / 2
    return (own * below).sum(1) / others.sum(1) / own.sum(1)


@settings(max_examples=15)
@given(
    cells=CELLS, other=st.randoms(use_true_random=False), sigma=st.sampled_from([2.0, 5.0, 12.0])
)
def test_the_noise_in_an_auroc_is_that_of_drawn_noise(
    cells: list[int], other: object, sigma: float
) -> None:
    shuffled = list(cells)
    other.shuffle(shuffled)  # type: ignore[attr-defined]
    histograms = torch.tensor([cells, shuffled], dtype=torch.float64)
    exact, noisy = auroc(histograms, 0.0), auroc(histograms, sigma**2)
    assert exact.value is not None
    assert exact.low is not None
    assert noisy.low is not None
    assert exact.value == noisy.value == pytest.approx(float(areas(histograms[None])[0]))
    negatives, positives = histograms.sum(1).tolist()
    tied = float((histograms[0] * histograms[1]).sum()) / positives / negatives / 2
    sampling = ((exact.value - exact.low - tied) / Z) ** 2
    stated = ((noisy.value - noisy.low - tied) / Z) ** 2 - sampling
    drawn = torch.randn(
        20_000, 2, len(cells), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    spread = float(areas(histograms + sigma * drawn).var())
    assert stated == pytest.approx(spread, rel=0.1)


@settings(max_examples=15)
@given(cells=CELLS, seed=st.integers(0, 99))
def test_the_sampling_in_an_auroc_is_near_that_of_drawn_records(
    cells: list[int], seed: int
) -> None:
    """Hanley and McNeil's variance is that of one form of scores; of others it is near."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.tensor(cells, dtype=torch.float64)
    others = own[torch.randperm(len(cells), generator=generator)]
    exact = auroc(torch.stack([others, own]), 0.0)
    assert exact.value is not None
    assert exact.high is not None
    tied = float((own * others).sum() / own.sum() / others.sum()) / 2
    stated = ((exact.high - exact.value - tied) / Z) ** 2
    count = int(own.sum())
    drawn = torch.stack(
        [
            torch.stack([
                torch.bincount(
                    torch.multinomial(each, count, replacement=True, generator=generator), minlength=len(cells)
                )
                for each in (others, own)
            ])
            for _ in range(300)
        ]
    )  # fmt: skip
    assert 1 / 3 < stated / float(areas(drawn.double()).var()) < 3


@settings(max_examples=100)
@given(
    inside=st.lists(st.floats(-20, 500), min_size=1, max_size=5),
    outside=st.lists(st.floats(-20, 500), min_size=1, max_size=5),
    variance=st.sampled_from([0.0, 0.5, 4.0, 25.0, 400.0]),
)
def test_the_limits_of_a_rate_solve_its_inequality(
    inside: list[float], outside: list[float], variance: float
) -> None:
    found = rate(torch.tensor(inside), torch.tensor(outside), variance)
    everything = sum(inside) + sum(outside)
    k, m = len(inside), len(outside)
    if found == UNDEFINED:
        # Too few records, or the noise hides whether the share is bounded at all.
        few = everything < max(1.0, 3 * math.sqrt(variance * (k + m))) + 1e-3
        assert few or everything**2 + Z**2 * (everything - variance * (k + m)) < 1e-3
        return
    assert found.low is not None
    assert found.value is not None
    assert found.high is not None
    assert everything > max(1.0, 3 * math.sqrt(variance * (k + m))) - 1e-3
    counted = min(max(sum(inside), 0.0), everything)
    assert found.value == pytest.approx(counted / everything, abs=1e-5)
    assert 0 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= 1

    def beyond(s: float) -> float:
        spread = everything * s * (1 - s) + variance * (k * (1 - s) ** 2 + m * s**2)
        return (counted - s * everything) ** 2 - Z**2 * spread

    for limit in (found.low, found.high):
        if 0 < limit < 1:
            assert abs(beyond(limit)) < 1e-3 * everything**2
    assert beyond(found.value) <= 1e-3 * everything
    if found.low > 0.01:
        assert beyond(found.low - 0.01) > 0
    if found.high < 0.99:
        assert beyond(found.high + 0.01) > 0


@pytest.mark.parametrize(("most", "defined"), [(12.0, True), (11.9, False)])
def test_a_rate_and_an_auroc_need_three_deviations_of_noise(most: float, defined: bool) -> None:
    """Four cells with noise of variance 4: their sum has a deviation of 4."""
    cells = torch.tensor([most / 2, 0.0], dtype=torch.float64)
    assert (rate(cells, cells, 4.0) != UNDEFINED) == defined
    own = torch.tensor([most / 4] * 4, dtype=torch.float64)
    for pair in ([own, 10 * own], [10 * own, own]):
        assert (auroc(torch.stack(pair), 4.0) != UNDEFINED) == defined


@given(st.integers(1, 9), st.floats(0, 100), st.floats(-50, 50))
@settings(max_examples=30)
def test_a_total_is_as_wide_as_the_noise_of_its_cells(
    cells: int, variance: float, value: float
) -> None:
    found = total(torch.full((cells,), value, dtype=torch.float64), variance)
    assert found.value == pytest.approx(cells * value)
    assert found.low is not None
    assert found.high is not None
    half = 1.959963984540054 * math.sqrt(cells * variance)
    assert found.high - found.low == pytest.approx(2 * half, abs=1e-9)
    assert found.high + found.low == pytest.approx(2 * cells * value, abs=1e-9)
