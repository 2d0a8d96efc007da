"""Witnesses of a ledger: they detect that it was lost, or replaced by an older copy.

The first witness is the ledger's head file. The second is a file outside `state-dir`, one for each
data set: the ledger's length, the hash of its last entry, and a secret of this ledger. It is
written and flushed after the ledger and before the release leaves. The third is the coordinator:
each charged reply contains a receipt, and later requests return it (common/security/registrations.py).

After a kill the ledger may be one entry ahead of the witness; the witness is then updated. All
other differences are refused: no ledger but a witness, no witness but a ledger, a shorter ledger, a
ledger two or more entries ahead, or another ledger. `site ledger open` begins the ledger of new
data. With `site ledger reopen` a person decides about a ledger that was lost or replaced.

The file `ID.answered` next to it lists answered requests by file, so that none is answered again
under a new ledger.

A receipt contains: the number of entries (one for the header, one for each charged release, one for
each decision), the time when a person began the ledger, a random-looking name, and a tag. Charges
depend on requests and settings, never on records.

A coordinator that withholds receipts disables the third witness only. With forged receipts, or
those of other sites, it can only make the site refuse. From a refusal it learns nothing new: it
already had the length in the receipt.

Not detected:
- `state-dir` and the witness folder return to copies of the same time, and no coordinator returns a
  newer receipt: it withholds it, has lost it, or never had it (another coordinator, a release that
  it has not received).
- Both are deleted, a person opens the ledger once more, and no coordinator returns a receipt.
- A person opens a ledger for a copy of the data in another folder, or for the same folder under
  another kind of data.
- A person reopens a ledger and states less than was spent.
- The last release alone: ledger and witness go back by one entry each, and no receipt of that entry
  is returned.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import LedgerError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.security.registrations import Receipt

OPEN = "if these data are new and nothing has left them, a person runs `site ledger open` once"
DECIDE = (
    "nothing leaves until a person has looked at it; `site ledger reopen` takes the "
    "decision, --keep where it is whole"
)
PLACE = "set witness-dir in the node-config to a folder outside state-dir that this user may write"
FORM = re.compile(r"witness 1 (\S+) ([0-9]{1,11}) ([0-9]{1,9}) ([0-9a-f]{64}) ([0-9a-f]{64})\n")


@dataclass(frozen=True)
class Witnessed:
    """Content of the witness file.

    Attributes:
        opened: start of the ledger, seconds since 1970.
        length: entries, header included.
        last: hash of the last entry.
        secret: of this ledger, hexadecimal; makes the tags of receipts.
    """

    opened: int
    length: int
    last: str
    secret: str

    @property
    def ledger(self) -> str:
        """An opaque name of this ledger, for receipts."""
        return self._tag("ledger")[:32]

    def receipt(self, length: int, last: str) -> Receipt:
        """The receipt for a ledger of `length` entries with the last hash `last`."""
        return Receipt(self.ledger, self.opened, length, self._tag(f"entry {length} {last}"))

    def _tag(self, text: str) -> str:
        return hmac.new(bytes.fromhex(self.secret), text.encode(), hashlib.sha256).hexdigest()


class Witness:
    """The second witness of one data set's ledger. The ledger's lock guards it.

    Args:
        folder: of the witness files; outside `state`.
        dataset: name of the data set.
        state: the state folder, with the ledger.

    Raises:
        LedgerError: by all methods.
    """

    def __init__(self, folder: Path, dataset: str, state: Path) -> None:
        self.file = folder / f"{dataset}.witness"
        self.dataset = dataset
        self._state = state

    def read(self) -> Witnessed | None:
        """The content of the file; None if there is no file."""
        try:
            text = self.file.read_text("ascii")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LedgerError(
                f"the ledger's witness {str(self.file)!r} cannot be read ({error}); {DECIDE}"
            ) from None
        match = FORM.fullmatch(text)
        if match is None or match[1] != self.dataset:
            raise LedgerError(
                f"the ledger's witness {str(self.file)!r} is damaged, or of other data; {DECIDE}"
            )
        return Witnessed(int(match[2]), int(match[3]), match[4], match[5])

    def begin(self, length: int, last: str) -> None:
        """Write the witness of a ledger that a person has just begun, with a new secret."""
        self.check_place()
        try:
            before = self.read()
        except LedgerError:
            before = None
        opened = max(int(time.time()), before.opened + 1 if before else 0)
        self._write(Witnessed(opened, length, last, secrets.token_hex(32)))

    def record(self, length: int, last: str) -> None:
        """Write the ledger's new length and last hash. Only then may the release leave."""
        before = self.read()
        if before is None:
            raise LedgerError(f"the ledger's witness {str(self.file)!r} is gone; {DECIDE}")
        if (before.length, before.last) != (length, last):
            self._write(replace(before, length=length, last=last))

    def answered(self) -> set[str]:
        """Requests by file that this site has answered, under any ledger."""
        try:
            return set(self._answers.read_text("ascii").split())
        except FileNotFoundError:
            return set()
        except (OSError, ValueError) as error:
            raise LedgerError(
                f"{str(self._answers)!r}, the answered requests, cannot be read ({error}); {DECIDE}"
            ) from None

    def record_answer(self, request: str) -> None:
        """Record that a request by file was answered. Only then may the bundle leave."""
        known = self.answered()
        if request not in known:
            try:
                replace_file(
                    self._answers,
                    "".join(f"{each}\n" for each in sorted({*known, request})).encode(),
                )
            except OSError as error:
                raise LedgerError(
                    f"{str(self._answers)!r} cannot be written ({error}); {PLACE}"
                ) from None

    @property
    def _answers(self) -> Path:
        return self.file.with_suffix(".answered")

    def compare(self, hashes: Sequence[str]) -> bool:
        """Whether the witness is one entry behind a ledger with these hashes, as after a kill."""
        self.check_place()
        seen = self.read()
        if seen is None:
            if not hashes:
                raise LedgerError(f"no ledger is open for data set {self.dataset}; {OPEN}")
            raise LedgerError(
                f"the ledger's witness {str(self.file)!r} is missing, the ledger is not; {DECIDE}"
            )
        if len(hashes) < seen.length:
            raise LedgerError(
                f"the ledger has {len(hashes)} entries, but {self.file} has seen {seen.length}; "
                f"{DECIDE}"
            )
        if len(hashes) > seen.length + 1 or hashes[seen.length - 1] != seen.last:
            raise LedgerError(f"the ledger is not the one that {self.file} has seen; {DECIDE}")
        if not os.access(self.file.parent, os.W_OK):
            raise LedgerError(
                f"the witness folder {str(self.file.parent)!r} cannot be written; {PLACE}"
            )
        return len(hashes) > seen.length

    def hold_against(
        self, entries: Sequence[Mapping[str, Any]], receipts: Sequence[Receipt]
    ) -> None:
        """Refuse a ledger that is older than a receipt that a coordinator returns.

        Args:
            entries: of the ledger, header first.
            receipts: that came with a request.

        Raises:
            LedgerError: for the first receipt that the ledger does not agree with.
        """
        own = self.read()
        assert own is not None  # the ledger has been compared with it
        others = {other.ledger for other in self._others()}
        for receipt in receipts:
            seen = f"the coordinator has seen {receipt.length} entries of"
            if receipt.ledger == own.ledger:
                if not 1 <= receipt.length <= len(entries):
                    raise LedgerError(f"{seen} the ledger, which has {len(entries)}; {DECIDE}")
                expected = own.receipt(receipt.length, entries[receipt.length - 1]["hash"])
                if not hmac.compare_digest(str(expected), str(receipt)):
                    raise LedgerError(f"{seen} another ledger under the name of this one; {DECIDE}")
            elif receipt.ledger not in others and not _settled(receipt, own, entries):
                raise LedgerError(
                    f"{seen} a ledger of this site, begun {receipt.opened} seconds after 1970, "
                    f"that no witness in {str(self.file.parent)!r} knows: it was lost, or it is of "
                    f"other data, whose witness-dir must then be the same; {DECIDE}"
                )

    def _others(self) -> list[Witnessed]:
        """Witnesses of other data sets of this site."""
        witnesses = []
        for file in self.file.parent.glob("*.witness"):
            if file != self.file:
                try:
                    witnesses.append(Witness(file.parent, file.stem, self._state).read())
                except LedgerError:
                    continue
        return [each for each in witnesses if each is not None]

    def _write(self, content: Witnessed) -> None:
        line = (
            f"witness 1 {self.dataset} {content.opened} {content.length} {content.last} "
            f"{content.secret}\n"
        )
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.file, line.encode())
        except OSError as error:
            raise LedgerError(
                f"the ledger's witness {str(self.file)!r} cannot be written ({error}); {PLACE}"
            ) from None

    def check_place(self) -> None:
        """Raise LedgerError for a witness inside `state-dir`: a restored backup would replace both."""
        if self.file.parent.resolve().is_relative_to(self._state.resolve()):
            raise LedgerError(
                f"the witness folder {str(self.file.parent)!r} is inside state-dir; {PLACE}"
            )


def before_decisions(entries: Sequence[Mapping[str, Any]]) -> int:
    """Number of entries before the decisions at the end: no release has left between those."""
    count = len(entries)
    while count and entries[count - 1]["kind"] == "decision":
        count -= 1
    return count


def _settled(receipt: Receipt, own: Witnessed, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a person's later decision covers the receipt of a ledger whose secret is lost.

    A kept ledger must be at least as long as it ever was, or as the decision says: a longer receipt
    shows that a newer copy existed.
    """
    last = max((at for at, entry in enumerate(entries) if entry["kind"] == "decision"), default=-1)
    known = before_decisions(entries[: last + 1])
    decisions = entries[known : last + 1]
    if not decisions or receipt.opened > own.opened:
        return False
    if not all(each.get("kept") for each in decisions):
        return True
    return receipt.length <= max(known, *(int(each.get("seen", 0)) for each in decisions))
