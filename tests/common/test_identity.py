"""Names of values of every type, by a table of what each is called."""

from __future__ import annotations

import math
import unicodedata
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.identity import (
    INVISIBLE,
    is_missing,
    name_of,
    normal,
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
