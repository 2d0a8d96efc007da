"""How long a search for the effective radius is, and what it gives where nothing turns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.methods.fedlap.statistics import (
    Search,
    ServerWalk,
    effective_radius,
)
from fedsurrogate.common.models.loss_landscape import Descent
from tests.client_app.methods.fedlap.test_approximation import body_and_model, real, unchanged


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_a_walk_that_stands_still_gives_the_trust_radius(rate: float) -> None:
    """It has covered no distance at which the loss could turn."""
    body, model = body_and_model()
    server = ServerWalk(body, model, Descent(rate, 30, 2.5), unchanged())
    found = effective_radius(server, real(12), real(), Search(20), torch.Generator())
    assert found == 2.5


@settings(max_examples=60)
@given(
    work=st.floats(0, 1e7),
    synthetic=st.integers(1, 500),
    seen=st.integers(1, 500),
    most=st.integers(1, 400),
)
def test_half_of_seven_hundredths_of_the_work_walks_and_half_evaluates(
    work: float, synthetic: int, seen: int, most: int
) -> None:
    half = 0.07 * work / 2
    steps = max(4, min(most, math.floor(half / (3 * synthetic))))
    evaluations = max(4, math.floor(half / min(seen, 128)))
    found = Search.within(work, synthetic, seen, most)
    assert found == Search(steps, max(1, math.ceil(steps / evaluations)))
