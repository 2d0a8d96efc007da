"""Limits of valid surrogates: a value at each limit is accepted, and a value just beyond it is
refused by name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import Sums, lengths
from fedsurrogate.common.surrogates.covariances import Gram
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header, SumsSurrogate, Surrogate
from fedsurrogate.common.wire import tensors
from fedsurrogate.common.wire.tensors import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    MOST_CLASSES,
    Expectation,
    check_class_number,
    check_header,
    check_surrogate,
    is_name,
)

CLASSES = ("a", "b", "c")
PRIVATE = {"epsilon": 4.0, "delta": 1e-5}


def made(family: str = "diag", **settings: Any) -> tuple[Run, Any]:
    run = parse_run(
        {"fedpft.covariance": family, "fedpft.rank": 2, "fedpft.components": 2} | settings
    )
    features = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    return run, make_surrogate(
        SiteData(features, torch.arange(300) % 3, CLASSES, "f" * 16, "north"), run
    ).surrogate


def sums(family: str = "diag") -> tuple[Run, SumsSurrogate]:
    return made(family, **PRIVATE, **{"fedpft.components": 1})


def check(
    surrogate: AnySurrogate, run: Run, classes: tuple[str, ...] = CLASSES, dimension: int = 4
) -> None:
    check_surrogate(surrogate, Expectation.of(run, classes, "f" * 16, dimension))


@pytest.mark.parametrize("family", ["spherical", "diag", "full", "lowrank"])
def test_what_a_site_makes_is_taken_whatever_is_known_beforehand(family: str) -> None:
    for run, surrogate in (made(family), sums(family)):
        check(surrogate, run)
        check(surrogate, run, (), 0)
        check_surrogate(surrogate, Expectation.of(run, (), "", 0))
        for wrong in (3, 5):
            with pytest.raises(
                SurrogateError, match=f"features of dimension 4, the other sites have {wrong}"
            ):
                check(surrogate, run, CLASSES, wrong)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        *((name, True) for name in ("a", "a b", "ü", "a" * 200)),
        *(
            (name, False)
            for name in ("a" * 201, "", "a\n", "a\u00a0b", "\ud800", b"a", 1, None, ("a",))
        ),
    ],
)
def test_a_name_is_a_short_text_that_prints(value: object, right: bool) -> None:
    assert is_name(value) is right


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "fedlap"}, "method 'fedlap' is not this run's 'fedpft'"),
        ({"run": "x"}, "run 'x' is not"),
        ({"fingerprint": "g"}, "backbone fingerprint 'g' is not"),
        ({"site": "../north"}, "site name"),
        ({"site": "n" * 65}, "site name"),
        ({"site": ""}, "site name"),
        ({"classes": ()}, "an empty class list"),
        ({"classes": ("a", "\n")}, "does not print"),
        ({"classes": ("a", "d")}, "unknown class 'd'"),
    ],
)
def test_a_header_of_another_run_is_refused(changed: dict[str, Any], message: str) -> None:
    run, surrogate = made()
    expected = Expectation.of(run, CLASSES, "f" * 16)
    header: Header = surrogate.header
    check_header(header, expected)
    check_header(replace(header, site="n" * 64, classes=("c",)), expected)
    with pytest.raises(SurrogateError, match=message):
        check_header(replace(header, **changed), expected)


def test_what_is_not_known_beforehand_is_not_compared() -> None:
    run, surrogate = made()
    unknown = Expectation.of(run, (), "")
    check_header(replace(surrogate.header, classes=("d",), fingerprint="g"), unknown)
    with pytest.raises(SurrogateError, match="does not print"):
        check_header(replace(surrogate.header, fingerprint="\n"), unknown)


def test_more_classes_than_a_run_can_have_are_refused_alone_and_together() -> None:
    run, surrogate = made()
    most = tuple(map(str, range(MOST_CLASSES)))
    check_header(replace(surrogate.header, classes=most), Expectation.of(run, (), ""))
    check_class_number(most)
    with pytest.raises(SurrogateError, match=f"{MOST_CLASSES + 1} classes"):
        check_header(
            replace(surrogate.header, classes=(*most, "more")), Expectation.of(run, (), "")
        )
    with pytest.raises(RunError, match=f"{MOST_CLASSES + 1} classes together"):
        check_class_number((*most, "more"))


@pytest.mark.parametrize(
    ("family", "numbers"), [("spherical", 0), ("diag", 4), ("full", 10), ("lowrank", 10)]
)
def test_noisy_sums_have_the_second_moments_of_their_covariance_and_all_classes(
    family: str, numbers: int
) -> None:
    run, surrogate = sums(family)
    found = surrogate.sums.squares
    assert (0 if found is None else len(found)) == numbers
    for wrong in {0, 1, 4, 10} - {numbers}:
        table = torch.zeros(wrong) if wrong else None
        with pytest.raises(
            SurrogateError, match=f"second moments of {wrong} numbers; .* needs {numbers}"
        ):
            check(replace(surrogate, sums=replace(surrogate.sums, squares=table)), run)
    with pytest.raises(
        SurrogateError, match="of other classes than the run's, or in another order"
    ):
        check(surrogate, run, ("c", "b", "a"))
    with pytest.raises(
        SurrogateError, match="of other classes than the run's, or in another order"
    ):
        check(surrogate, run, (*CLASSES, "d"))


@pytest.mark.parametrize("name", ["counts", "sums", "squares"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_no_number_is_refused_by_name(name: str, bad: float) -> None:
    run, surrogate = sums()
    table = getattr(surrogate.sums, name).clone()
    table.view(-1)[-1] = bad
    with pytest.raises(SurrogateError, match=f"{name} hold a number that is not finite"):
        check(replace(surrogate, sums=replace(surrogate.sums, **{name: table})), run)


def test_no_sum_is_longer_than_its_count_and_the_noise_allow() -> None:
    run, surrogate = sums()
    assert surrogate.sums.squares is not None
    sigmas, squares = (
        {"counts": 2.0, "sums": 3.0, "squares": 1.0},
        torch.zeros_like(surrogate.sums.squares),
    )
    # Three classes; the noise of a count, and the norm of noise in four dimensions, exceed the
    # limit once in 1e7.
    tail = math.sqrt(2 * math.log(4 * 3 / 1e-7))
    noise = math.hypot(2, 3) * tail * 1.01 + 0.01
    for count, room in ((100.0, 101 + 6 + noise), (0.0, 6 + noise), (-10.0, 6 + noise)):
        for length, taken in ((room * 0.999, True), (room * 1.001, False)):
            counts, table = torch.full((3,), count), torch.zeros(3, 4)
            table[1, 2] = length
            changed = replace(
                surrogate,
                sums=replace(
                    surrogate.sums, counts=counts, sums=table, squares=squares, sigmas=sigmas
                ),
            )
            if taken:
                check(changed, run)
            else:
                with pytest.raises(SurrogateError, match=r"a class sum beyond its count \(length"):
                    check(changed, run)


def test_noise_alone_is_never_refused() -> None:
    sigmas, generator = (
        {"counts": 2.0, "sums": 3.0, "squares": 1.0},
        torch.Generator().manual_seed(0),
    )
    for records in (0.0, 5.0, 500.0):
        longest = torch.nn.functional.one_hot(torch.zeros(3, dtype=torch.long), 4) * records
        for _ in range(300):
            drawn = [
                sigmas[n] * torch.randn(s, generator=generator)
                for n, s in (("counts", 3), ("sums", (3, 4)), ("squares", 4))
            ]
            noisy = Sums(records + drawn[0], longest + drawn[1], drawn[2], sigmas)
            assert all(bool((length <= most).all()) for _, length, most in lengths(noisy))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_count_beyond_what_any_site_has_is_refused(sign: float) -> None:
    run, surrogate = sums()
    for count, taken in ((LARGEST_COUNT, True), (1.001 * LARGEST_COUNT, False)):
        counts = torch.tensor([1.0, sign * count, 1.0])
        changed = replace(
            surrogate, sums=replace(surrogate.sums, counts=counts, sums=torch.zeros(3, 4))
        )
        if taken and sign > 0:
            check(changed, run)
        else:
            with pytest.raises(
                SurrogateError,
                match=r"records; 100000000 at most|the count below zero \(length 1e",
            ):
                check(changed, run)
    assert LARGEST_COUNT == 10**8


def changed_mixtures(surrogate: Surrogate, **tables: Any) -> Surrogate:
    return replace(surrogate, mixtures=replace(surrogate.mixtures, **tables))


def test_mixtures_of_another_shape_than_was_asked_for_are_refused() -> None:
    run, surrogate = made("lowrank")
    assert isinstance(surrogate, Surrogate)
    fewer = parse_run({"fedpft.covariance": "lowrank", "fedpft.rank": 2, "fedpft.components": 1})
    lower = parse_run({"fedpft.covariance": "lowrank", "fedpft.rank": 1, "fedpft.components": 2})
    other = parse_run({"fedpft.covariance": "full", "fedpft.components": 2})
    expected = Expectation.of(run, CLASSES, "f" * 16, 4)
    for asked, message in (
        (fewer, "2 components in a class; at most 1 are allowed"),
        (lower, "rank 2; at most 1 is allowed"),
        (other, "covariance 'lowrank', expected 'full'"),
    ):
        asked_for = Expectation.of(asked, CLASSES, "f" * 16, 4)
        with pytest.raises(SurrogateError, match=message):
            check_surrogate(surrogate, replace(asked_for, run=expected.run))
    one = Expectation.of(parse_run({"epsilon": 4.0, "delta": 1e-5, "fedpft.components": 3}), (), "")
    assert one.family == "spherical", "DP-EM's, whatever was asked for"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["weights", "means", "variances"])
def test_a_mixture_with_a_number_that_is_none_is_refused(name: str, bad: float) -> None:
    run, surrogate = made("diag")
    covariance = surrogate.mixtures.covariance
    table = (
        getattr(covariance, name) if name == "variances" else getattr(surrogate.mixtures, name)
    ).clone()
    table.view(-1)[-1] = bad
    tables = (
        {"covariance": replace(covariance, variances=table)}
        if name == "variances"
        else {name: table}
    )
    with pytest.raises(SurrogateError, match=f"{name} hold a number that is not finite"):
        check(changed_mixtures(surrogate, **tables), run)


def test_means_and_variances_have_room_to_be_learned_from() -> None:
    run, surrogate = made("diag", **{"fedpft.components": 1})
    # Shares of classes that are powers of two, so that no rounding moves a mean past its limit.
    counts = surrogate.mixtures.counts
    powers = [1, *(2**k for k in range(len(counts) - 1))]
    surrogate = changed_mixtures(surrogate, counts=8 * torch.tensor(powers).to(counts))
    covariance = surrogate.mixtures.covariance
    for share, taken in ((0.9, True), (1.0, False), (1.1, False)):
        means = surrogate.mixtures.means.clone()
        means[:, 1] = -share * LARGEST_NUMBER
        wide = covariance.variances.clone()
        wide[:, 1] = share * LARGEST_NUMBER**2
        # Around zero, so that no rounding moves the variance past its limit.
        none = torch.zeros_like(means)
        for changed in (
            changed_mixtures(surrogate, means=means),
            changed_mixtures(surrogate, means=none, covariance=replace(covariance, variances=wide)),
        ):
            if taken:
                check(changed, run)
            else:
                with pytest.raises(SurrogateError, match="too large"):
                    check(changed, run)


def test_weights_of_a_class_sum_to_one_and_none_is_negative() -> None:
    run, surrogate = made("diag")
    weights = surrogate.mixtures.weights
    for factor, taken in ((1.009, True), (0.991, True), (1.011, False), (0.989, False)):
        if taken:
            check(changed_mixtures(surrogate, weights=weights * factor), run)
        else:
            with pytest.raises(SurrogateError, match="weights of a class sum to"):
                check(changed_mixtures(surrogate, weights=weights * factor), run)
    one_class = (surrogate.mixtures.labels == surrogate.mixtures.labels[-1]).nonzero().flatten()
    if len(one_class) > 1:
        negative = weights.clone()
        negative[one_class[0]] -= 1
        negative[one_class[1]] += 1
        with pytest.raises(SurrogateError, match="weights of a class sum to"):
            check(changed_mixtures(surrogate, weights=negative), run)


HALF = 2.0**-10
OWN = Header("fedpft", "run", "site", "print", ("a", "b"))


def taken(matrix: torch.Tensor, reason: str, counts: tuple[int, int] = (500, 500)) -> bool:
    surrogate = Surrogate(
        OWN,
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
    except SurrogateError as error:
        found = str(error)
    else:
        return True
    assert reason in found
    return False


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(("share", "fine"), [(0.0, True), (0.9, True), (1.1, False), (-3.0, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_correlation_is_at_most_one_but_for_rounding(
    size: float, share: float, fine: bool, sign: int
) -> None:
    deviations = torch.tensor([1.0, 5.0], dtype=torch.float64).mul(size).sqrt()
    matrix = torch.eye(2, dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = sign * (1 + share * HALF)
    assert taken(matrix * deviations * deviations[:, None], "a correlation of") == fine
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
    assert taken(size * matrix, "negative eigenvalue") == fine


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2))
def test_records_have_no_more_directions_than_they_are_without_their_means(
    first: int, second: int, more: int
) -> None:
    freedom = first + second - 2
    dimension = int(1.02 * freedom) + more
    if dimension:
        fine = dimension <= 1.02 * freedom
        assert taken(torch.eye(dimension), "more directions than", (first, second)) == fine


@pytest.mark.parametrize(
    ("variance", "fine"), [(1e-30, True), (0.9e-25, True), (1.1e-25, False), (1.0, False)]
)
@pytest.mark.parametrize("dimension", [1, 4])
def test_one_record_of_each_class_has_no_variance(
    variance: float, fine: bool, dimension: int
) -> None:
    assert taken(variance * torch.eye(dimension), "than 2 records", (1, 1)) == fine
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


def test_an_expectation_is_that_of_the_settings() -> None:
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
