"""Tables: those next to images, with the label, patient or split of each file; and columns of
images in parquet files.
"""

from __future__ import annotations

import csv
import io
import re
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.identity import is_text, name_of, normal
from fedsurrogate.common.targets.target import Target

from .left_out import LeftOut, SourceError, attempt, is_file, of_system

SAVE = "save it as CSV UTF-8 with commas"
# Types of cells of which equal ones have one name. Those of single and double precision have not.
ALIKE = {str, int, np.str_, np.int32, np.int64}


def names_in(
    values: Sequence[object], what: str, left: LeftOut, known: Iterable[str] = ()
) -> tuple[str, ...]:
    """The name in each row of a column; rows without one are left out or refused.

    Each name depends on its own cell alone.

    Args:
        values: of the column.
        what: they name, and where they are, for the report.
        left: collects unusable records.
        known: names even if they stand for a missing value elsewhere.

    Returns:
        A name for each row; empty for one that is left out.
    """
    names: list[str] = []
    gaps: list[int] = []
    strange: dict[str, list[int]] = {}
    # A thousand records have ten classes.
    once, known = lru_cache(1024)(name_of), tuple(known)
    for row, value in enumerate(values):
        try:
            name = (once if type(value) in ALIKE else name_of)(value, known)
            if name is None:
                gaps.append(row)
            elif not (left.one_by_one or is_text(name)):
                raise TypeError("a text that is not UTF-8")
        except TypeError as error:
            name = None
            strange.setdefault(str(error).partition(":")[0], []).append(row)
        names.append(name or "")
    left.note(
        gaps,
        f"{len(gaps)} of {len(values)} records have no {what}, such as {left.where(gaps)}; "
        "fill it in, or remove them",
    )
    for kind, rows in strange.items():
        left.note(
            rows,
            f"{len(rows)} of {len(values)} records have {kind} as {what}, such as "
            f"{left.where(rows)}; correct it",
        )
    return tuple(names)


def name_or_blank(value: object, known: Iterable[str] = ()) -> str:
    """The name in one cell; empty where it has none, for comparing rows.

    Args:
        value: of the cell.
        known: as in `names_in`.
    """
    try:
        return name_of(value, known) or ""
    except TypeError:
        return ""


def column_names(file: Path, given: Iterable[str]) -> list[str]:
    """Names of a table's columns in their normal form.

    Args:
        file: the table.
        given: names in its header.

    Raises:
        DataError: for a name that stands twice; the header decides this, and no record.
    """
    names = [normal(name) for name in given]
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise SourceError(
            f"'{file}' has the column {twice[0]!r} twice (blanks at the ends do not count); rename "
            "or remove one of them"
        )
    return names


# Longest line in bytes that is read when lines are left out one by one; and longest line of names.
LONGEST_LINE, LONGEST_HEADER = 2**16, 2**20
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
# A label in quotes, and a text that lists some, as Python, JSON and numpy write them.
LABEL = r"""'([^'\\]*)'|"([^"\\]*)\""""
LISTED = re.compile(rf"\[\s*(?:(?:{LABEL})(?:[\s,]+|(?=\])))*\]")
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


