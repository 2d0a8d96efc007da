"""A withheld sum is random for everybody, and shows that it is withheld, whatever is drawn."""

import os
import secrets

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.secure_aggregation import _beyond, _random
from fedsurrogate.common.methods.method import BITS
from fedsurrogate.common.secure_aggregation.rules import FixedPoint


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 40),
    at=st.sampled_from((0.0, 0.3, 1.0)),
    byte=st.sampled_from((b"\0", b"\xff")),
)
def test_a_withheld_vector_never_ends_with_the_zero_of_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch, count: int, at: float, byte: bytes
) -> None:
    """The least and the largest numbers of both generators included."""
    monkeypatch.setattr(os, "urandom", lambda size: byte * size)
    monkeypatch.setattr(secrets, "randbelow", lambda below: int(at * (below - 1)))
    drawn = _random(count)
    assert drawn.shape == (count,)
    assert drawn[-1] % 2**BITS != 0
    assert ((drawn >= 0) & (drawn < 2**BITS)).all()


def test_a_withheld_vector_fills_the_whole_modulus() -> None:
    drawn = _random(20_001)[:-1]
    bits = (drawn[:, None] >> np.arange(BITS)) & 1
    # Six standard deviations.
    assert (abs(bits.mean(0) - 0.5) < 6 * 0.5 / 20_000**0.5).all()
    assert not (drawn == _random(20_001)[:-1]).mean() > 0.01


NUMBERS = st.floats(-4, 4) | st.sampled_from([float("nan"), float("inf"), -float("inf"), 2.0, -2.0])


@settings(max_examples=100)
@given(
    tables=st.dictionaries(st.sampled_from("abc"), st.lists(NUMBERS, max_size=4)),
    limits=st.tuples(*[st.integers(1, 6)] * 3),
)
def test_a_sum_is_withheld_exactly_where_a_number_would_be_cut_off(
    tables: dict[str, list[float]], limits: tuple[int, int, int]
) -> None:
    numbers = {name: FixedPoint(0.5, limit) for name, limit in zip("abc", limits, strict=True)}
    values = {name: torch.tensor(table, dtype=torch.float64) for name, table in tables.items()}
    cut = {
        name
        for name, table in tables.items()
        if not all(abs(each) <= 0.5 * numbers[name].largest for each in table)
    }
    found = _beyond(values, numbers)
    assert bool(found) == bool(cut)
    assert not found or found.split()[0] in cut
