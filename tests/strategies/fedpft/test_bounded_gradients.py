"""The bound on what a site's gradients change: what it keeps, and what a false site can do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.fedpft.logistic_rounds import Given, within_bounds


def honest(seed: int, count: int, spread: float, noise: float, rounds: int) -> dict[str, Given]:
    """Sites whose gradients differ by so much in each round, with noise."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(3, 20, generator=generator).double()
    found = {}
    for k in range(count):
        own = common + spread * torch.randn(3, 20, generator=generator).double()
        drawn = noise * math.sqrt(rounds) * torch.randn(3, 20, generator=generator).double()
        found[f"s{k}"] = Given(rounds * own + drawn, torch.zeros(3, 20).double(), rounds, noise)
    return found


@given(
    st.integers(0, 10**6),
    st.integers(3, 12),
    st.sampled_from([0.0, 0.1, 1.0, 2.0]),
    st.floats(1e-3, 3),
    st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_honest_sites_keep_most_and_noise_alone_bounds_nobody(
    seed: int, count: int, spread: float, noise: float, rounds: int
) -> None:
    found = within_bounds(honest(seed, count, spread, noise, rounds))
    kept = [share for _, share in found.values()]
    # Half of them are at most as far as the median one.
    assert sum(share > 1 - 1e-9 for share in kept) >= (count + 1) // 2
    assert min(kept) > 0.3
    if not spread:
        assert min(kept) > 1 - 1e-9


@given(
    st.integers(0, 10**6),
    st.integers(4, 12),
    st.floats(0.1, 2),
    st.sampled_from([0.0, 0.5]),
    st.floats(1, 1e9),
)
@settings(max_examples=40, deadline=None)
def test_a_false_site_moves_the_sum_by_a_length_that_it_cannot_choose(
    seed: int, count: int, spread: float, noise: float, length: float
) -> None:
    rounds = 9
    others = honest(seed, count, spread, noise, rounds)
    false = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed + 1)).double()
    sent = Given(length * false * rounds, torch.zeros(3, 20).double(), rounds, noise)
    part, _ = within_bounds(others | {"x": sent})["x"]
    means = torch.stack([each.total / rounds for each in others.values()])
    centre = means.median(0).values
    farthest = float((means - centre).flatten(1).norm(dim=1).max())
    room = noise / math.sqrt(rounds) * (math.sqrt(60) + 6)
    # The centre itself is among the others' coordinates.
    slack = float((means.max(0).values - means.min(0).values).norm())
    assert float((part / rounds - centre).norm()) <= math.hypot(farthest, room) + 2 * slack
    assert part.isfinite().all()


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_what_was_taken_too_much_in_one_round_is_taken_back_in_the_next(
    seed: int, count: int, rounds: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = {f"s{k}": torch.zeros(2, 3).double() for k in range(count)}
    used = {name: torch.zeros(2, 3).double() for name in total}
    for number in range(1, rounds + 1):
        total = {n: t + torch.randn(2, 3, generator=generator) for n, t in total.items()}
        sites = {n: Given(total[n], used[n], number, 0.1) for n in total}
        parts = within_bounds(sites)
        used = {n: used[n] + parts[n][0] for n in total}
    # As if each site had sent its bounded mean in every round.
    fresh = {n: Given(total[n], torch.zeros(2, 3).double(), rounds, 0.1) for n in total}
    for name, (part, share) in within_bounds(fresh).items():
        torch.testing.assert_close(used[name], part)
        if share == 1 or count < 3:
            torch.testing.assert_close(used[name], total[name])


@pytest.mark.parametrize("count", [1, 2])
def test_of_fewer_than_three_sites_all_counts(count: int) -> None:
    sites = {str(k): Given(torch.full((2,), 1e6 * k), torch.ones(2), 2, 0.0) for k in range(count)}
    for name, (part, share) in within_bounds(sites).items():
        assert share == 1
        assert torch.equal(part, sites[name].total - 1)
