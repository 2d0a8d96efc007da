"""The table of registered sites: the public key of each site's name, and its node id. The list of
revoked keys. Receipts of a site's ledger.

A SuperLink that authenticates its SuperNodes gives each registered public key one node id. Only the
holder of the private key can act as that node. `coordinator sites register` writes the site name of each
key into the table. Read by commands, which import neither torch nor Flower for it.

A revoked key is never accepted again, also where the SuperLink has lost its database: the list of
fingerprints next to the table only grows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ..errors import SITE_NAME, RunError, SurrogateError
from ..files import READABLE, replace_file

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


# Environment variable of the coordinator's app: the path of the table.
VARIABLE = "FEDSURROGATE_REGISTERED"
TABLE, REVOKED = "registered.json", "revoked-keys.txt"
# A line of the list: a fingerprint, and the site's name for people.
REVOKED_LINE = re.compile(rb"([0-9a-f]{64})( [A-Za-z0-9._-]*)?\n")


@dataclass(frozen=True)
class Registration:
    """A registered site.

    Attributes:
        key: its public key (one line in OpenSSH format).
        node: the node id that the SuperLink assigned to the key.
        expires: until when the SuperLink listens to it, ISO 8601 with a zone; empty: always.
    """

    key: str
    node: int
    expires: str = ""

    def __post_init__(self) -> None:
        # Raises ValueError for another form, and TypeError for no text.
        if self.expires and datetime.fromisoformat(self.expires).tzinfo is None:
            raise ValueError("a time without a zone")

    def expired(self, now: datetime) -> bool:
        """Whether its time is over."""
        return bool(self.expires) and datetime.fromisoformat(self.expires) <= now


def read_table(file: Path) -> dict[str, Registration]:
    """The registered sites by name.

    Args:
        file: in the format of `write_table`.

    Raises:
        RunError: when the file is missing or has another format.
    """
    try:
        table = {
            name: Registration(**each)
            for name, each in json.loads(file.read_text())["sites"].items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{file}: the table of registered sites cannot be read ({type(error).__name__}); the "
            "SuperLink accepts only registered sites; run `coordinator sites register` first, which "
            "writes this table"
        ) from None
    nodes = [each.node if isinstance(each.key, str) else None for each in table.values()]
    # A truth value is a whole number for Python, and no node.
    sound = all(type(node) is int for node in nodes) and all(map(SITE_NAME.fullmatch, table))
    if not sound or len(set(nodes)) < len(nodes):
        raise RunError(
            f"{file}: each site needs a name and a node id of its own; run `coordinator sites register` "
            "again"
        )
    return table


def write_table(file: Path, table: Mapping[str, Registration]) -> None:
    """Replace the table atomically: a run that reads it meanwhile gets the old table or the new
    one.

    Args:
        file: of the table.
        table: the registered sites by name.
    """
    content = {"sites": {name: asdict(table[name]) for name in sorted(table)}}
    replace_file(file, json.dumps(content, indent=2) + "\n", mode=READABLE)


def read_revoked(*files: Path) -> frozenset[str]:
    """Fingerprints of revoked keys.

    Args:
        files: lists of `revoke`; one that is not there is empty.

    Raises:
        RunError: a line of a list is none; then no key may be let in.
        OSError: a list cannot be read.
    """
    found = set[str]()
    for file in files:
        content = file.read_bytes() if file.exists() else b""
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            if (named := REVOKED_LINE.fullmatch(line)) is None:
                raise RunError(
                    f"{file}: the list of revoked keys cannot be read at line {number}; it must be "
                    "64 hexadecimal digits and a site's name: restore it"
                )
            found.add(named[1].decode())
    return frozenset(found)


def revoke(file: Path, keys: Mapping[str, str]) -> None:
    """Append keys to the list of revoked ones, for ever.

    Args:
        file: the list.
        keys: names of sites, perhaps empty, by fingerprints; those that are in the list stay.

    Raises:
        RunError: the list cannot be read or written.
    """
    known = read_revoked(file)
    lines = "".join(f"{key} {name}\n" for key, name in keys.items() if key not in known)
    if not lines:
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, READABLE)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(lines.encode())
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise RunError(f"{file}: the list of revoked keys: {error.strerror}") from None
