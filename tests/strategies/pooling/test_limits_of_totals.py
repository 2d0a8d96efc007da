"""What secure aggregation cannot be, by its formulas: just below each limit it passes, just above it is refused
with the limit in the message.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.pooling.site_weights import (
    Total,
    check_gradients,
    check_moments,
    weight_of,
)

HEADER = Header("fedpft", "r", "coordinator", "f", ("a", "b", "c"))
D, TOLERANCE = 3, 1e-2
FALSE = (
    "the secure aggregation has {}, so some site has added false numbers, or more records than "
    "secure-aggregation-records, or without privacy features beyond secure-aggregation-range; nothing shows which "
    "one: run again with other sites, with larger ones of these, or with a defence instead of "
    "secure-aggregation"
)
few = settings(max_examples=40, deadline=None)


def refusal(total: Total, what: str = "moments") -> str:
    try:
        (check_moments if what == "moments" else check_gradients)(total)
    except RunError as error:
        return str(error)
    return ""


def total_of(
    counts: list[float],
    sums: Tensor,
    squares: Tensor | None = None,
    rounding: dict[str, float] | None = None,
) -> Total:
    tensors = {"counts": torch.tensor(counts).double(), "sums": sums.double()}
    if squares is not None:
        tensors["squares"] = fold(squares.double())
    return Total(HEADER, tensors, rounding=rounding or {})


@few
@given(
    st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.02]),
)
def test_class_sums_are_refused_just_beyond_the_second_moment(
    counts: list[int], seed: int, of_sums: float, of_squares: float
) -> None:
    """Sums |s_c|^2 / n_c are at most the trace; where rounding alone may be the reason, it is named."""
    draw = torch.Generator().manual_seed(seed)
    sums = 5 * torch.randn(3, D, generator=draw).double()
    longest = sum(float(s @ s) / max(n, 1) for s, n in zip(sums, counts, strict=True))
    least = sum(
        max(0.0, float(s.norm()) - of_sums * math.sqrt(D)) ** 2 / max(n, 1)
        for s, n in zip(sums, counts, strict=True)
    )
    rounding = {"sums": of_sums, "squares": of_squares}
    given_ = [float(each) + 0.3 for each in counts]

    def said(trace: float) -> str:
        moment = (torch.ones(D, D) + torch.eye(D)) * trace / (2 * D)
        return refusal(total_of(given_, sums, moment, rounding))

    edge = longest / (1 + TOLERANCE)
    assert said(1.0001 * edge) == ""
    assert said(0.9999 * edge) != ""
    # Of the trace, and of each of the sums, rounding may have changed so much.
    least_trace = least - of_squares * D
    false = FALSE.format("class sums longer than the second moment allows")
    below = min(least_trace - 1e-4, 0.999 * edge)
    assert said(below) == false
    above = least_trace + 1e-4
    if 0 < above < 0.999 * edge:
        assert (
            "so small that the fixed-point numbers of the secure aggregation round them away"
            in said(above)
        )


@pytest.mark.parametrize("squares", [False, True])
def test_counts_below_zero_and_features_without_records_are_refused(squares: bool) -> None:
    moment = 1e6 * torch.eye(D) if squares else None
    sums = torch.zeros(3, D)
    sums[0] = 1.0
    assert refusal(total_of([4.0, 0.0, -0.4], sums, moment)) == ""
    found = refusal(total_of([4.0, 0.0, -0.6], sums, moment))
    assert found == FALSE.format("a class of -1 records")
    sums[1, 0] = 0.3
    # Nine entries, each of which may be off by a tenth.
    for rounding, wrong in ((0.1 + 1e-6, False), (0.1 - 1e-6, True), (0.0, True)):
        found = refusal(total_of([4.0, 0.4, 0.0], sums, moment, {"sums": rounding}))
        wanted = FALSE.format("features of a class without records")
        assert found == (wanted if wrong and not squares else "")


@few
@given(st.floats(-5, 60), st.sampled_from([0.5, 3.0]), st.sampled_from([0.2, 2.0]))
def test_gradients_are_refused_just_beyond_their_number_and_the_noise(
    records: float, of_count: float, of_sum: float
) -> None:
    tail = math.sqrt(2 * math.log(4 / 1e-7))
    both, p = math.hypot(of_count, of_sum), 12
    sigmas = {"records": of_count, "gradients": of_sum}

    def said(length: float, number: float = records) -> str:
        gradients = torch.zeros(p).double()
        gradients[3] = length
        tensors = {"records": torch.tensor([number]).double(), "gradients": gradients}
        return refusal(Total(HEADER, tensors, sigmas), "gradients")

    least = tail * of_count * (1 + TOLERANCE) + TOLERANCE
    assert said(0.0, 1e-4 - least) == ""
    assert said(0.0, -1e-4 - least).startswith(
        f"the secure aggregation has a number of records below zero (length {least + 1e-4:.4g}; at most "
        f"{least:.4g} is possible for this number of records and the noise), so some site"
    )
    if records < -least:
        return
    room = max(records, 0.0) * (1 + TOLERANCE) + of_sum * math.sqrt(p)
    most = both * tail * (1 + TOLERANCE) + TOLERANCE
    assert said(room + most - 1e-4) == ""
    assert said(room + most + 1e-4).startswith(
        f"the secure aggregation has a sum of shortened gradients beyond their number (length "
        f"{most + 1e-4:.4g}; at most {most:.4g} is possible"
    )


@pytest.mark.parametrize("sites", [2, 5])
def test_the_weight_is_the_number_of_records_or_what_each_site_has_in_public(sites: int) -> None:
    def of(records: float) -> Total:
        return Total(HEADER, {"records": torch.tensor([records]).double()})

    assert weight_of(of(30.4), sites) == 30.0
    assert weight_of(of(-7.0), sites, 0.5) == sites * 0.5
    with pytest.raises(RunError) as caught:
        weight_of(of(-0.6), sites)
    assert str(caught.value) == FALSE.format("-1 records")
    for none in (0.4, -0.4, 0.0):
        with pytest.raises(
            RunError, match="no site of the secure aggregation has enough records of any"
        ):
            weight_of(of(none), sites)
