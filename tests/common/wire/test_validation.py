"""Limits of valid surrogates: a value at each limit is accepted, and a value just beyond it is
refused by name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.methods.fedpft.surrogate import SiteData, make_surrogate
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import Sums, lengths
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header, SumsSurrogate, Surrogate
from fedsurrogate.common.wire.tensors import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    LONGEST_NAME,
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
        *((name, True) for name in ("a", "a" * LONGEST_NAME)),
        *(
            (name, False)
            for name in ("a" * (LONGEST_NAME + 1), "", "a\n", "\ud800", b"a", 1, None, ("a",))
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
                with pytest.raises(SurrogateError, match="a class sum beyond its count of length"):
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
                match=r"records; 100000000 at most|the count below zero of length 1e",
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
