"""Names in columns of a source: classes, patients and sites in their normal form, or left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsurrogate.common.identity import is_text, name_of, normal

from .left_out import LeftOut, SourceError

SAVE = "save it as CSV UTF-8 with commas"


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
    for row, value in enumerate(values):
        try:
            name = name_of(value, known)
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
