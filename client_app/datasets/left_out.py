"""Unusable records: they make a site refuse all records, or, in a private run, are left out one by
one. Either way they are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fedsurrogate.client_app.datasets.one_record import printable
from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.errors import DataError


def _numbered(row: int) -> str:
    return f"row {row + 1}"


class LeftOut:
    """Unusable records that a reader found.

    Args:
        one_by_one: leave such records out. Otherwise the first one raises DataError, so that a
            person corrects it. In a private run the reply must not show that a record is broken,
            and the other records still count.

    Attributes:
        rows: the reader's own indices of records that are left out.
        reasons: for the data report: of each record or file one.
        odd: remarks for it.
        place: where a row of the reader is, in words; a table of text sets its lines.

    Example:
        >>> left = LeftOut(one_by_one=True)
        >>> left.note([1], "record 1 is broken")
        >>> left.kept(3), left.reasons[0].count
        ([0, 2], 1)
    """

    def __init__(self, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self.rows: set[int] = set()
        self.reasons: list[Loss] = []
        self.odd: list[str] = []
        self.place: Callable[[int], str] = _numbered

    def where(self, rows: Collection[int]) -> str:
        """Where the first of some rows is, such as "line 3"; empty without any.

        Args:
            rows: the reader's own indices.
        """
        return self.place(min(rows)) if rows else ""

    def note(self, rows: Iterable[int], why: str) -> None:
        """Leave rows out; no effect without a row.

        Args:
            rows: the reader's own indices.
            why: they are left out, with their number.

        Raises:
            DataError: unless `one_by_one`.
        """
        unusable = set(rows)
        self.note_unread(len(unusable - self.rows), why)
        self.rows |= unusable

    def note_unread(self, count: int, why: str) -> None:
        """The same for records without a row, because the reader could not read them at all.

        Args:
            count: of the records; no effect without one.
            why: they are left out.

        Raises:
            DataError: unless `one_by_one`.
        """
        if count and not self.one_by_one:
            raise DataError(printable(why))
        self.skip(count, why)

    def skip(self, count: int, why: str) -> None:
        """Count files that are no records, which is right in any run.

        Args:
            count: of the files; no effect without one.
            why: they are left out.
        """
        if count:
            self.reasons.append(Loss(printable(why), count))

    def remark(self, why: str) -> None:
        """Remark on what no record can show alone.

        Args:
            why: a person should look at it.

        Raises:
            DataError: unless `one_by_one`.
        """
        if not self.one_by_one:
            raise DataError(printable(why))
        self.odd.append(printable(why))

    def count_once(self, rows: Iterable[int], why: str) -> None:
        """Leave out rows that are copies of others, which is right in any run.

        Args:
            rows: the reader's own indices.
            why: they are left out.
        """
        copies = set(rows)
        self.skip(len(copies - self.rows), why)
        self.rows |= copies

    def kept(self, count: int) -> list[int]:
        """The rows of `count` that are not left out."""
        return [row for row in range(count) if row not in self.rows]
