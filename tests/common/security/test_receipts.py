"""Receipts are read exactly as they are written, and nothing else is a receipt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.security.registrations import (
    MOST_RECEIPTS,
    Receipt,
    join_receipts,
    parse_receipt,
    parse_receipts,
)


def digits(length: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=length, max_size=length)


RECEIPTS = st.builds(
    Receipt,
    ledger=digits(32),
    opened=st.integers(0, 10**11 - 1),
    length=st.integers(0, 10**9 - 1),
    tag=digits(64),
)


@settings(max_examples=30)
@given(st.lists(RECEIPTS, max_size=MOST_RECEIPTS + 3))
def test_as_many_as_a_site_may_have_are_read_as_written(receipts: list[Receipt]) -> None:
    text = join_receipts(receipts)
    if len(receipts) <= MOST_RECEIPTS:
        assert parse_receipts(text) == receipts
    else:
        with pytest.raises(SurrogateError, match="more than 32"):
            parse_receipts(text)


@pytest.mark.parametrize("more", [0, 1])
def test_the_number_is_limited_exactly(more: int) -> None:
    receipts = [Receipt("a" * 32, at, at, "b" * 64) for at in range(MOST_RECEIPTS + more)]
    if more:
        with pytest.raises(SurrogateError):
            parse_receipts(join_receipts(receipts))
    else:
        assert parse_receipts(join_receipts(receipts)) == receipts


@settings(max_examples=100)
@given(RECEIPTS, st.integers(0, 3), st.sampled_from(["longer", "shorter", "A", " ", "\n", "-", ""]))
def test_a_part_of_another_form_is_refused(receipt: Receipt, part: int, change: str) -> None:
    parts = str(receipt).split(":")
    most = (32, 11, 9, 64)[part]
    parts[part] = {
        "longer": parts[part].rjust(most, "0") + "0",
        "shorter": parts[part][1:] if part in (0, 3) else "",
        "": "",
    }.get(change, parts[part] + change)
    with pytest.raises(SurrogateError, match="cannot be read"):
        parse_receipt(":".join(parts))


@settings(max_examples=20)
@given(st.one_of(st.none(), st.integers(), st.binary(), st.text(min_size=1, max_size=40)))
def test_what_is_no_receipt_is_refused(text: object) -> None:
    for parse in (parse_receipt, parse_receipts):
        with pytest.raises(SurrogateError):
            parse(text)
