"""The ledger of one folder of data: what left it, hash-chained, on the disk before it leaves.

Two files: `ID.jsonl` holds one canonical JSON line an entry, each with the hash of the one before; `ID.head` holds their
number and the last hash, so that lines cut off at the end are missed. A line is flushed before the head is, and the head
before the release leaves. A kill between the two leaves the ledger one line ahead, which is made good; a kill within a
line leaves a torn one, which stands for nothing that left and is cut off. Everything else is refused.
Both files lost, or replaced by older copies, are what witnesses outside this folder are for (governance/witness.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from client_app.durable_files import put_file
from client_app.governance.budget import Budget, check_budget, events_of, open_releases
from client_app.governance.hash_chain import Entry, canonical, chained, digest
from client_app.governance.witness import DECIDE, Witness
from common.errors import LedgerError
from common.privacy.accounting import GaussianEvent, Unit, epsilon_spent, gaussian_noise_multiplier
from common.security.receipts import Receipt

FORMAT = 1
LOCK_SECONDS = 60
# The run that a request by file is, see client_app/offline/bundle_writer.py.
BY_FILE = re.compile(r"bundle-[0-9a-f]{16}")
REMEDY = "nothing leaves until a person has looked at it; `site reopen-ledger` starts a new one and keeps the old"


@dataclass(frozen=True)
class Release:
    """What is about to leave. events: its cost, empty without privacy. facts stay here. sealed: for other sites only.

    sample_rate: the lowest of all rounds of the run, one where none draws a sample; it tells the plan of a run from its
    first release.
    """

    run: str
    flower_run: str
    method: str
    round: int
    mechanism: str
    events: tuple[GaussianEvent, ...]
    unit: Unit
    epsilon: float
    delta: float
    sigmas: dict[str, float]
    sensitivities: dict[str, float]
    facts: dict[str, float]
    bytes: int
    sha256: str
    sealed: bool = False
    sample_rate: float = 1.0


def dataset_id(kind: str, folder: str) -> str:
    """Name of the ledger of a folder of data.

    Not of its content: one image more must not bring a fresh budget. All data sets in one folder share one.
    """
    return hashlib.sha256(f"{kind}\0{Path(folder).expanduser().resolve()}".encode(errors="replace")).hexdigest()[:16]


class Ledger:
    """Entries of one data set. With a witness, which data of a hospital's own have, a person opens it; without one the first
    charge does. All methods raise LedgerError when the files cannot be trusted, read or written.
    """

    def __init__(self, folder: Path, dataset: str, witness: Witness | None = None) -> None:
        self.path = folder / f"{dataset}.jsonl"
        self.head = folder / f"{dataset}.head"
        self.dataset, self.witness = dataset, witness

    def entries(self) -> list[Entry]:
        """All entries but the header, checked."""
        if self.witness is None and not self.path.exists() and not self.head.exists():
            return []
        with self._locked():
            return self._read()[1:]

    def check(self, receipts: Sequence[Receipt] = ()) -> None:
        """Raise LedgerError unless the ledger is as new as its witness and these receipts."""
        if self.witness is not None:
            with self._locked():
                self.witness.hold_against(self._read(), receipts)

    def open(self) -> None:
        """Begin the ledger of new data. Raises LedgerError where there is one, or was."""
        with self._locked():
            if found := [file for file in self._files() if file.exists()]:
                raise LedgerError(f"{str(found[0])!r} exists, so a ledger was open before; {DECIDE}")
            self._begin(chained(None, self._header()))

    def spent(self, delta: float, flower_run: str = "") -> float:
        """Epsilon at `delta` of all private releases so far (of one run), as if all had been chosen beforehand.

        What counts against the total is `budget.spent`, which holds whatever the coordinator chose after seeing what.
        """
        return epsilon_spent(events_of(self.entries(), flower_run), delta)

    def open_releases(self) -> int:
        """How many releases no privacy protects."""
        return open_releases(self.entries())

    def charge(self, release: Release, budget: Budget) -> float:
        """Record a release, flushed to disk, and return the epsilon spent with it. Only then may it leave.

        Raises BudgetError, and records nothing, when it would exceed the budget; see `check_budget`.
        """
        with self._locked():
            entries = self._read()
            total = check_budget(entries[1:], release, budget)
            if not entries:
                entries = [self._append(None, self._header())]
            self._append(entries[-1], {"kind": "release", **asdict(release)})
            if self.witness is not None and BY_FILE.fullmatch(release.flower_run):
                self.witness.record_answer(release.flower_run)
            return total

    def answered(self) -> set[str]:
        """Requests by file that were answered, before a person reopened this ledger as well, by the name of their run."""
        entries = self.entries()
        found = {entry["flower_run"] for entry in entries} | {name for e in entries for name in e.get("answered", ())}
        return found | (self.witness.answered() if self.witness is not None else set())

    def reopen(self, reason: str, epsilon: float, delta: float, keep: bool = False) -> None:
        """A person's decision: keep the files aside, and begin again with `epsilon` at `delta` taken as spent.

        keep: go on with the entries of a ledger that is whole, whatever its witness says; `epsilon` is then added to theirs.

        The new ledger takes the place of the old one whole, decision included: stopped half-way, by a kill or a full disk,
        there is still one that is refused, never an empty one, which would be a fresh budget. Raises ConfigError, with
        nothing touched, for an epsilon that is negative or no number.
        """
        events = [asdict(GaussianEvent(gaussian_noise_multiplier(epsilon, delta)))] if epsilon else []
        with self._locked():
            stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
            aside, answered = {}, self.witness.answered() if self.witness is not None else set()
            for file in (self.path, self.head):
                if file.exists():
                    kept, content = file.with_name(f"{file.name}.{stamp}"), file.read_bytes()
                    aside[kept.name] = hashlib.sha256(content).hexdigest()
                    put_file(kept, content)
                    # Also in a damaged ledger, and what its own decisions name.
                    answered |= set(BY_FILE.findall(content.decode("ascii", "replace")))
            entries = Ledger(self.path.parent, self.dataset)._read() if keep else [chained(None, self._header())]
            if not entries:
                raise LedgerError(f"there is no ledger {str(self.path)!r} to keep; reopen it without --keep")
            decision = {"kind": "decision", "reason": reason, "epsilon": epsilon, "delta": delta, "kept": keep}
            last = chained(
                entries[-1], decision | {"events": events, "aside": aside, "answered": sorted(answered), "flower_run": ""}
            )
            self._begin(*entries, last)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the operating system lets go when a process is killed."""
        from filelock import FileLock

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"))
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.01)
        except OSError as error:
            raise LedgerError(f"ledger {str(self.path)!r} cannot be locked ({error}); {REMEDY}") from None
        try:
            yield
        except OSError as error:
            raise LedgerError(f"ledger {str(self.path)!r} cannot be read or written ({error}); {REMEDY}") from None
        finally:
            lock.release()

    def _read(self) -> list[Entry]:
        """All entries, header first, after checking every one; an interrupted write is made good."""
        if not self.path.exists() and not self.head.exists():
            if self.witness is not None:
                self.witness.compare([])
            return []
        content = self.path.read_bytes() if self.path.exists() else b""
        whole, _, torn = content.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        entries = self._check_chain(lines)
        anchored, last = self._read_head() if self.head.exists() else (0, "")
        behind = len(entries) - anchored
        # Without a head only the header itself can have been written.
        if behind not in (0, 1) or (anchored and entries[anchored - 1]["hash"] != last):
            raise LedgerError(
                f"ledger {str(self.path)!r} has {len(entries)} entries where {self.head.name} knows of {anchored}: lines "
                f"were removed, or one of the files was replaced; {REMEDY}"
            )
        late = self.witness is not None and self.witness.compare([entry["hash"] for entry in entries])
        if torn:
            if behind:
                raise LedgerError(f"ledger {str(self.path)!r} ends in half a line where none can be; {REMEDY}")
            with self.path.open("r+b") as file:
                file.truncate(len(content) - len(torn))
                os.fsync(file.fileno())
        if behind or late:
            self._write_head(entries[-1])
        return entries

    def _check_chain(self, lines: list[bytes]) -> list[Entry]:
        entries: list[Entry] = []
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                broken = entry["previous"] != (entries[-1]["hash"] if entries else "") or entry["hash"] != digest(entry)
                broken = broken or entry["sequence"] != number or line != canonical(entry)
            except (ValueError, KeyError, TypeError, RecursionError):
                broken = True
            if broken:
                raise LedgerError(f"ledger {str(self.path)!r}, line {number + 1}: edited, moved or damaged; {REMEDY}")
            entries.append(entry)
        if entries and (entries[0].get("kind"), entries[0].get("dataset")) != ("header", self.dataset):
            raise LedgerError(f"ledger {str(self.path)!r} is that of data set {entries[0].get('dataset')!r}; {REMEDY}")
        if entries and entries[0].get("format") != FORMAT:
            raise LedgerError(f"ledger {str(self.path)!r} has a format other than {FORMAT}; {REMEDY}")
        return entries

    def _read_head(self) -> tuple[int, str]:
        try:
            count, last = self.head.read_text().split()
            if int(count) < 1:
                raise ValueError
            return int(count), last
        except ValueError:
            raise LedgerError(f"{str(self.head)!r}, the end of the ledger, is damaged; {REMEDY}") from None

    def _append(self, previous: Entry | None, fields: Entry) -> Entry:
        """Write one line and flush it, then the head. A line that does not fit is taken back."""
        entry = chained(previous, fields)
        line = canonical(entry) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError("the disk took only a part of the line")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self._write_head(entry)
        return entry

    def _begin(self, *entries: Entry) -> None:
        """Put a whole ledger in its place, witness first: stopped half-way, it is refused."""
        if self.witness is not None:
            self.witness.begin(len(entries), entries[-1]["hash"])
        put_file(self.path, b"".join(canonical(entry) + b"\n" for entry in entries))
        self._write_head(entries[-1])

    def _write_head(self, entry: Entry) -> None:
        """Flush how long the ledger is: to the head next to it, then to the witness."""
        put_file(self.head, f"{entry['sequence'] + 1} {entry['hash']}\n".encode())
        if self.witness is not None:
            self.witness.record(entry["sequence"] + 1, entry["hash"])

    def _files(self) -> list[Path]:
        return [self.path, self.head] + ([self.witness.file] if self.witness is not None else [])

    def _header(self) -> Entry:
        return {"kind": "header", "format": FORMAT, "dataset": self.dataset}