def parquet_table(
    file: Path,
    wanted: Collection[str],
    label_column: str,
    target: Target | None,
    read: Collection[str] | None = None,
) -> tuple[Any, list[str], Any]:
    """A table of parquet whose wanted columns can be read: their types decide this, and no record.

    Args:
        file: the table.
        wanted: columns whose cells are used.
        label_column: may hold lists of labels, see `_with_labels`.
        target: of the run; None for classes.
        read: columns that are read, if the file has them; all if left out.

    Returns:
        The schema of the file, the normal names of all columns, and a table of pyarrow with those that
        were read.

    Raises:
        DataError: for a file that is none, a name that stands twice, or a column of another type.
    """
    with needed_for(f"the table '{file}'"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
        names = column_names(file, schema.names)
        pairs = zip(schema.names, names, strict=True)
        chosen = None if read is None else [own for own, name in pairs if name in read]
        table = (
            schema.empty_table().select([]) if chosen == [] else pq.read_table(file, columns=chosen)
        )
    except pa.ArrowException as error:
        raise SourceError(
            f"'{file}' is not a readable parquet file ({error}); write it again"
        ) from error
    whole = _with_labels(schema.empty_table().rename_columns(names), label_column, target)
    _check_cells(file, whole.schema, wanted)
    table = table.rename_columns(list(map(normal, table.column_names)))
    return schema, whole.column_names, _with_labels(table, label_column, target)


def _check_cells(file: Path, schema: Any, wanted: Collection[str]) -> None:
    """Refuse columns whose cells are neither texts, numbers nor truth values."""
    with needed_for(f"the table '{file}'"):
        import pyarrow as pa

    for field in schema:
        kind = field.type
        if field.name not in wanted:
            continue
        if pa.types.is_duration(kind):
            todo = "write durations as numbers of one unit, such as column.dt.days of pandas"
        elif pa.types.is_temporal(kind):
            todo = "write dates as texts, or as the number of days since the record began"
        elif pa.types.is_nested(kind):
            todo = (
                "write one value in a cell; a list of several labels is read with task = 'multilabel', if "
                "it is the column label-column and label-columns are no columns of the table"
            )
        else:
            continue
        raise SourceError(
            f"the column {field.name!r} of '{file}' holds cells of type {kind}, and texts, numbers and "
            f"truth values are read; {todo}"
        )


def _with_labels(table: Any, label_column: str, target: Target | None) -> Any:
    """A table of pyarrow with a column of truth values for each label of the run, where one column
    holds lists of those that are present. The type of that column decides this, and no record.

    A label that is not in a list is absent; where a record has no list it is not annotated.
    """
    with needed_for("a table"):
        import pyarrow as pa

    names = table.column_names
    if target is None or label_column not in names:
        return table
    column = table.column(label_column)
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not lists or not of_lists(names, label_column, target):
        return table
    cells = values_of(column, LeftOut())
    for name, present in _present(cells, target).items():
        table = table.append_column(name, pa.array(present, pa.bool_()))
    return table


def of_lists(names: Collection[str], label_column: str, target: Target | None) -> bool:
    """Whether the labels of a run stand in lists in one column: no column has the name of a label.

    Args:
        names: of the columns of a table.
        label_column: that may hold the lists.
        target: of the run; None for classes.
    """
    return bool(
        target and target.gaps and label_column in names and not {*names} & {*target.columns}
    )


def listed_labels(cell: object) -> list[str] | None:
    """The labels in a text that lists them; None for another cell.

    Example:
        >>> listed_labels("['edema', 'mass']"), listed_labels('["edema"]'), listed_labels("[]")
        (['edema', 'mass'], ['edema'], [])
        >>> listed_labels("edema|mass"), listed_labels("[edema]")
        (None, None)
    """
    if not isinstance(cell, str) or not LISTED.fullmatch(cell.strip()):
        return None
    return [single or double for single, double in re.findall(LABEL, cell)]


def _present(
    cells: Sequence[Sequence[object] | None], target: Target
) -> dict[str, list[bool | None]]:
    """By label, whether it is in the list of each record; None for a record without a list."""
    found = [own if own is None else {normal(str(each)) for each in own} for own in cells]
    return {name: [own if own is None else name in own for own in found] for name in target.columns}


def _labels_in_texts(
    file: Path, cells: Sequence[object], label_column: str, target: Target, left: LeftOut
) -> Mapping[str, Sequence[Any]]:
    """A column of truth values for each label of the run, from texts that list those present."""
    listed = [listed_labels(cell) for cell in cells]
    strange = [
        row for row, own in enumerate(listed) if own is None and name_of(cells[row]) is not None
    ]
    left.note(
        strange,
        f"'{file}' has no columns {', '.join(map(repr, target.columns[:5]))}, and {len(strange)} rows "
        f"hold no list of labels in {label_column!r}, such as {left.where(strange)}; write a column of 1 "
        "and 0 for each label, or lists such as ['edema', 'mass'] in every row",
    )
    return _present(listed, target)


def read_table(
    file: Path,
    wanted: Collection[str],
    left: LeftOut,
    label_column: str = "",
    target: Target | None = None,
) -> dict[str, Sequence[Any]]:
    """The columns of a CSV or parquet table: texts of the first, cells of any type of the other.

    An error does not contain the content of a row, because that may identify a patient.

    Args:
        file: the table.
        wanted: columns whose cells are used; none of another type may be among them.
        left: collects unusable records, and learns where a row is.
        label_column: may hold lists of labels.
        target: of the run; None for classes.

    Raises:
        DataError: for a file that is not a table, and for a line with too many or too few columns
            unless records are left out one by one.
    """
    left.place = LeftOut().place
    if not is_parquet(file):
        columns = _read_csv(file, left)
        if target is not None and of_lists(columns, label_column, target):
            columns |= _labels_in_texts(file, columns[label_column], label_column, target, left)
        return columns
    _, _, table = parquet_table(file, {normal(name) for name in wanted}, label_column, target)
    return {name: values_of(table.column(name), left) for name in table.column_names}


def _read_csv(file: Path, left: LeftOut) -> dict[str, Sequence[Any]]:
    """Columns of a CSV file; where records are left out one by one, each line is read on its own.

    Nothing in one line, such as an open quote or invalid bytes, then changes how another line is
    read: a new record must not remove others. So a quoted value that continues on the next line is
    left out as well. Invalid bytes stay what they are: two patient IDs must not become one.
    """
    names, delimiter = csv_header(file)
    content = file.read_bytes().removeprefix(BOM)
    rows: list[list[str]] = []
    lines: list[int] = []
    unread: list[tuple[int, int]] = []
    found = _lines if left.one_by_one else _rows
    for line, cells in found(file, content, delimiter):
        if cells is None or len(cells) != len(names):
            unread.append((line, len(cells or ())))
        else:
            rows.append(cells)
            lines.append(line)
    if unread and not left.one_by_one:
        line, width = unread[0]
        raise SourceError(
            f"table '{file}' cannot be read (line {line} has {width} columns, but the first has "
            f"{len(names)}); write it again"
        )
    left.note_unread(
        len(unread),
        f"{len(unread)} lines of '{file}' cannot be read on their own, or have another number of "
        f"columns, such as line {min(unread, default=(0, 0))[0]}",
    )
    left.place = lambda row: f"line {lines[row]}" if row < len(lines) else f"row {row + 1}"
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    return dict(zip(names, map(list, columns), strict=True))


def _lines(_: Path, content: bytes, delimiter: str) -> Iterator[tuple[int, list[str] | None]]:
    """Each line after the first: its number, and its cells if it can be read alone."""
    lines = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    for number, line in enumerate(lines[1:], 2):
        if line.strip():
            yield number, _cells(line, delimiter) if len(line) <= LONGEST_LINE else None


def _rows(file: Path, content: bytes, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Each row after the first: the line in which it begins, as an editor counts them, and its cells.
    A cell in quotes may have several lines.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"'{file}' is not UTF-8: line {line} holds the byte 0x{content[error.start]:02x}, as "
            f"Latin-1 or Windows-1252 write a letter; {SAVE}"
        ) from None
    read = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    end = 0
    try:
        for cells in read:
            if cells and end:
                yield end + 1, cells
            end = read.line_num
    except csv.Error as error:
        raise SourceError(
            f"table '{file}' cannot be read (line {end + 1}: {error}); write it again"
        ) from None


def _cells(line: bytes, delimiter: str, strict: bool = True) -> list[str] | None:
    """The cells of one line; None if it cannot be read."""
    try:
        text = line.decode("utf-8", KEPT_BYTES)
        return next(csv.reader([text], delimiter=delimiter, strict=strict), [])
    except csv.Error:
        return None


def csv_header(file: Path) -> tuple[list[str], str]:
    """The names of the columns of a CSV file, and the character between them; no line but the
    first is read.

    Args:
        file: the table. Between names are commas, semicolons or tabs, whichever the first line
            has most of; commas where it does not decide.

    Raises:
        DataError: for a first line that is not UTF-8, names nothing, or names a column twice.
    """
    with file.open("rb") as lines:
        first = lines.readline(LONGEST_HEADER)
    line = re.split(rb"[\r\n]", first.removeprefix(BOM))[0]
    marks = [what for mark, what in MARKS if first.startswith(mark)]
    if b"\0" in line:
        marks.append("UTF-16, or no text")
    if marks:
        raise SourceError(f"'{file}' is {marks[0]}; {SAVE}")
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
    names = column_names(file, _cells(line, delimiter, strict=False) or [])
    if not names:
        raise SourceError(
            f"table '{file}' is empty, or its first line names no columns; write their names there"
        )
    return names, delimiter


def values_of(column: Any, left: LeftOut) -> list[Any]:
    """The values of a column of a table, so that one outlier value does not remove the others.

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
    plain: list[Any] = [None if isinstance(each, BaseException) else each for each in together]
    if not left.one_by_one:
        return plain
    return [int(each) if isinstance(each, float) and each.is_integer() else each for each in plain]


# Endings of files that hold tables which no reader here takes.
OTHER_TABLES = re.compile(
    r"\.(xls[xmb]?|ods|numbers|tab|feather|arrow|orc|dta|sav|sas7bdat|rds|rdata|jsonl|ndjson|pkl|pickle|sqlite3?"
    r"|(csv|tsv|parquet|jsonl?)\.(gz|zip|bz2|xz|zst))$|^(labels?|metadata|annotations?)\.(txt|json|xml|db)$",
    re.IGNORECASE,
)
# How truth values are written in a text, by every writer of tables.
TRUTHS = {"true": 1.0, "false": 0.0}


def check_columns(target: Target | None, allowed: Sequence[str]) -> None:
    """Refuse columns that a site does not let runs learn: a run names them, and a table may hold
    columns that are nobody's business.

    Args:
        target: of the run; None for classes, whose column the site itself names.
        allowed: `target-columns` of the site.

    Raises:
        ConfigError: for other columns.
    """
    others = [name for name in ([] if target is None else target.columns) if name not in allowed]
    if others:
        raise ConfigError(
            f"the run learns the column {others[0]!r}, which target-columns in this site's "
            "node-config does not name; add it there if runs may learn it"
        )


def check_table(root: Path, target: Target | None) -> None:
    """Refuse a folder without a table that can be read, where the target of records stands in one, or
    where another file looks like a table: its folders may then be no classes.

    Args:
        root: of the data.
        target: of the run; None for classes, which folders can name.

    Raises:
        DataError: for another target than classes, or for a table in another form.
    """
    others = sorted(
        path.name
        for path in root.iterdir()
        if OTHER_TABLES.search(path.name) and not of_system(path.name) and is_file(path)
    )
    if others:
        raise SourceError(
            f"'{root}' has the table {others[0]!r}, which is not read; {SAVE}, or move it away if "
            "folders name the classes"
        )
    if target is not None:
        raise SourceError(
            f"'{root}' has no table, and task = {target.name!r} needs one, with the columns "
            f"{_named(target)}"
        )


def values_in(
    columns: Mapping[str, Sequence[Any]], target: Target, file: Path, left: LeftOut
) -> Tensor:
    """The values of each row, of which unusable ones are left out or refused.

    Args:
        columns: of a table, by name.
        target: of the run.
        file: the table, for the report.
        left: collects unusable records.

    Returns:
        (n, k), float64; NaN for what is missing, and for what is left out.
    """
    strange: dict[str, list[int]] = {}
    read = []
    for name in target.columns:
        numbers = []
        for row, cell in enumerate(columns[name]):
            number = number_in(cell)
            if number is None:
                strange.setdefault(name, []).append(row)
            numbers.append(float("nan") if number is None else number)
        read.append(numbers)
    for name, rows in strange.items():
        left.note(
            rows,
            f"{len(rows)} rows of '{file}' hold no number in {name!r}, such as {left.where(rows)}; "
            "numbers, True and False are read, and empty cells are missing; correct it",
        )
    values = torch.tensor(read, dtype=torch.float64).T.contiguous()
    return checked(values.reshape(-1, len(target.columns)), target, str(file), left)


def number_in(cell: object) -> float | None:
    """The number in a cell, NaN where it is empty; None for anything else.

    Example:
        >>> number_in(" 2.50 "), number_in(True), number_in("n/a"), number_in("mild")
        (2.5, 1.0, nan, None)
        >>> number_in("True"), number_in("FALSE")
        (1.0, 0.0)
    """
    try:
        if isinstance(cell, bool | int | float):
            return float(cell)
        text = name_of(cell)
        if text is None:
            return float("nan")
        # Python alone reads 1_2 as a number.
        return (
            TRUTHS[text.casefold()] if text.casefold() in TRUTHS else float(text.replace("_", "?"))
        )
    except (TypeError, ValueError, OverflowError):
        return None


def checked(values: Tensor, target: Target, where: str, left: LeftOut) -> Tensor:
    """Values, after records with faults have been left out or refused.

    Args:
        values: (n, k), float64.
        target: of the run.
        where: they are, for the report.
        left: collects unusable records.

    Returns:
        The values.
    """
    # Where a record may be annotated for some labels only, missing values are the normal case.
    faults = {} if target.gaps else {"no value": values.isnan().any(1)}
    for what, wrong in {**faults, **target.faults(values)}.items():
        rows = wrong.nonzero().flatten().tolist()
        left.note(
            rows,
            f"{len(rows)} of {len(values)} records have {what} in {_named(target)} of '{where}', "
            f"such as {left.where(rows)}; correct it, or leave the record out",
        )
    return values


def _named(target: Target) -> str:
    shown = ", ".join(map(repr, target.columns[:5]))
    return shown + (", ..." if len(target.columns) > 5 else "")
