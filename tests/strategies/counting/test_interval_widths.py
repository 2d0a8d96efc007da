"""Intervals are as wide as the spread that they state, neither narrower nor wider: against noise
that is drawn, and against the inequalities that they solve.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.strategies.counting.results import UNDEFINED, Z, auroc, rate

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


@pytest.mark.parametrize(("most", "defined"), [(12.0, True), (11.9, False)])
def test_a_rate_and_an_auroc_need_three_deviations_of_noise(most: float, defined: bool) -> None:
    """Four cells with noise of variance 4: their sum has a deviation of 4."""
    cells = torch.tensor([most / 2, 0.0], dtype=torch.float64)
    assert (rate(cells, cells, 4.0) != UNDEFINED) == defined
    own = torch.tensor([most / 4] * 4, dtype=torch.float64)
    for pair in ([own, 10 * own], [10 * own, own]):
        assert (auroc(torch.stack(pair), 4.0) != UNDEFINED) == defined
