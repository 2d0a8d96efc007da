"""Limits on what one site of FedLAP decides, over generated radii, lengths and rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.strategies.fedlap import (
    FAR_BELOW,
    LONGEST,
    REMEMBERED,
    _remembered,
    common_radius,
    limited_radii,
    limited_weights,
)

POSITIVE = st.floats(1e-6, 1e6)


@given(st.lists(POSITIVE, min_size=1, max_size=8))
def test_only_radii_far_below_the_median_change(radii: list[float]) -> None:
    found = limited_radii({str(k): radius for k, radius in enumerate(radii)})
    floor = float(np.median(radii)) / FAR_BELOW
    assert list(found) == [str(k) for k in range(len(radii))]
    assert list(found.values()) == pytest.approx([max(each, floor) for each in radii])
    for rule, of in (("min", np.min), ("median", np.median), ("max", np.max)):
        assert common_radius(rule, radii, 7.0) == pytest.approx(float(of(radii)))
    assert common_radius("fixed", radii, 7.0) == 7.0


@given(st.lists(st.tuples(POSITIVE, POSITIVE | st.just(0.0)), min_size=1, max_size=8))
def test_no_gradient_pulls_as_more_than_some_usual_ones(sets: list[tuple[float, float]]) -> None:
    weights, lengths = (list(column) for column in zip(*sets, strict=True))
    found = limited_weights(weights, lengths)
    most = LONGEST * float(np.quantile(lengths, 0.5, method="lower"))
    for new, old, length in zip(found, weights, lengths, strict=True):
        if length <= most:
            assert new == old
        else:
            assert new * length == pytest.approx(old * most)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.integers(0, 99),
)
def test_what_is_remembered_has_its_share_and_the_rest_is_forgotten(
    sizes: list[int], share: float, seed: int
) -> None:
    generator, memory = torch.Generator().manual_seed(seed), {}
    before: list[float] = []
    for number, size in enumerate(sizes):
        new = LandscapeRecords.evenly(
            torch.full((size, 2), float(number)), torch.randint(0, 3, (size,), generator=generator)
        )
        whole, memory = _remembered(new, memory, share)
        assert float(whole.weights.sum()) == pytest.approx(1, abs=1e-6)
        assert torch.equal(whole.values[:size], new.values)
        assert whole.values[size:, 0].tolist() == before
        own = float(whole.weights[:size].sum())
        assert own == pytest.approx(1 - share if before else 1, abs=1e-6)
        if not share:
            assert not memory
            continue
        kept = len(memory["labels"])
        assert kept == min(len(whole.labels), REMEMBERED * size)
        assert float(memory["weights"].sum()) == pytest.approx(1, abs=1e-6)
        assert torch.equal(memory["values"], whole.values[:kept])
        assert torch.equal(memory["labels"], whole.labels[:kept])
        ratio = memory["weights"] / whole.weights[:kept]
        assert float(ratio.max() - ratio.min()) < 1e-5 * float(ratio.max())
        before = memory["values"][:, 0].tolist()
