"""Tables as Python's csv module and pyarrow read them: headers, lines that stand alone, what is refused
and by which words, and values that no column may change.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.left_out import LeftOut, SourceError
from fedsurrogate.client_app.datasets.tables import csv_header, read_table, values_of
from fedsurrogate.common.errors import DataError

few = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
CELLS = st.text(alphabet='ab0 ,;"é', max_size=4)


@few
@given(
    st.lists(st.tuples(CELLS, CELLS), max_size=6),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_a_table_is_read_line_by_line_as_by_csv(
    tmp_path: Path, rows: list[tuple[str, str]], delimiter: str, end: str, marked: bool
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    writer.writerows([("file", " label "), *rows])
    # Blank lines are none, wherever they are.
    content = (b"\xef\xbb\xbf" if marked else b"") + text.getvalue().encode() + (end + " ").encode()
    (tmp_path / "t.csv").write_bytes(content)
    assert csv_header(tmp_path / "t.csv") == (["file", "label"], delimiter)
    left = LeftOut(one_by_one=True)
    found = read_table(tmp_path / "t.csv", ("label",), left)
    assert found == {"file": [row[0] for row in rows], "label": [row[1] for row in rows]}
    assert left.reasons == []


@few
@given(
    st.lists(st.sampled_from(["", "plain", "two\nlines", "two\r\nlines", '"'])),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_a_row_is_named_by_the_line_in_which_an_editor_finds_it(
    tmp_path: Path, texts: list[str], end: str, one_by_one: bool
) -> None:
    """Empty texts stand for empty lines; of the reader line by line, each row is one line."""
    content, wanted = f"path,note{end}", []
    for number, text in enumerate(texts):
        text = text.replace("\n", "").replace("\r", "") if one_by_one else text
        if text:
            wanted.append(content.count("\n") + 1)
            content += f'{number},"{text.replace(chr(34), 2 * chr(34))}"'
        content += end
    (tmp_path / "t.csv").write_bytes(content.encode())
    left = LeftOut(one_by_one)
    rows = read_table(tmp_path / "t.csv", (), left)["path"]
    assert [left.place(row) for row in range(len(rows))] == [f"line {each}" for each in wanted]
    (tmp_path / "t.csv").write_bytes(content.encode() + b"x,y,z")
    last = f"line {content.count(chr(10)) + 1}"
    if one_by_one:
        read_table(tmp_path / "t.csv", (), left)
        assert left.reasons[0].why.endswith(f"such as {last}")
    else:
        with pytest.raises(SourceError, match=f"{last} has 3 columns, but the first has 2"):
            read_table(tmp_path / "t.csv", (), left)


def test_a_line_that_cannot_be_read_alone_is_counted(tmp_path: Path) -> None:
    file, left = tmp_path / "t.csv", LeftOut(one_by_one=True)
    long = "x" * (2**16 - 3)
    lines = ["file,label", "a,1", 'b,"2', "c", "d,4,5", f"{long},1", f"{long}x,11", "f,6"]
    file.write_text("\n".join(lines))
    found = read_table(file, (), left)
    # A line may have 65536 bytes, and its delimiter and value are two of them.
    assert found["file"] == ["a", long, "f"]
    assert found["label"] == ["1", "1", "6"]
    ((count, why),) = [(each.count, each.why) for each in left.reasons]
    assert count == 4
    assert why.startswith(
        f"4 lines of '{file}' cannot be read on their own, or have another number"
    )
    # Without noise the first uneven line ends it, by its number.
    file.write_text("file,label\na,1\nc\n")
    with pytest.raises(SourceError, match=r"read \(line 3 has 1 columns, but the first has 2\)"):
        read_table(file, (), LeftOut())


def test_different_invalid_bytes_stay_different_texts(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"file,label\n\xff,1\n\xfe,2\n")
    found = read_table(file, (), LeftOut(one_by_one=True))["file"]
    assert found == ["\udcff", "\udcfe"]
    with pytest.raises(SourceError, match="is not UTF-8: line 2 holds the byte 0xff, as Latin-1"):
        read_table(file, (), LeftOut())
    file.write_bytes(b"f\xe9,label\n")
    for read in (lambda: csv_header(file), lambda: read_table(file, (), LeftOut(one_by_one=True))):
        with pytest.raises(SourceError, match="its first line holds the byte 0xe9"):
            read()
    file.write_bytes(b"\xef\xbb\xbffile,label\nok,1\n\n\xe4,2\n")
    with pytest.raises(SourceError, match="line 4 holds the byte 0xe4"):
        read_table(file, (), LeftOut())


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("file,label\n".encode("utf-16"), "UTF-16, or no text"),
        (b"\xfe\xff\0f", "UTF-16, or no text"),
        (b"f\0i\0\n", "UTF-16, or no text"),
        (b"PK\3\4\xff", "a workbook of a spreadsheet, or a ZIP archive"),
        (b"\xd0\xcf\x11\xe0", "a workbook of a spreadsheet, in its old form"),
        (b"\x1f\x8b\xff", "compressed by gzip"),
        (b"PAR1\xff", "a parquet file"),
    ],
)
def test_a_file_that_is_no_table_is_named_by_what_it_is(
    tmp_path: Path, content: bytes, what: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(content)
    reads: tuple[Callable[[], object], ...] = (
        lambda: csv_header(file),
        lambda: read_table(file, (), LeftOut()),
        lambda: read_table(file, (), LeftOut(one_by_one=True)),
    )
    for read in reads:
        with pytest.raises(SourceError, match=f"is {what}; save it as CSV UTF-8 with commas"):
            read()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_table_of_text_is_text_and_one_of_parquet_has_types(
    tmp_path: Path, one_by_one: bool
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("id , age,label\n07,41,1\n,42,2.5\n")
    found = read_table(file, ("id", ""), LeftOut(one_by_one))
    assert found == {"id": ["07", ""], "age": ["41", "42"], "label": ["1", "2.5"]}
    for content in ("", "\n\n"):
        file.write_text(content)
        with pytest.raises(SourceError, match="its first line names no columns"):
            read_table(file, (), LeftOut(one_by_one))
    table = pa.table({" id": ["07", None], "age": [41.0, None], "half": [2.5, 3.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    read = read_table(tmp_path / "t.parquet", (), LeftOut(one_by_one))
    assert read == {"id": ["07", None], "age": [41, None], "half": [2.5, 3]}
    assert type(read["age"][0]) is (int if one_by_one else float)
    assert type(read["half"][0]) is float
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        SourceError, match=r"t\.parquet' is not a readable parquet file \(.*\); write"
    ):
        read_table(tmp_path / "t.parquet", (), LeftOut())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_value_that_python_cannot_hold_removes_no_other(one_by_one: bool) -> None:
    left = LeftOut(one_by_one=one_by_one)
    # Days since 1970: one in the year 60000.
    days = pa.array([0, 21_200_000, None], pa.int32()).cast(pa.date32())
    assert values_of(pa.chunked_array([days]), left) == [datetime.date(1970, 1, 1), None, None]
    texts: list[Any] = [
        pa.array(["a", None, "é"]),
        pa.array(["a", None, "é"], pa.large_string()),
        pa.array(["a", None, "é"]).dictionary_encode(),
    ]
    for each in texts:
        assert values_of(pa.chunked_array([each]), left) == ["a", None, "é"]
    raw = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    assert values_of(pa.chunked_array([raw]), left) == ["\udcff", "\udcfe"]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_name_that_stands_twice_is_refused(tmp_path: Path, one_by_one: bool) -> None:
    (tmp_path / "t.csv").write_text("a,b, a\n1,2,3\n")
    with pytest.raises(DataError, match="has the column 'a' twice"):
        read_table(tmp_path / "t.csv", (), LeftOut(one_by_one=one_by_one))
