"""The ends of each interval satisfy its definition, and its parts are those of plain loops."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.counting.results import UNDEFINED, auroc, rate, share_of, total

Z = NormalDist().inv_cdf(0.975)
CELLS = st.lists(st.sampled_from([-3.0, 0.0, 1.0, 6.5, 40.0, 900.0]), min_size=1, max_size=4)
NOISE = st.sampled_from([0.0, 0.5, 4.0, 60.0])


@given(CELLS, NOISE)
def test_a_total_has_the_noise_of_its_cells_and_is_never_below_zero(
    cells: list[float], variance: float
) -> None:
    found = total(torch.tensor(cells), variance)
    room = Z * math.sqrt(variance * len(cells))
    wanted = (sum(cells), sum(cells) - room, sum(cells) + room)
    assert (found.value, found.low, found.high) == pytest.approx([max(0.0, x) for x in wanted])


@settings(max_examples=200)
@given(CELLS, CELLS, NOISE)
def test_at_the_ends_of_a_rate_the_difference_is_just_what_chance_explains(
    inside: list[float], outside: list[float], variance: float
) -> None:
    found = rate(torch.tensor(inside), torch.tensor(outside), variance)
    k, m, n = len(inside), len(outside), sum(inside) + sum(outside)
    if n < max(1.0, 3 * math.sqrt(variance * (k + m))):
        assert found == UNDEFINED
        return
    counted = min(max(sum(inside), 0.0), n)

    def beyond(share: float) -> float:
        """Squared difference less what 95 of 100 runs have; a parabola of the share."""
        spread = n * share * (1 - share) + variance * (k * (1 - share) ** 2 + m * share**2)
        return (counted - share * n) ** 2 - Z**2 * spread

    a = (beyond(1) + beyond(-1)) / 2 - beyond(0)
    roots = np.roots([a, (beyond(1) - beyond(-1)) / 2, beyond(0)])
    if a <= 0 or np.iscomplex(roots).any():
        assert found == UNDEFINED
        return
    low, high = sorted(np.clip(roots.real, 0, 1).tolist())
    assert (found.value, found.low, found.high) == pytest.approx((counted / n, low, high), abs=1e-6)


BINS = st.integers(1, 5).flatmap(
    lambda bins: st.tuples(
        *2
        * [st.lists(st.sampled_from([-2.0, 0.0, 3.0, 30.0, 400.0]), min_size=bins, max_size=bins)]
    )
)


def hanley_mcneil(area: float, positives: float, negatives: float) -> float:
    """Table II of the paper, for an area that no perfect order of so few records hides."""
    edge = 1 / (2 * min(positives, negatives) + 2)
    area = max(min(max(area, edge), 1 - edge), 1 - min(max(area, edge), 1 - edge))
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    more = (positives - 1) * (first - area**2) + (negatives - 1) * (second - area**2)
    return (area * (1 - area) + max(0.0, more)) / (positives * negatives)


@settings(max_examples=200)
@given(BINS, NOISE)
def test_the_interval_of_an_auroc_has_noise_sampling_and_ties(
    histograms: tuple[list[float], list[float]], variance: float
) -> None:
    others, own = map(np.array, histograms)
    found = auroc(torch.tensor(np.stack([others, own])), variance)
    bins, negatives, positives = len(own), others.sum(), own.sum()
    if min(negatives, positives) < max(1.0, 3 * math.sqrt(variance * bins)):
        assert found == UNDEFINED
        return
    # The share of pairs in the right order, if a record of the class is in bin i and another in j.
    order = np.array([[1.0 if i > j else 0.5 if i == j else 0.0 for j in range(bins)] for i in range(bins)])  # fmt: skip
    value = own @ order @ others / (positives * negatives)
    noise = variance * ((order @ others / negatives - value) ** 2).sum() / positives**2
    noise += variance * ((own @ order / positives - value) ** 2).sum() / negatives**2
    noise += (variance / positives / negatives) ** 2 * ((order - value) ** 2).sum()
    tied = (np.maximum(own, 0) * np.maximum(others, 0)).sum() / (positives * negatives) / 2
    room = Z * math.sqrt(noise + hanley_mcneil(value, positives, negatives)) + min(tied, 0.5)
    wanted = np.clip([value, value - room, value + room], 0, 1).tolist()
    assert [found.value, found.low, found.high] == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=200)
@given(st.floats(-5, 1000), st.floats(-5, 1000), NOISE)
def test_a_share_of_counted_records_is_undefined_or_just_what_chance_explains(
    inside: float, records: float, variance: float
) -> None:
    found = share_of(inside, records, variance)
    if records < max(1.0, 3 * math.sqrt(variance)):
        assert found == UNDEFINED
        return
    counted = min(max(inside, 0.0), records)
    if found != UNDEFINED:
        for end in (found.low, found.high):
            assert end is not None
            spread = records * end * (1 - end) + variance * (1 + end**2)
            # An end outside of 0 to 1 is cut there, and is within what chance explains.
            exact = pytest.approx(Z**2 * spread, rel=1e-6, abs=1e-6)
            assert (counted - end * records) ** 2 == exact or end in (0.0, 1.0)
