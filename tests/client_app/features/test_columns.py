"""Which columns are odd, at each limit exactly, by a count with plain numbers; and the frame of any."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import frame_of, outlier_columns, warning_of

# By column the size of its range, a power of two; where it begins, in ranges; and how many records
# have the other end of the range.
COLUMNS = st.lists(
    st.tuples(
        st.sampled_from([-40, -15, -14, -13, -12, -9, -5, -1, 0, 0, 0, 0, 1, 4, 5, 6, 9, 12, 13, 14]),
        st.sampled_from([-65.0, -64.5, -64.0, -1.0, -0.5, 0.0, 0.0, 0.0, 31.0, 32.0, 63.0, 63.5, 64.0]),
        st.sampled_from([0, 1, 2, 3, 5, 1000, 1000, 1000, 1000]),
    ),
    min_size=1,
    max_size=7,
)  # fmt: skip
RECORDS = st.sampled_from([1, 2, 3, 20, 31, 32, 33, 40, 60])


def made(columns: list[tuple[int, float, int]], count: int) -> Tensor:
    """Features (n, d), exact in single precision."""
    table = torch.zeros(count, len(columns), dtype=torch.float64)
    for at, (power, start, others) in enumerate(columns):
        own = torch.zeros(count, dtype=torch.float64)
        if others >= count // 2:
            # Spread evenly over the range.
            own = (torch.arange(count) % 5 / 4).double()
            own[-1] = 1.0
        elif others:
            own[-others:] = 1.0
        table[:, at] = (own + start) * 2.0**power
    return table.float()


def counted(features: Tensor) -> tuple[set[int], dict[int, float]]:
    """The outlier columns, and how far each is from the median one."""
    table = features.double().numpy()
    count, width = table.shape
    if count < 2:
        return set(), {}
    sizes = np.abs(table).max(0)
    ranges = table.max(0) - table.min(0)
    low, high = round(0.05 * (count - 1)), round(0.95 * (count - 1))
    varies = []
    for at in range(width):
        ranked = sorted(table[:, at])
        varies.append(ranked[high] - ranked[low] > 2.0**-20 * sizes[at])
    own = sorted(ranges[at] for at in range(width) if varies[at])
    if not own:
        return set(), {}
    usual, lower = own[(len(own) - 1) // 2], float(np.quantile(own, 0.1))
    found = set()
    for at in range(width):
        of_range = [sizes[at] > 64 * ranges[at]]
        of_range.append(usual > 32 * lower and ranges[at] * 32 < usual)
        of_range.append(count >= 32 and ranges[at] * 512 < max(sizes))
        if sizes[at] > 32 * usual or (varies[at] and any(of_range)):
            found.add(at)
    apart = {at: max(sizes[at] / usual, usual / max(ranges[at], 1e-300)) for at in found}
    return found, apart


@settings(max_examples=150, deadline=None)
@given(columns=COLUMNS, count=RECORDS)
def test_columns_are_odd_by_count_and_the_worst_comes_first(
    columns: list[tuple[int, float, int]], count: int
) -> None:
    features = made(columns, count)
    found = outlier_columns(features)
    expected, apart = counted(features)
    assert set(found) == expected
    assert len(found) == len(expected)
    ranked = [apart[at] for at in found]
    assert ranked == sorted(ranked, reverse=True)
    words = warning_of(features)
    if not found:
        assert words == ""
        return
    own = features[:, found[0]].double()
    more = f", and {len(found) - 1} more are such outliers" if len(found) > 1 else ""
    assert words.startswith(
        f"column {found[0]} of the features (counted from 0) has numbers from {float(own.min()):.4g} "
        f"to {float(own.max()):.4g}, unlike the others{more}; this run"
    )


@settings(max_examples=150, deadline=None)
@given(columns=COLUMNS, count=RECORDS, shared=st.sampled_from([None, -15, -14, -13, 13, 14]))
def test_the_frame_of_any_columns_has_their_means_and_deviations(
    columns: list[tuple[int, float, int]], count: int, shared: int | None
) -> None:
    if shared is not None:
        # All columns are equally tiny or huge.
        columns = [(shared, start % 1, others) for _, start, others in columns]
    features = made(columns, count)
    table = features.double().numpy()
    frame = frame_of(features)
    ranges = sorted(each for each in table.max(0) - table.min(0) if each > 0)
    unequal = bool(counted(features)[0])
    if ranges:
        unequal |= not 2.0**-13 <= ranges[(len(ranges) - 1) // 2] <= 2.0**13
    mean, variance = table.mean(0), table.var(0)
    far = (mean**2).sum() - 8 * variance.sum()
    if not unequal and abs(far) < 1e-9:
        return
    if not unequal and (count < 2 or far < 0):
        assert frame is None
        return
    assert frame is not None
    deviation = np.sqrt(variance)
    if not unequal:
        deviation = np.full_like(deviation, math.sqrt(variance.sum() / 10))
    np.testing.assert_allclose(frame.offset.double(), mean, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(frame.scale.double(), deviation, rtol=1e-4, atol=1e-30)


def test_numbers_too_small_or_too_large_for_a_frame() -> None:
    drawn = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    tiny = (drawn * torch.tensor([1.0, 2.0**-140, 1.0])).float()
    frame: Any = frame_of(tiny)
    assert frame.scale[1] == 0.0
    assert (frame.scale[[0, 2]] > 0.5).all()
    assert frame_of((drawn + torch.tensor([0.0, 3e38, 0.0])).float()) is None


def test_only_the_first_records_of_many_decide() -> None:
    drawn = torch.randn(8200, 3, generator=torch.Generator().manual_seed(0))
    later = drawn.clone()
    later[8192:, 1] = 1e6
    assert outlier_columns(later) == []
    assert warning_of(later) == ""
    later[8191, 1] = 1e6
    assert outlier_columns(later)[0] == 1
    assert "to 1e+06" in warning_of(later)
    assert outlier_columns(torch.zeros(40, 0)) == []
