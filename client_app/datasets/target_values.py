"""Columns of a source that hold the target of each record, where this is not its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.identity import name_of
from fedsurrogate.common.targets.target import Target

from .left_out import LeftOut, SourceError, is_file
from .names import SAVE
from .system_files import of_system

# Endings of files that hold tables which no reader here takes.
OTHER_TABLES = (
    *(".xls", ".xlsx", ".xlsm", ".xlsb", ".ods", ".numbers", ".tab", ".feather", ".arrow", ".orc"),
    *(
        ".dta",
        ".sav",
        ".sas7bdat",
        ".rds",
        ".rdata",
        ".csv.gz",
        ".csv.zip",
        ".tsv.gz",
        ".parquet.gz",
    ),
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
        if path.name.lower().endswith(OTHER_TABLES) and not of_system(path.name) and is_file(path)
    )
    if others:
        raise SourceError(
            f"'{root}' has the table {others[0]!r}, which is not read; {SAVE}, or move it away if "
            "folders name the classes"
        )
    if target is not None:
        raise SourceError(
            f"'{root}' has no table, and target = {target.name!r} needs one, with the columns "
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
        return TRUTHS[text.casefold()] if text.casefold() in TRUTHS else float(text)
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
