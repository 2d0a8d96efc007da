"""Entries of a ledger, each chained to the one before by its hash."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

Entry = dict[str, Any]


def chained(previous: Entry | None, fields: Entry) -> Entry:
    """The entry that follows `previous`: with its time, its place and both hashes."""
    entry = fields | {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sequence": previous["sequence"] + 1 if previous else 0,
        "previous": previous["hash"] if previous else "",
    }
    return entry | {"hash": digest(entry)}


def canonical(entry: Entry) -> bytes:
    """An entry as it stands in its line; the same entry always gives the same bytes."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()


def digest(entry: Entry) -> str:
    """The hash of an entry: of everything in it but the hash itself."""
    return hashlib.sha256(canonical({key: value for key, value in entry.items() if key != "hash"})).hexdigest()
