"""Tables: those next to images, with the label, patient or split of each file; and columns of
images in parquet files.
"""

from __future__ import annotations

import csv
import io
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.names import SAVE, column_names
from fedsurrogate.client_app.datasets.one_record import attempt
from fedsurrogate.client_app.datasets.whole_site import SourceError
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.identity import normal
from fedsurrogate.common.targets.target import Target

# Longest line in bytes that is read when lines are left out one by one.
LONGEST_LINE = 2**16
BOM = b"\xef\xbb\xbf"
# First bytes of what is given a name of a table.
MARKS = (
    (b"\xff\xfe", "UTF-16, or no text"),
    (b"\xfe\xff", "UTF-16, or no text"),
    (b"PK\3\4", "a workbook of a spreadsheet, or a ZIP archive"),
    (b"\xd0\xcf\x11\xe0", "a workbook of a spreadsheet, in its old form"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"PAR1", "a parquet file"),
)
# How invalid bytes in a text are kept, so that different bytes stay different texts.
KEPT_BYTES = "surrogateescape"
# Records in row groups that stay in memory: threads decode fewer at a time.
KEPT = 2048


class ParquetImages:
    """The image column of parquet files, read on first use and by row groups, of which those used
    last stay in memory.
    """

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self._files, self._column = files, column
        self._lock = threading.Lock()
        # Each row group: its file, its number there, and its first record.
        self._groups: list[tuple[Any, int]] = []
        self._first: list[int] = []
        self._read: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the files itself.
        return ParquetImages, (self._files, self._column)

    def read(self, index: int) -> bytes:
        """The bytes of a record's image; safe in threads. Raises OSError for a record without
        image.
        """
        with self._lock:  # Otherwise each decoding thread would read the files.
            if not self._groups:
                self._find_groups()
            group = bisect_right(self._first, index) - 1
            values = self._read.pop(group, None)
            if values is None:
                file, number = self._groups[group]
                values = file.read_row_group(number, columns=[self._column]).column(0)
            self._read[group] = values
            while (
                sum(map(len, self._read.values())) - len(oldest := next(iter(self._read.values())))
                >= KEPT
            ):
                self._read = {each: kept for each, kept in self._read.items() if kept is not oldest}
        value = values[index - self._first[group]]
        # Of a structure its bytes alone: nothing else in it, such as a path, may make it unusable.
        content = (value["bytes"] if hasattr(value, "keys") else value).as_py()
        if not isinstance(content, bytes):
            raise OSError("the record holds no image bytes")
        return content

    def _find_groups(self) -> None:
        with needed_for("data = 'parquet'"):
            import pyarrow.parquet as pq

        groups: list[tuple[Any, int]] = []
        first, records = [], 0
        for file in map(pq.ParquetFile, self._files):
            for number in range(file.num_row_groups):
                groups.append((file, number))
                first.append(records)
                records += file.metadata.row_group(number).num_rows
        # Only now: if a file cannot be opened, the next read looks again at all of them.
        self._groups, self._first = groups, first


def is_parquet(file: Path) -> bool:
    """Whether a table is a parquet file, by its name; others are CSV."""
    return file.suffix.lower() == ".parquet"


def check_cells(file: Path, schema: Any, wanted: Iterable[str]) -> None:
    """Refuse columns whose cells are neither texts, numbers nor truth values: their type decides this,
    and no record.

    Args:
        file: a parquet file.
        schema: of it.
        wanted: names of the columns that are read.

    Raises:
        DataError: with the column, its type, and what to do.
    """
    with needed_for(f"the table '{file}'"):
        import pyarrow as pa

    names = set(wanted)
    for field in schema:
        kind = field.type
        if normal(field.name) not in names:
            continue
        if pa.types.is_duration(kind):
            todo = "write durations as numbers of one unit, such as column.dt.days of pandas"
        elif pa.types.is_temporal(kind):
            todo = "write dates as texts, or as the number of days since the record began"
        elif pa.types.is_nested(kind):
            todo = (
                "write one value in a cell; a list of several labels is read with target = 'labels', if "
                "it is the column label-column and label-columns are no columns of the table"
            )
        else:
            continue
        raise SourceError(
            f"the column {field.name!r} of '{file}' holds cells of type {kind}, and texts, numbers and "
            f"truth values are read; {todo}"
        )


