"""The spread of a site's records, by which its weight is capped, is that of the records themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.strategy import _spread, cap_spreads


def sums_of(features: torch.Tensor, labels: torch.Tensor, site: str) -> Parameters:
    """Counts and sums of two classes, and the second moment around the class means."""
    counts = torch.bincount(labels, minlength=2).double()
    sums = torch.zeros(2, features.shape[1], dtype=torch.float64).index_add_(0, labels, features)
    apart = features - (sums / counts[:, None])[labels]
    upper = torch.triu_indices(features.shape[1], features.shape[1])
    tensors = {"counts": counts, "sums": sums, "squares": (apart.T @ apart)[upper[0], upper[1]]}
    header = Header("afl", "run", site, "f", ("a", "b"))
    return Parameters(header, round=0, tensors=tensors, records=len(labels))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    records=st.lists(st.integers(2, 9), min_size=4, max_size=7),
    size=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_a_spread_is_the_sum_of_squared_distances_and_sites_keep_the_limit_over_it(
    seed: int, records: list[int], size: float
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    centre = torch.randn(3, generator=drawn).double()
    sites, wanted = [], []
    for number, count in enumerate(records):
        wide = size if number == 0 else 1.0
        features = wide * torch.randn(2 * count, 3, generator=drawn).double()
        sites.append(sums_of(features, torch.arange(2 * count) % 2, f"s{number}"))
        wanted.append(float((features - centre).square().sum()))
    spreads = torch.stack([_spread(each, centre) for each in sites])
    assert spreads.tolist() == pytest.approx(wanted)
    shares: dict[str, float] = {}
    cap_spreads(sites, spreads, 2.0, shares)
    limit = 2.0 * float(torch.tensor(wanted, dtype=torch.float64).median())
    for site, own in zip(sites, wanted, strict=True):
        kept = shares.get(site.header.site, 1.0) * own
        assert kept == pytest.approx(min(own, limit))
