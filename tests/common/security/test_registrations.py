"""Receipts and the table of registered sites come back as they were written, and nothing else is one."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.security.registrations import (
    MOST_RECEIPTS,
    Receipt,
    Registration,
    join_receipts,
    parse_receipt,
    parse_receipts,
    read_table,
    write_table,
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


NOW = datetime(2026, 3, 31, 12, tzinfo=UTC)
TIMES = st.just("") | st.integers(-5, 5).map(
    lambda hours: (NOW + timedelta(hours=hours)).isoformat()
)
TABLES = st.dictionaries(
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z"), st.tuples(st.text(max_size=9), TIMES), max_size=4
)  # fmt: skip


@settings(max_examples=40)
@given(TABLES)
def test_a_table_comes_back_and_says_whose_time_is_over(
    tmp_path_factory: pytest.TempPathFactory, sites: dict[str, tuple[str, str]]
) -> None:
    file = tmp_path_factory.mktemp("table") / "registered.json"
    table = {
        name: Registration(key, 1000 + node, expires)
        for node, (name, (key, expires)) in enumerate(sites.items())
    }
    write_table(file, table)
    assert read_table(file) == table
    assert list(json.loads(file.read_text())["sites"]) == sorted(table)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~0o022
    for each in table.values():
        over = each.expires != "" and datetime.fromisoformat(each.expires) <= NOW
        assert each.expired(NOW) == over


ONE: dict[str, Any] = {"key": "k", "node": 1, "expires": ""}


@pytest.mark.parametrize(
    "content",
    [
        None, "", "{", "3", "[]", "{}", '{"sites": 3}', '{"sites": []}', "[" * 100_000, '{"sites": {"a": 3}}',
        *(
            json.dumps({"sites": {"a": {"key": "j", "node": 7}, "b": ONE | wrong}})
            for wrong in (
                {"node": True}, {"node": "1"}, {"node": 1.0}, {"node": None}, {"node": 7}, {"key": 3}, {"key": None},
                {"more": 1}, {"expires": "soon"}, {"expires": "2026-03-31T00:00:00"}, {"expires": 5},
            )
        ),
        json.dumps({"sites": {"a": {"key": "k"}}}), json.dumps({"sites": {"../a": ONE}}),
        json.dumps({"sites": {"": ONE}}), json.dumps({"sites": {"a" * 65: ONE}}),
    ],
    ids=lambda content: str(content)[-30:],
)  # fmt: skip
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "registered.json"
    file.write_text(json.dumps({"sites": {"a": {"key": "j", "node": 7}, "b": ONE}}))
    assert list(read_table(file)) == ["a", "b"]
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(RunError, match="coordinator sites register"):
        read_table(file)
    file.write_bytes(b"\xff")
    with pytest.raises(RunError, match="cannot be read"):
        read_table(file)