def with_labels(table: Any, label_column: str, target: Target | None) -> Any:
    """A table of pyarrow with a column of truth values for each label of the run, where one column
    holds lists of those that are present. The type of that column decides this, and no record.

    Args:
        table: with the columns of a file.
        label_column: may hold lists; a label that is not in a list is absent, and where a record has
            no list it is not annotated.
        target: of the run; lists are labels, where it has its columns nowhere else.
    """
    with needed_for("a table"):
        import pyarrow as pa

    names = list(map(normal, table.column_names))
    if target is None or not target.gaps or label_column not in names:
        return table
    column = table.column(names.index(label_column))
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not lists or {*names} & {*target.columns}:
        return table
    cells = values_of(column, LeftOut())
    found = [own if own is None else {normal(str(each)) for each in own} for own in cells]
    for name in target.columns:
        present = pa.array([own if own is None else name in own for own in found], pa.bool_())
        table = table.append_column(name, present)
    return table


def read_table(
    file: Path, texts: Iterable[str], left: LeftOut, label_column: str = ""
) -> dict[str, list[Any]]:
    """The columns of a CSV or parquet table.

    An error does not contain the content of a row, because that may identify a patient.

    Args:
        file: the table.
        texts: columns that stay as written: 07 is not 7.
        left: collects unusable records.
        label_column: as for `with_labels`.

    Raises:
        DataError: for a file that is not a table, and for a line with too many or too few columns
            unless records are left out one by one.
    """
    left.place = LeftOut().place
    if left.one_by_one and not is_parquet(file):
        return _line_by_line(file, left)
    return _whole(file, texts, left, label_column)


def _line_by_line(file: Path, left: LeftOut) -> dict[str, list[Any]]:
    """Columns of a CSV file as texts; each line is read on its own.

    Nothing in one line, such as an open quote or invalid bytes, changes how another line is read: a
    new record must not remove others. So a quoted value that continues on the next line is left out
    as well. Invalid bytes stay what they are: two patient IDs must not become one.
    """
    names, delimiter = csv_header(file)
    lines = file.read_bytes().removeprefix(BOM).split(b"\n")
    rows: list[list[str]] = []
    numbers: list[int] = []
    unread: list[int] = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        values = _values(line, delimiter)
        if values is None or len(values) != len(names):
            unread.append(number)
        else:
            rows.append(values)
            numbers.append(number)
    left.note_unread(
        len(unread),
        f"{len(unread)} lines of '{file}' cannot be read on their own, or have another number of "
        f"columns, such as line {min(unread, default=0)}",
    )
    left.place = _places(lambda: numbers)
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def _places(lines: Callable[[], Sequence[int]]) -> Callable[[int], str]:
    """Where the rows of a CSV file are: lines as an editor counts them, of which the names are the
    first.
    """
    return lambda row: f"line {lines()[row]}" if row < len(lines()) else f"row {row + 1}"


def _lines(content: bytes, delimiter: str) -> list[int]:
    """The line in which each row begins: a value in quotes may have several, and some are empty."""
    read = csv.reader(
        io.StringIO(content.decode("utf-8", KEPT_BYTES), newline=""), delimiter=delimiter
    )
    starts, last = [], 0
    with suppress(csv.Error):
        for row in read:
            starts += [last + 1] if row else []
            last = read.line_num
    return starts[1:]


