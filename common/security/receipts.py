"""Receipts of a site's ledger: the site sends them to the coordinator, and the coordinator returns
the latest one later.

A receipt contains the length of the ledger after a release, and a tag of its last entry, made with
a secret of the site. Only the site can make or check the tag. When the coordinator returns the
latest receipt, the site can detect that its ledger was rolled back. `opened`, the time when a
person opened the ledger, orders the ledgers of one site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fedsurrogate.common.errors import SurrogateError

# Maximum number of receipts of one site: one per data set, and one for each restarted ledger.
MOST_RECEIPTS = 32
FORM = re.compile(r"([0-9a-f]{32}):([0-9]{1,11}):([0-9]{1,9}):([0-9a-f]{64})")


@dataclass(frozen=True)
class Receipt:
    """A receipt of a site's ledger.

    Attributes:
        ledger: its opaque name.
        opened: seconds since 1970.
        length: entries, header included.
        tag: of the last entry.
    """

    ledger: str
    opened: int
    length: int
    tag: str

    def __str__(self) -> str:
        return f"{self.ledger}:{self.opened}:{self.length}:{self.tag}"


def parse_receipt(text: object) -> Receipt:
    """Parse the text `str(receipt)`.

    Raises:
        SurrogateError: for anything else.
    """
    match = FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SurrogateError(f"a receipt that cannot be read: {str(text)[:60]!r}")
    ledger, opened, length, tag = match.groups()
    return Receipt(ledger, int(opened), int(length), tag)


def join_receipts(receipts: Iterable[Receipt]) -> str:
    """Several receipts in one text."""
    return ",".join(map(str, receipts))


def parse_receipts(text: object) -> list[Receipt]:
    """Parse the text of `join_receipts`.

    Raises:
        SurrogateError: for anything else, and for more than MOST_RECEIPTS.
    """
    if text == "":
        return []
    parts = text.split(",", MOST_RECEIPTS) if isinstance(text, str) else [text]
    if len(parts) > MOST_RECEIPTS:
        raise SurrogateError(f"more than {MOST_RECEIPTS} receipts")
    return [parse_receipt(part) for part in parts]
