"""The screen of components: a component in the place of another class is found, unless the other
sites differ about its class as much.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.robustness.class_points import Parts
from fedsurrogate.strategies.robustness.component_screening import scores_of

D, CLASSES = 8, 4


@settings(max_examples=60)
@given(
    st.integers(0, CLASSES - 1),
    st.integers(1, CLASSES - 1),
    st.floats(0.05, 6.0),
    st.floats(0.1, 100.0),
)
def test_a_component_in_the_place_of_another_class_is_found_where_the_others_agree(
    own: int, step: int, times: float, size: float
) -> None:
    """`times`: its squared distance to its own class, in the others' mean squared difference."""
    other = (own + step) % CLASSES
    centres = size * torch.eye(CLASSES, D)
    apart = torch.cdist(centres, centres).square()
    spread = torch.full((CLASSES,), 1e-3 * size**2)
    spread[own] = float(apart[own, other]) / times
    parts = Parts(
        points=centres[other][None],
        labels=torch.tensor([own]),
        noise=torch.tensor([1e-6 * size**2]),
        names=("a",),
    )
    score, nearest = scores_of(
        parts,
        centres,
        torch.ones(CLASSES, dtype=torch.bool),
        torch.full((CLASSES,), 1e-6 * size**2),
        apart,
        spread,
        torch.full((CLASSES,), 10.0),
    )
    assert int(nearest) == other
    # Independent sites differ from their mean by a little more than the mean of this in one of two
    # cases, and by three times of it hardly ever.
    if times < 1.3:
        assert float(score) == 0.0
    if times > 3.0:
        assert float(score) >= 1.0
