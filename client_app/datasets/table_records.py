"""From the columns of any source to its records: what each row says of class or target, split, site,
patient and bag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.names import names_in
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.datasets.source import DataSource, some
from fedsurrogate.client_app.datasets.tables import listed_labels
from fedsurrogate.client_app.datasets.target_values import values_in
from fedsurrogate.client_app.datasets.whole_site import SourceError
from fedsurrogate.common.identity import name_of, normal


@dataclass(frozen=True, eq=False)
class SourceTable:
    """Rows of a source, whatever its format; `LeftOut.place` says where each is.

    Attributes:
        file: that holds them, for errors; the first of two.
        columns: the cells of each row, by the normal name of the column.
    """

    file: Path
    columns: Mapping[str, Sequence[Any]]

    def rows(self, chosen: Sequence[int]) -> SourceTable:
        """The table of some rows, in this order."""
        columns = {name: [own[row] for row in chosen] for name, own in self.columns.items()}
        return replace(self, columns=columns)

    def records(self, source: DataSource, left: LeftOut) -> Records:
        """A record for each row, without a key, images or features.

        Args:
            source: names the columns; all but `split` must be there.
            left: collects rows that cannot be used.

        Raises:
            DataError: for such a row, unless records are left out one by one.
        """
        columns, file = self.columns, self.file

        def names(column: str | None, what: str) -> tuple[str, ...] | None:
            return names_in(columns[column], what, left) if column else None

        values, labels = None, list[str]()
        if source.target is None:
            own = source.label_column
            what = f"label ({own!r} of '{file}')"
            lists = [row for row, cell in enumerate(columns[own]) if listed_labels(cell)]
            left.note(
                lists,
                f"{len(lists)} rows of '{file}' hold a list of labels in {own!r}, such as "
                f"{left.where(lists)}; write one class in a cell, or learn lists with target = 'labels'",
            )
            labels += names_in(columns[own], what, left, source.classes)
        else:
            values = values_in(columns, source.target, file, left)
            labels += map(str, values.tolist())
        return Records(
            labels,
            "",
            split_of(columns.get("split"), file, left),
            names(source.site_column, f"site ({source.site_column!r} of '{file}')"),
            patients=names(
                source.patient_column, f"patient ID (patient-column = {source.patient_column!r})"
            ),
            values=values,
            bags=names(source.bags, f"bag (bag-column = {source.bags!r})"),
        )


def split_of(cells: Sequence[Any] | None, file: Path, left: LeftOut) -> Tensor | None:
    """The split of a table's rows.

    Args:
        cells: of the column 'split'; None without it.
        file: the table.
        left: collects unusable records.

    Returns:
        (n,) bool, True for training; None without the column.

    Raises:
        DataError: for other values than 'train' and 'test'.
    """
    if cells is None:
        return None
    given = [normal(cell) if isinstance(cell, str) else cell for cell in cells]
    unknown = [row for row, cell in enumerate(given) if cell not in ("train", "test")]
    values = sorted({str(given[row]) for row in unknown})
    left.note(
        unknown, f"column 'split' of '{file}' holds {some(values)}; allowed are 'train' and 'test'"
    )
    return torch.tensor([cell == "train" for cell in given], dtype=torch.bool)


def with_declared(
    records: Records,
    numbers: Sequence[Any],
    files: Sequence[Path],
    sizes: Sequence[int],
    declared: Sequence[Iterable[str]],
    left: LeftOut,
) -> Records:
    """Records of one file, or of the two of a split, whose numbers are those of classes that the
    files declare. A file without a list has that of the other.

    Args:
        records: of all files.
        numbers: cells of the label column; what is no whole number stays a name.
        files: one or two.
        sizes: number of records of each.
        declared: names of the classes of each.
        left: collects unusable records.

    Raises:
        DataError: for a class named twice, a number beyond the list, or two lists of which none has
            all classes of the other.
    """
    lists = [_classes(file, names) for file, names in zip(files, declared, strict=True)]
    longest = max(lists, key=len)
    for file, own in zip(files, lists, strict=True):
        if set(own) - set(longest):
            raise SourceError(
                f"'{file}' names the classes {some(own)}, and '{files[lists.index(longest)]}' names "
                f"{some(longest)}; write both with the same names"
            )
    is_train = split_by_size(sizes)
    if not longest:
        return replace(records, is_train=is_train)
    of_row = list(
        chain(*(repeat(own or longest, size) for own, size in zip(lists, sizes, strict=True)))
    )
    named = [isinstance(number, int) for number in numbers]
    wrong = [
        row
        for row, (number, own) in enumerate(zip(numbers, of_row, strict=True))
        if named[row] and not 0 <= number < len(own)
    ]
    for row in wrong[:1]:
        left.note(
            wrong,
            f"'{files[row >= sizes[0]]}' names {len(of_row[row])} classes but has the label "
            f"{numbers[row]}; labels go from 0 to that number - 1",
        )
    labels = [
        of_row[row][numbers[row]] if named[row] and row not in left.rows else label
        for row, label in enumerate(records.labels)
    ]
    return replace(records, labels=labels, classes=longest, is_train=is_train)


def _classes(file: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Classes that a file declares, in their normal form."""
    classes = tuple(name for each in names if (name := name_of(each, (normal(each),))))
    if len(set(classes)) < len(classes):
        raise SourceError(f"'{file}' names a class twice ({some(classes)}); write it again")
    return classes


def split_by_size(sizes: Sequence[int]) -> Tensor | None:
    """Return (n,) bool, True for the records of the first of two files; None for one file, which
    makes no split.
    """
    return None if len(sizes) == 1 else torch.arange(sum(sizes)) < sizes[0]
