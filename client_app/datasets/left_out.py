"""Records that cannot be used: a reason to refuse all of them, or, in a private run, left out one by one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from common.errors import DataError

log = logging.getLogger("fedsurrogate.site")


class LeftOut:
    """What a reader found wrong with single records.

    one_by_one: leave such records out. Without it the first finding raises DataError: a person is there to correct it. In a
    private run the answer must not show that one record is broken, and the other records still count.
    rows: the reader's own indices of what is left out. reasons: for the site's log and `site doctor`.
    """

    def __init__(self, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self.rows: set[int] = set()
        self.reasons: list[str] = []

    def note(self, rows: Iterable[int], why: str) -> None:
        """Leave these rows out for this reason; nothing happens without a row. Raises DataError where all are refused."""
        found = set(rows)
        if found:
            self.note_unread(len(found), why)
            self.rows |= found

    def note_unread(self, count: int, why: str) -> None:
        """The same for records that have no row, because the reader could not even take them in."""
        if not count:
            return
        if not self.one_by_one:
            raise DataError(why)
        log.error("left out in this private run: %s", why)
        self.reasons.append(why)

    def kept(self, count: int) -> list[int]:
        """The rows of `count` that stay."""
        return [row for row in range(count) if row not in self.rows]
