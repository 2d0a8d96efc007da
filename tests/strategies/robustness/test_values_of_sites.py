"""Values of sites by their definition over all orders, for any measure; drawn orders are near them and
say how near.
"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.robustness.site_values import Measure, site_values


def measure_of(seed: int, asked: list[frozenset[str]] | None = None) -> Measure:
    """A number for each subset, that has nothing to do with those of its parts."""
    known: dict[frozenset[str], float] = {}

    def measure(some: frozenset[str]) -> float:
        if asked is not None:
            asked.append(some)
        text = "".join(sorted(some))
        return known.setdefault(some, np.random.default_rng([seed, *map(ord, text)]).normal())

    return measure


@settings(max_examples=30, deadline=None)
@given(
    st.permutations("abcde").flatmap(lambda s: st.integers(1, 5).map(lambda n: s[:n])),
    st.integers(0, 99),
)
def test_values_are_the_mean_gains_over_all_orders(sites: list[str], seed: int) -> None:
    asked: list[frozenset[str]] = []
    found = site_values(sites, measure_of(seed, asked))
    assert len(asked) == len(set(asked)) == 2 ** len(sites)
    measure = measure_of(seed)
    assert [each.site for each in found] == sites
    for value in found:
        gains = []
        for order in permutations(sites):
            before = frozenset(order[: order.index(value.site)])
            gains.append(measure(before | {value.site}) - measure(before))
        assert value.shapley == pytest.approx(np.mean(gains), abs=1e-12)
        everyone = frozenset(sites)
        alone = measure(everyone) - measure(everyone - {value.site})
        assert value.leave_one_out == pytest.approx(alone)
        assert value.error == 0.0


@pytest.mark.parametrize("count", [10, 11])
def test_more_than_ten_sites_have_values_of_drawn_orders_with_their_error(count: int) -> None:
    sites = [f"s{k}" for k in range(count)]
    weights = {site: 1.0 + k for k, site in enumerate(sites)}
    asked: list[frozenset[str]] = []

    def measure(some: frozenset[str]) -> float:
        asked.append(some)
        return math.sqrt(sum(weights[site] for site in some))

    found = site_values(sites, measure, seed=5, orders=7)
    assert (len(asked) == 2**count) == (count == 10)
    gains: dict[str, list[float]] = {site: [] for site in sites}
    generator = torch.Generator().manual_seed(5)
    for _ in range(7):
        so_far = 0.0
        for place in torch.randperm(count, generator=generator).tolist():
            before, so_far = so_far, so_far + weights[sites[place]]
            gains[sites[place]].append(math.sqrt(so_far) - math.sqrt(before))
    for value in found:
        own = np.array(gains[value.site])
        if count == 10:
            assert value.error == 0.0
            continue
        assert value.shapley == pytest.approx(own.mean())
        assert value.error == pytest.approx(own.std(ddof=1) / math.sqrt(7))
    total = math.sqrt(sum(weights.values()))
    assert sum(value.shapley or 0.0 for value in found) == pytest.approx(total)
