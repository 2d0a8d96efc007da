"""Whole covariances and names at the limits of what records can have: accepted up to them, refused just
beyond.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.covariances import Gram, LowRank
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire import tensors
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate, is_name

HALF = 2.0**-10
HEADER = Header("fedpft", "run", "site", "print", ("a", "b"))


def taken(matrix: torch.Tensor, counts: tuple[int, int] = (500, 500)) -> bool:
    surrogate = Surrogate(
        HEADER,
        Mixtures(
            torch.tensor(counts),
            torch.arange(2),
            torch.ones(2),
            torch.zeros(2, len(matrix)),
            Gram(matrix),
        ),
    )
    try:
        check_surrogate(surrogate, Expectation("fedpft", "run", "gram", 1, 1))
    except SurrogateError:
        return False
    return True


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(("share", "fine"), [(0.0, True), (0.9, True), (1.1, False), (-3.0, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_correlation_is_at_most_one_but_for_rounding(
    size: float, share: float, fine: bool, sign: int
) -> None:
    deviations = torch.tensor([1.0, 5.0], dtype=torch.float64).mul(size).sqrt()
    matrix = torch.eye(2, dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = sign * (1 + share * HALF)
    assert taken((matrix * deviations * deviations[:, None]).double()) == fine
    assert tensors.HALF == HALF


@pytest.mark.parametrize(("share", "fine"), [(0.0, True), (0.9, True), (1.1, False)])
@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_an_eigenvalue_is_zero_or_more_but_for_rounding(
    share: float, fine: bool, size: float
) -> None:
    """Three features of equal correlations r have the eigenvalue 1 + 2 r, and the norm sqrt(3 + 6 r^2)."""
    r = -0.5 - share * HALF * (3 + 6 * 0.25) ** 0.5 / 2
    matrix = torch.full((3, 3), r, dtype=torch.float64)
    matrix.fill_diagonal_(1.0)
    assert taken(size * matrix) == fine


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2))
def test_records_have_no_more_directions_than_they_are_without_their_means(
    first: int, second: int, more: int
) -> None:
    freedom = first + second - 2
    dimension = int(1.02 * freedom) + more
    if dimension:
        fine = dimension <= 1.02 * freedom
        assert taken(torch.eye(dimension), (first, second)) == fine


@pytest.mark.parametrize(
    ("variance", "fine"), [(1e-30, True), (0.9e-25, True), (1.1e-25, False), (1.0, False)]
)
@pytest.mark.parametrize("dimension", [1, 4])
def test_one_record_of_each_class_has_no_variance(
    variance: float, fine: bool, dimension: int
) -> None:
    assert taken(variance * torch.eye(dimension), (1, 1)) == fine
    assert tensors.NO_VARIANCE == 1e-25


@pytest.mark.parametrize("limit", [0, 3, 4])
@pytest.mark.parametrize("family", ["auto", "gram", "lowrank", "full", "diag"])
def test_a_site_may_send_what_was_asked_for_or_less_where_it_is_chosen_there(
    family: str, limit: int
) -> None:
    expected = Expectation("fedpft", "run", family, 1, 1, largest_gram=limit)
    for sent in ("gram", "lowrank", "full", "diag", "spherical"):
        for dimension in (1, 3, 4, 5):
            wanted = sent == family
            if family == "auto":
                wanted = sent == "lowrank" or (sent == "gram" and dimension <= limit)
            assert expected.allows(sent, dimension) == wanted


@pytest.mark.parametrize(("rank", "fine"), [(1, True), (2, True), (3, False)])
def test_an_expectation_is_that_of_the_settings(rank: int, fine: bool) -> None:
    run = parse_run({"fedpft.covariance": "lowrank", "fedpft.rank": 2, "fedpft.components": 1})
    expected = Expectation.of(run, ("a", "b"), "print", 3)
    assert (expected.method, expected.run, expected.family) == ("fedpft", run.digest, "lowrank")
    assert (expected.components, expected.rank, expected.dimension) == (1, 2, 3)
    assert (expected.classes, expected.fingerprint, expected.power) == (
        ("a", "b"),
        "print",
        run.power,
    )
    assert Expectation.of(run, (), "").dimension == 0
    surrogate = Surrogate(
        replace(HEADER, run=run.digest),
        Mixtures(
            torch.tensor([9, 9]), torch.arange(2), torch.ones(2), torch.zeros(2, 3),
            LowRank(torch.ones(3, rank), torch.ones(3)),
        ),
    )  # fmt: skip
    if fine:
        check_surrogate(surrogate, expected)
        return
    with pytest.raises(SurrogateError, match="rank 3; at most 2 is allowed"):
        check_surrogate(surrogate, expected)


@pytest.mark.parametrize(
    ("name", "fits"),
    [("x" * 200, True), ("x" * 201, False), ("", False), ("a b", True), ("a\u00a0b", False), ("\ud800", False), ("ü", True)],
)  # fmt: skip
def test_a_name_has_200_characters_that_print(name: str, fits: bool) -> None:
    assert is_name(name) == fits
