"""The table of registered sites comes back as it was written, and no other file is one."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.security.registrations import Registration, read_table, write_table

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
