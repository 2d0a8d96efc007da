"""Equal rows of features have one group, however many are compared at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.images import same_rows


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.5, float("inf")]), min_size=2, max_size=2),
        max_size=12,
    ),
)
def test_the_group_of_a_row_is_its_first_row_with_the_same_bytes(
    rows: list[list[float]],
) -> None:
    features = torch.tensor(rows).reshape(len(rows), 2)
    found = same_rows(features).tolist()
    content = [row.numpy().tobytes() for row in features]
    assert len(found) == len(rows)
    for at, own in enumerate(content):
        for other in range(at):
            assert (found[at] == found[other]) == (own == content[other])
