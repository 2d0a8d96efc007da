"""Receipts of the sites' privacy ledgers. The coordinator keeps them across runs and shows each
site its own again.

`receipts/NAME.json` next to the run folders holds one site's receipts, one per ledger, and its last
node id. A site can only change its own file, and the number of receipts in it is limited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from flwr.app import RecordDict

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.files import READABLE, replace_file
from fedsurrogate.common.limits import SITE_NAME
from fedsurrogate.common.security.receipts import (
    MOST_RECEIPTS,
    Receipt,
    join_receipts,
    parse_receipt,
)
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.strategies.base.collection import Recorder

FOLDER = "receipts"
MOST_SITES = 10_000


class Receipts:
    """The receipts of the sites' ledgers.

    Args:
        output: folder of the run folders, next to which the receipts are stored.
        resumed: folder of a run that is continued, for the receipts next to it; empty for none.
        recorder: of receipts that are not stored.
    """

    def __init__(self, output: str, resumed: str, recorder: Recorder) -> None:
        self._folder = _absolute(output) / FOLDER
        self._recorder = recorder
        self._known: dict[str, dict[str, Receipt]] = {}
        self._nodes: dict[str, int] = {}
        self._names: dict[int, dict[str, None]] = {}
        folders = [self._folder]
        if resumed:
            folders.append(_absolute(resumed).parent / FOLDER)
        for folder in dict.fromkeys(folders):
            for name, node, receipts in _stored(folder):
                self._place(name, self._nodes.get(name, node))
                for receipt in receipts:
                    self._put(name, receipt)

    def __bool__(self) -> bool:
        return bool(self._known)

    def has_node(self, node: int) -> bool:
        """Whether `node` is the last known node of a site with receipts."""
        return bool(self._names.get(node))

    def of(self, name: str, node: int | None = None) -> str:
        """The receipts of a site, as one text.

        Args:
            name: of the site.
            node: its last known node also identifies the site; None if it is not known.
        """
        names = dict.fromkeys([*(self._names.get(node, ()) if node is not None else ()), name])
        receipts = [receipt for each in names for receipt in self._known.get(each, {}).values()]
        return join_receipts(receipts[-MOST_RECEIPTS:])

    def show(self, record: RecordDict, name: str, node: int) -> None:
        """Add the receiving site's receipts to a message.

        Args:
            record: content of the message, which is changed.
            name: of the site.
            node: that receives the message.
        """
        if text := self.of(name, node):
            record.config_records[INFO]["receipts"] = text

    def take(self, name: str, node: int, text: object) -> None:
        """Store a site's receipt, if it sent one.

        Args:
            name: of the site.
            node: that it has now.
            text: the receipt as it was sent; None if the site sent none.

        Raises:
            SurrogateError: for an invalid receipt.
        """
        if text is None or not SITE_NAME.fullmatch(name):
            return
        receipt = parse_receipt(text)
        if name not in self._known and len(self._known) >= MOST_SITES:
            self._recorder.event(
                "receipt-not-kept", site=name, reason=f"the limit of {MOST_SITES} sites is reached"
            )
            return
        # First read receipts that another run may have written meanwhile.
        for other, _, receipts in _stored(self._folder, f"{name}.json"):
            for stored in receipts if other == name else ():
                self._put(name, stored)
        self._put(name, receipt)
        self._place(name, node)
        try:
            self._write(name)
        except OSError as error:
            # The run continues with the receipts in memory; the site's own witness is not affected.
            self._recorder.event("receipt-not-kept", site=name, reason=type(error).__name__)

    def _place(self, name: str, node: int) -> None:
        """Set the last known node of a site."""
        self._names.get(self._nodes.get(name, node), {}).pop(name, None)
        self._nodes[name] = node
        self._names.setdefault(node, {})[name] = None

    def _put(self, name: str, receipt: Receipt) -> None:
        """Keep the longest receipt of each ledger, and only the most recent ledgers."""
        kept = self._known.setdefault(name, {})
        before = kept.pop(receipt.ledger, receipt)
        kept[receipt.ledger] = max(before, receipt, key=lambda each: each.length)
        while len(kept) > MOST_RECEIPTS:
            del kept[next(iter(kept))]

    def _write(self, name: str) -> None:
        """Write a site's file atomically."""
        content = {
            "node": self._nodes[name],
            "receipts": list(map(str, self._known[name].values())),
        }
        replace_file(self._folder / f"{name}.json", json.dumps(content) + "\n", mode=READABLE)


def stored_receipts(output: str) -> dict[str, str]:
    """The receipts stored in an output folder, by site, each site's as one text."""
    stored = _stored(_absolute(output) / FOLDER)
    return {name: join_receipts(receipts) for name, _, receipts in stored}


def _absolute(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def _stored(folder: Path, pattern: str = "*.json") -> Iterator[tuple[str, int, list[Receipt]]]:
    """Names, nodes and receipts of the sites in a folder. Unreadable files are skipped."""
    for file in sorted(folder.glob(pattern)):
        try:
            content = json.loads(file.read_text())
            if type(content["node"]) is not int:
                raise ValueError("the node is no number")
            yield (
                file.stem,
                content["node"],
                [parse_receipt(text) for text in content["receipts"][:MOST_RECEIPTS]],
            )
        except (OSError, ValueError, TypeError, LookupError, RecursionError, SurrogateError):
            continue
