"""Receipts: what a site shows its coordinator of its ledger, and what the coordinator shows the site again later.

A receipt says how long the ledger was after a release, and holds a tag of its last entry under a secret of the site. Only
the site can make or check the tag. A coordinator that shows the last receipt again lets the site notice that its ledger is
older than what it has released. `opened`, the time when a person began the ledger, orders the ledgers of one site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import SurrogateError

# Of one site: its data sets, and ledgers that were begun anew.
MOST_RECEIPTS = 32
FORM = re.compile(r"([0-9a-f]{32}):([0-9]{1,11}):([0-9]{1,9}):([0-9a-f]{64})")


@dataclass(frozen=True)
class Receipt:
    """ledger: an opaque name of it. opened: seconds since 1970. length: entries, header included. tag: of the last one."""

    ledger: str
    opened: int
    length: int
    tag: str

    def __str__(self) -> str:
        return f"{self.ledger}:{self.opened}:{self.length}:{self.tag}"


def parse_receipt(text: object) -> Receipt:
    """Undo `str(receipt)`. Raises SurrogateError for anything else."""
    found = FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise SurrogateError(f"a receipt that cannot be read: {str(text)[:60]!r}")
    ledger, opened, length, tag = found.groups()
    return Receipt(ledger, int(opened), int(length), tag)


def join_receipts(receipts: Iterable[Receipt]) -> str:
    """Several receipts in one text."""
    return ",".join(map(str, receipts))


def parse_receipts(text: object) -> list[Receipt]:
    """Undo `join_receipts`. Raises SurrogateError for anything else, and for more than a site can have."""
    if text == "":
        return []
    parts = text.split(",", MOST_RECEIPTS) if isinstance(text, str) else [text]
    if len(parts) > MOST_RECEIPTS:
        raise SurrogateError(f"more than {MOST_RECEIPTS} receipts")
    return [parse_receipt(part) for part in parts]