def _values(line: bytes, delimiter: str) -> list[str] | None:
    """The values of one line; None if it cannot be read."""
    if len(line) > LONGEST_LINE:
        return None
    try:
        text = line.decode("utf-8", KEPT_BYTES).rstrip("\r")
        return next(csv.reader([text], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return None


def _whole(
    file: Path, texts: Iterable[str], left: LeftOut, label_column: str
) -> dict[str, list[Any]]:
    with needed_for(f"the table '{file}'"):
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet as pq

    uneven: list[tuple[int | None, int, int]] = []

    def note(row: Any) -> str:
        uneven.append((row.number, row.actual_columns, row.expected_columns))
        return "skip" if left.one_by_one else "error"

    whole = is_parquet(file)
    content, (header, delimiter) = (b"", ([], ",")) if whole else (_text(file), _header(file))
    chosen = {normal(name) for name in texts if name}
    if not whole:
        left.place = _places(cache(lambda: _lines(content, delimiter)))
    try:
        table = (
            pq.read_table(file)
            if whole
            else pyarrow.csv.read_csv(
                pa.BufferReader(content),
                read_options=pyarrow.csv.ReadOptions(use_threads=False),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=delimiter, invalid_row_handler=note
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types={name: pa.string() for name in header if normal(name) in chosen}
                ),
            )
        )
    except pa.ArrowException as error:
        why = (
            f"{left.place((uneven[0][0] or 2) - 2)} has {uneven[0][1]} columns, but the first has "
            f"{uneven[0][2]}"
            if uneven
            else str(error)
        )
        raise SourceError(f"table '{file}' cannot be read ({why}); write it again") from None
    left.note_unread(
        len(uneven),
        f"{len(uneven)} lines of '{file}' have another number of columns than the first",
    )
    table = with_labels(table, label_column, left.target)
    check_cells(file, table.schema, chosen)
    names = column_names(file, table.column_names)
    return {name: values_of(table.column(at), left) for at, name in enumerate(names)}


def _no_text(content: bytes) -> str:
    """What a file is that is no CSV table, by its first bytes; empty for text."""
    for mark, what in MARKS:
        if content.startswith(mark):
            return what
    return "UTF-16, or no text" if b"\0" in content.partition(b"\n")[0] else ""


def _text(file: Path) -> bytes:
    """The content of a CSV file. Raises DataError unless it is UTF-8."""
    content = file.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if found := _no_text(content):
            raise SourceError(f"'{file}' is {found}; {SAVE}") from None
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"'{file}' is not UTF-8: line {line} holds the byte 0x{content[error.start]:02x}, as "
            f"Latin-1 or Windows-1252 write a letter; {SAVE}"
        ) from None
    return content


def csv_header(file: Path) -> tuple[list[str], str]:
    """The names of the columns of a CSV file, and the character between them; no line but the
    first is read.

    Args:
        file: the table. Between names are commas, semicolons or tabs, whichever the first line
            has most of; commas where it does not decide.

    Raises:
        DataError: for a first line that is not UTF-8, or names a column twice.
    """
    names, delimiter = _header(file)
    return column_names(file, names), delimiter


def _header(file: Path) -> tuple[list[str], str]:
    """As `csv_header`, with the names as they are written."""
    with file.open("rb") as lines:
        first = lines.readline(LONGEST_LINE + 4)
    line = first.removeprefix(BOM).rstrip(b"\n")
    if found := _no_text(first):
        raise SourceError(f"'{file}' is {found}; {SAVE}")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"'{file}' is not UTF-8: its first line holds the byte 0x{line[error.start]:02x}; "
            f"{SAVE}"
        ) from None
    # A name in quotes may hold any of them, and another name a few.
    bare = re.sub(rb'"[^"]*"', b"", line)
    counts = {each: bare.count(each.encode()) for each in (",", ";", "\t")}
    most = [each for each, count in counts.items() if count == max(counts.values())]
    delimiter = most[0] if len(most) == 1 else ","
    return _values(line, delimiter) or [], delimiter


def values_of(column: Any, left: LeftOut) -> list[Any]:
    """The values of a column of a table, so that one odd value does not remove the others.

    Args:
        column: of pyarrow.
        left: whether records are left out one by one. Then whole numbers are integers, because one
            gap makes a column of integers one of floating point.

    Returns:
        The values. Invalid bytes in a text are kept; a value that Python cannot hold (a date in the
        year 60000) is None.
    """
    with needed_for("a table"):
        import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        kind, column = kind.value_type, column.cast(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [
            None if value is None else value.decode("utf-8", KEPT_BYTES)
            for value in column.cast(pa.large_binary()).to_pylist()
        ]
    together = attempt(column.to_pylist)
    if isinstance(together, BaseException):
        together = [attempt(value.as_py) for value in column]
    plain = [None if isinstance(value, BaseException) else value for value in together]
    return [_whole_number(value) for value in plain] if left.one_by_one else plain


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
