"""Names of values of every type, by a table of what each is called."""

from __future__ import annotations

import math
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.identity import (
    INVISIBLE,
    is_missing,
    is_text,
    likely_one,
    name_of,
    normal,
    rounded,
)

few = settings(max_examples=100, deadline=None)


@few
@given(st.text(st.sampled_from("a\u200b\ufeff\x00\t \xa0e\u0301-"), max_size=8))
def test_only_ends_that_cannot_be_seen_are_taken_off(text: str) -> None:
    composed = list(unicodedata.normalize("NFC", text))
    seen = [
        at
        for at, each in enumerate(composed)
        if not each.isspace() and unicodedata.category(each) not in INVISIBLE
    ]
    assert normal(text) == ("".join(composed[seen[0] : seen[-1] + 1]) if seen else "")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("0.0", "0"), ("-0.0", "0"), ("-1.0", "-1"), ("12.000", "12"), ("01.0", "01.0"), ("1.0.0", "1.0.0"),
        ("1.5", "1.5"), ("1.", "1."), ("+1.0", "+1.0"), ("10.00 ", "10"), (b"a ", "a"), (bytearray(b"1.0"), "1"),
        (True, "True"), (False, "False"), (np.bool_(True), "True"), (1, "1"), (-3.0, "-3"), (0.5, "0.5"),
        (np.float32(0.1), "0.1"), (np.int8(-3), "-3"), (np.float64(2.0), "2"), (Decimal("2.0"), "2"),
        (Decimal("2.50"), "2.50"), (Fraction(4, 2), "2"), (Fraction(1, 2), "1/2"), (2**70, str(2**70)),
        (None, None), (math.nan, None), (np.nan, None), (pd.NA, None), (pd.NaT, None), (np.datetime64("NaT"), None),
        (np.ma.masked, None), ("", None), (" \u200b", None), ("NaN", None), ("NaT", None), (b"", None),
        (Decimal("NaN"), None),
    ],
)  # fmt: skip
def test_a_value_has_this_name(value: Any, name: str | None) -> None:
    assert name_of(value) == name
    if not isinstance(value, str | bytes | bytearray):
        assert is_missing(value) == (name is None)


@pytest.mark.parametrize(
    "value",
    [
        1j, math.inf, -math.inf, np.float32(math.inf), Decimal("Infinity"), b"\xff", [], ["a"], {"a": 1}, object(), len,
        np.timedelta64(3, "s"), np.datetime64("2026-01-01"), 10**5000,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_of_another_type_has_no_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a value of type|not UTF-8"):
        name_of(value)


class Odd:
    """A value whose comparison with itself fails."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        raise self._error

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error", [ArithmeticError, ZeroDivisionError, TypeError, ValueError, RuntimeError]
)
def test_a_value_that_cannot_be_compared_is_not_missing(error: type[Exception]) -> None:
    assert not is_missing(Odd(error))
    with pytest.raises(TypeError, match="a value of type Odd"):
        name_of(Odd(error))


@few
@given(st.sampled_from(["NA", "None", "null", "#N/A", "a"]), st.booleans())
def test_a_class_may_have_the_name_of_a_missing_value(text: str, known: bool) -> None:
    assert name_of(f" {text} ", [text] if known else []) == (text if known or text == "a" else None)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["007", "7", "07"], [("007", "07", "7")]), (["0", "00", "000"], [("0", "00", "000")]), (["0", "1"], []),
        (["7a", "07a"], []), (["\uff21", "A", "a"], [("A", "a", "\uff21")]), (["\ufb01n", "fin"], [("fin", "\ufb01n")]),
        (["a\u200bb", "ab"], [("ab", "a\u200bb")]), (["a  b", "a b", "A B"], [("A B", "a  b", "a b")]),
        (["b", "B", "a", "A"], [("A", "a"), ("B", "b")]), (["a", "a"], []), ([], []),
        (["stra\u00dfe", "STRASSE"], [("STRASSE", "stra\u00dfe")]),
    ],
)  # fmt: skip
def test_names_that_are_likely_one(names: list[str], groups: list[tuple[str, ...]]) -> None:
    assert likely_one(names) == groups


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("1.2E+11", True), ("1,2e+5", True), ("1E+5", True), ("12.5E+3", False), ("1.2E-5", False), ("1.2E11", False),
        ("1.E+5", False), ("E+5", False), ("1.2E+", False), ("a1.2E+11", False), ("120000", False),
    ],
)  # fmt: skip
def test_a_number_in_the_short_form_has_lost_digits(name: str, short: bool) -> None:
    assert rounded(name) == short
    assert is_text(name)
    assert not is_text(name + "\udce9")
