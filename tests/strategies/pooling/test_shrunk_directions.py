"""Differences of class means along the mean over columns and along the length, beside all others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.privacy.gaussian_mechanism import public_signs
from fedsurrogate.common.privacy.shares import KEPT
from fedsurrogate.strategies.pooling.class_means import Components, shrink_directions

COLUMNS, RECORDS, NOISE = 512, 1500.0, 2e-5


def components(seed: int, line: torch.Tensor, size: float) -> Components:
    """Two classes: a weak difference across all columns, and along one line one of a size in standard
    deviations of chance.
    """
    drawn = torch.Generator().manual_seed(seed)
    across = torch.randn(COLUMNS, generator=drawn, dtype=torch.float64)
    lines = torch.stack([torch.ones(COLUMNS).double() / COLUMNS**0.5, public_signs(COLUMNS)])
    across -= lines.T @ (lines @ across)
    records = torch.tensor([RECORDS, RECORDS], dtype=torch.float64)
    # The noise of privacy and that of records of norm one, of a difference of two means.
    deviation = (2 * (NOISE + 1 / COLUMNS / RECORDS)) ** 0.5
    apart = 1.05 * deviation * across + size * deviation * line
    noise = NOISE * torch.eye(2, dtype=torch.float64)
    means = torch.stack([apart, -apart]) / 2
    return Components(("a", "b"), torch.arange(2), means, noise, records, records / 2 / RECORDS)


@pytest.mark.parametrize("line", ["mean", "length"])
@given(seed=st.integers(0, 999), size=st.floats(-3, 3))
@settings(max_examples=25, deadline=None)
def test_what_may_be_chance_along_a_line_shrinks_no_other_difference(
    line: str, seed: int, size: float
) -> None:
    way = torch.ones(COLUMNS).double() / COLUMNS**0.5 if line == "mean" else public_signs(COLUMNS)
    own = components(seed, way, size)
    found = shrink_directions(own, KEPT)
    across = own.means - (own.means @ way).outer(way)
    assert torch.allclose(found.means - (found.means @ way).outer(way), across, atol=1e-12)


@given(seed=st.integers(0, 999), size=st.floats(20, 60), sign=st.sampled_from([-1, 1]))
@settings(max_examples=25, deadline=None)
def test_a_clear_difference_along_a_line_stands_alone_where_the_others_are_chance(
    seed: int, size: float, sign: int
) -> None:
    way = public_signs(COLUMNS)
    own = components(seed, way, sign * size)
    found = shrink_directions(own, KEPT)
    along = (found.means @ way).outer(way)
    assert torch.allclose(along, (own.means @ way).outer(way), atol=1e-12)
    left = (found.means - along).norm() / (own.means - along).norm()
    assert left < 0.5


def test_one_class_alone_stays_as_it_is() -> None:
    one = torch.ones(1, dtype=torch.float64)
    own = Components(("a",), torch.zeros(1).long(), torch.ones(1, 64).double(), one[None], one, one)
    assert shrink_directions(own, KEPT) is own
