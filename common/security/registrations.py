"""The table of registered sites: the public key of each site's name, and its node id.

A SuperLink that authenticates its SuperNodes gives each registered public key one node id. Only the
holder of the private key can act as that node. `coordinator register` writes the site name of each
key into the table. Read by commands, which import neither torch nor Flower for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.files import READABLE, replace_file
from fedsurrogate.common.limits import SITE_NAME

# Environment variable of the coordinator's app: the path of the table.
VARIABLE = "FEDSURROGATE_REGISTERED"
TABLE = "registered.json"


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
            "SuperLink accepts only registered sites; run `coordinator register` first, which "
            "writes this table"
        ) from None
    nodes = [each.node if isinstance(each.key, str) else None for each in table.values()]
    # A truth value is a whole number for Python, and no node.
    sound = all(type(node) is int for node in nodes) and all(map(SITE_NAME.fullmatch, table))
    if not sound or len(set(nodes)) < len(nodes):
        raise RunError(
            f"{file}: each site needs a name and a node id of its own; run `coordinator register` "
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
