"""The cap on a site's weight against numpy: no site exceeds it, and who is below keeps all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.surrogates.covariances import Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.pooling.site_weights import scaled, shares_kept

# As documented; not the constant of the code, which a fault would change with the test.
FEWEST_RECORDS = 10
COUNTS = st.integers(1, 3).flatmap(
    lambda classes: st.lists(
        st.lists(st.sampled_from([0, 1, 4, 9, 10, 30, 500]), min_size=classes, max_size=classes),
        min_size=1,
        max_size=25,
    )
)


def lower_median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.quantile(values, 0.5, method="lower"))


@settings(max_examples=150)
@given(COUNTS, st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([1.0, 2.0]))
def test_no_weight_exceeds_the_cap_and_what_is_below_it_stays(
    counts: list[list[int]], most: float, power: float
) -> None:
    table = np.array(counts, dtype=np.float64)
    shares = np.array(shares_kept(counts, most, power))
    if not most or len(counts) < 3:
        assert (shares == 1).all()
        return
    totals, largest = table.sum(1), table.max(1)
    # Where ten sites, and a quarter of them, are larger, those of a few records are not usual.
    large = totals >= FEWEST_RECORDS
    if large.sum() < 10 or large.mean() < 0.25:
        large[:] = True
    weights = []
    for sizes in (totals, largest):
        usual = max(1.0, lower_median(sizes[large]))
        weights.append((shares * sizes / usual) ** power / most)
    over = np.maximum(*weights)
    assert (over <= 1 + 1e-9).all()
    assert (shares > 0).all()
    assert (shares <= 1).all()
    # A site that is cut has just the weight of the cap.
    assert over[shares < 1] == pytest.approx(1)


@settings(max_examples=60)
@given(
    sites=st.integers(20, 100),
    informed=st.floats(0.5, 0.9),
    classes=st.integers(1, 12),
    sigma=st.floats(5, 60),
    seed=st.integers(0, 10_000),
)
def test_sites_whose_counts_are_noise_do_not_say_what_is_usual(
    sites: int, informed: float, classes: int, sigma: float, seed: int
) -> None:
    """Most sites have nothing but noise, and the others as many records as each other."""
    random = np.random.default_rng(seed)
    large = max(10, math.ceil(informed / 2 * sites))
    table = np.zeros((sites, classes))
    table[:large, 0] = 100 * sigma * classes
    noisy = np.maximum(0, table + sigma * random.normal(size=table.shape))
    shares = np.array(shares_kept(noisy.tolist(), 3.0, 2.0, sigma))
    assert (shares == 1).all()
    # Who claims more than these keeps the weight of three of them, as ever.
    noisy[0] *= 100
    shares = np.array(shares_kept(noisy.tolist(), 3.0, 2.0, sigma))
    weights = (shares * noisy.sum(1)) ** 2
    assert weights[0] <= 3.01 * np.median(weights[1:large]) * 1.1
    assert (shares[1:] == 1).all()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=4), st.floats(0.001, 1.5))
def test_a_scaled_mixture_has_its_share_of_records_and_all_else(
    counts: list[int], share: float
) -> None:
    many = len(counts)
    table = Mixtures(
        torch.tensor(counts), torch.arange(many), torch.ones(many), torch.randn(many, 2),
        Spherical(torch.ones(many)),
    )  # fmt: skip
    sent = Surrogate(Header("fedpft", "r", "s", "f", tuple("abcd"[:many])), table)
    found = scaled(sent, share)
    assert isinstance(found, Surrogate)
    wanted = [count if share >= 1 else max(1, round(count * share)) for count in counts]
    assert found.mixtures.counts.tolist() == wanted
    for name in ("labels", "weights", "means", "covariance"):
        assert getattr(found.mixtures, name) is getattr(table, name)
    assert found.header == sent.header
