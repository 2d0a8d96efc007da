"""What the coordinator has last seen of each site's ledger, kept from run to run and shown to the site again.

`receipts/NAME.json` next to the run folders: the receipts of one site, one a ledger, and the number its node had. A site can
only ever change its own file, which holds a bounded number of receipts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from flwr.app import RecordDict

from common.config.run_config import RunConfig
from common.errors import SurrogateError
from common.security.receipts import MOST_RECEIPTS, Receipt, join_receipts, parse_receipt
from common.wire.records import INFO
from common.wire.validation import SITE_NAME
from strategies.base.collection import Recorder

FOLDER = "receipts"
MOST_SITES = 10_000


class Receipts:
    """The receipts in `output-dir`, and of a run that is resumed those next to its folder."""

    def __init__(self, config: RunConfig, recorder: Recorder) -> None:
        self._folder = Path(config.output_dir).expanduser().absolute() / FOLDER
        self._recorder = recorder
        self._known: dict[str, dict[str, Receipt]] = {}
        self._nodes: dict[str, int] = {}
        folders = [self._folder]
        if config.resume:
            folders.append(Path(config.resume).expanduser().absolute().parent / FOLDER)
        for folder in dict.fromkeys(folders):
            for name, node, receipts in _stored(folder):
                self._nodes.setdefault(name, node)
                for receipt in receipts:
                    self._put(name, receipt)

    def __bool__(self) -> bool:
        return bool(self._known)

    def has_node(self, node: int) -> bool:
        """Whether a site with receipts had this node last."""
        return node in self._nodes.values()

    def of(self, name: str, node: int | None = None) -> str:
        """What to show a site of this name, or the site that had this node last: its receipts in one text."""
        names = [each for each in self._known if each == name or (node is not None and self._nodes[each] == node)]
        found = [receipt for each in names for receipt in self._known[each].values()]
        return join_receipts(found[-MOST_RECEIPTS:])

    def show(self, record: RecordDict, name: str, node: int) -> None:
        """Put into a message what its receiver is to be shown."""
        if text := self.of(name, node):
            record.config_records[INFO]["receipts"] = text

    def take(self, name: str, node: int, text: object) -> None:
        """Keep a receipt that came from a site; nothing where none came. Raises SurrogateError for one that is none."""
        if text is None or not SITE_NAME.fullmatch(name):
            return
        receipt = parse_receipt(text)
        if name not in self._known and len(self._known) >= MOST_SITES:
            self._recorder.event("receipt-not-kept", site=name, reason=f"those of {MOST_SITES} sites are kept already")
            return
        # What another run has put there meanwhile comes first.
        for other, _, receipts in _stored(self._folder, f"{name}.json"):
            for stored in receipts if other == name else ():
                self._put(name, stored)
        self._put(name, receipt)
        self._nodes[name] = node
        try:
            self._write(name)
        except OSError as error:
            # The run goes on with what is in memory; the site's own witness is not affected.
            self._recorder.event("receipt-not-kept", site=name, reason=type(error).__name__)

    def _put(self, name: str, receipt: Receipt) -> None:
        """The longest receipt of each ledger; the ledgers heard of last stay."""
        kept = self._known.setdefault(name, {})
        before = kept.pop(receipt.ledger, receipt)
        kept[receipt.ledger] = max(before, receipt, key=lambda each: each.length)
        while len(kept) > MOST_RECEIPTS:
            del kept[next(iter(kept))]

    def _write(self, name: str) -> None:
        """Write a site's file in one step."""
        content = {"node": self._nodes[name], "receipts": list(map(str, self._known[name].values()))}
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{os.getpid()}"
        try:
            with temporary.open("w") as file:
                file.write(json.dumps(content) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / f"{name}.json")
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def stored_receipts(config: RunConfig) -> dict[str, str]:
    """What lies in `output-dir` of every site, each site's in one text."""
    stored = _stored(Path(config.output_dir).expanduser().absolute() / FOLDER)
    return {name: join_receipts(receipts) for name, _, receipts in stored}


def _stored(folder: Path, pattern: str = "*.json") -> Iterator[tuple[str, int, list[Receipt]]]:
    """What lies in a folder: sites' names, nodes and receipts. A file that cannot be read says nothing."""
    for file in sorted(folder.glob(pattern)):
        try:
            content = json.loads(file.read_text())
            yield file.stem, int(content["node"]), [parse_receipt(text) for text in content["receipts"][:MOST_RECEIPTS]]
        except (OSError, ValueError, TypeError, LookupError, RecursionError, SurrogateError):
            continue
