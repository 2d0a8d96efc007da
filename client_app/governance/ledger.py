"""The ledger of one folder of data: a hash chain of its releases, each written to disk before it
leaves.

Two files. `ID.jsonl` has one canonical JSON line for each entry, with the hash of the entry before.
`ID.head` has the number of entries and the last hash, so that removed lines at the end are
detected. A line is flushed before the head, and the head before the release leaves. After a kill
between the two, the ledger is one line ahead of the head, and the head is updated. After a kill
within a line, the torn line is cut off: its release never left. Everything else is refused.
Witnesses outside this folder detect that both files were lost or replaced by older copies
(governance/witness.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from fedsurrogate.common.errors import ConfigError, LedgerError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    epsilon_spent,
    gaussian_noise_multiplier,
)
from fedsurrogate.common.security.registrations import Receipt

from ..node_config import NodeConfig
from .budget import Budget, check_budget
from .entries import Entry, Release, canonical, chained, digest, events_of, non_private_releases
from .policy import PUBLIC_KINDS, Policy
from .witness import DECIDE, Witness, Witnessed, before_decisions

FORMAT = 1
LOCK_SECONDS = 60
# Name of the run of a request by file, see client_app/offline/answers.py.
BY_FILE = re.compile(r"bundle-[0-9a-f]{16}")
# Id of a proposal in a line: nothing else in quotes has 32 digits.
PROPOSAL = re.compile(r'"([0-9a-f]{32})"')
REMEDY = (
    "nothing leaves until a person has looked at it; `site ledger reopen` starts a new one "
    "and keeps the old"
)


def dataset_id(kind: str, folder: str) -> str:
    """Name of the ledger of a folder of data: a hash of its kind and path.

    The content does not enter it: one more image must not give a new budget. All data sets in one
    folder share a ledger.

    Args:
        kind: of the data.
        folder: its path.
    """
    return hashlib.sha256(
        f"{kind}\0{Path(folder).expanduser().resolve()}".encode(errors="replace")
    ).hexdigest()[:16]


class Ledger:
    """Ledger of one data set.

    A hospital's own data have a witness, and a person opens their ledger; without a witness the
    first charge opens it.

    Args:
        folder: of the ledger's files.
        dataset: name of the data set, see `dataset_id`.
        witness: outside the folder; None for public data.

    Attributes:
        path: file of the entries.
        head: file of their number and the last hash.

    Raises:
        LedgerError: by all methods, when the files cannot be trusted, read or written.
    """

    def __init__(self, folder: Path, dataset: str, witness: Witness | None = None) -> None:
        self.path = folder / f"{dataset}.jsonl"
        self.head = folder / f"{dataset}.head"
        self.dataset, self.witness = dataset, witness

    def entries(self) -> list[Entry]:
        """All entries except the header, after all checks."""
        if self.witness is None and not self.path.exists() and not self.head.exists():
            return []
        with self._locked():
            return self._read()[1:]

    def check(self, receipts: Sequence[Receipt] = ()) -> None:
        """Raise LedgerError if the ledger is older than its witness or one of these receipts."""
        if self.witness is not None:
            with self._locked():
                self.witness.hold_against(self._read(), receipts)

    def copied(self) -> dict[str, bytes]:
        """The ledger's files by name, as they are between two releases, after all checks."""
        with self._locked():
            self._read()
            return {each.name: each.read_bytes() for each in (self.path, self.head)}

    def witnessed(self) -> Witnessed | None:
        """What the witness knows; None for public data, and before the first entry."""
        return None if self.witness is None else self.witness.read()

    @property
    def is_new(self) -> bool:
        """Whether a person has yet to open it: these data never had one. Raises LedgerError for a
        witness that is inside the state folder.
        """
        if self.witness is None:
            return False
        self.witness.check_place()
        return not any(file.exists() for file in self._files())

    def open(self) -> None:
        """Begin the ledger of new data. Raises LedgerError if these data have, or had, a ledger."""
        with self._locked():
            if existing := [file for file in self._files() if file.exists()]:
                raise LedgerError(
                    f"{str(existing[0])!r} exists, so a ledger was open before; {DECIDE}"
                )
            self._begin(chained(None, self._header()))

    def spent(self, delta: float, flower_run: str = "") -> float:
        """Epsilon of all private releases so far (of one run), as if all were chosen in advance.

        Only `budget.spent` counts against the total: it also holds for a coordinator that chooses
        adaptively.

        Args:
            delta: at which epsilon is computed.
            flower_run: one run; empty for all.
        """
        return epsilon_spent(events_of(self.entries(), flower_run), delta)

    def non_private_releases(self) -> int:
        """Number of releases without differential privacy."""
        return non_private_releases(self.entries())

    def charge(self, release: Release, budget: Budget) -> float:
        """Record a release, flushed to disk. Only then may the release leave.

        Args:
            release: its entry.
            budget: limits of this data set.

        Returns:
            Epsilon spent with it.

        Raises:
            BudgetError: and nothing is recorded, if the release would exceed the budget, see
                `check_budget`.
            PolicyError: and nothing is recorded, if another run has used its proposal.
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
        """Names of the runs of answered requests by file, including answers before this ledger was
        reopened.
        """
        entries = self.entries()
        names = {entry["flower_run"] for entry in entries} | {
            name for e in entries for name in e.get("answered", ())
        }
        return names | (self.witness.answered() if self.witness is not None else set())

    def reopen(
        self, reason: str, epsilon: float, delta: float, keep: bool = False, seen: int = 0
    ) -> None:
        """Execute a person's decision: keep copies of the files and begin again.

        The new ledger, with the decision in it, replaces the old one as a whole. After a kill or a
        full disk half-way there is still a ledger, which is refused; there is never an empty one,
        which would be a new budget.

        Args:
            reason: of the decision, for its entry.
            epsilon: that counts as spent.
            delta: at which it is spent.
            keep: continue with the entries of an intact ledger, even if its witness disagrees;
                `epsilon` is added to theirs.
            seen: entries that the coordinator has seen of a ledger that is kept; those that its witness
                has seen count in any case. `epsilon` is what the missing ones cost.

        Raises:
            ConfigError: and nothing changes, for an epsilon that is negative or not a number, or 0 where
                entries are missing.
        """
        events = (
            [asdict(GaussianEvent(gaussian_noise_multiplier(epsilon, delta)))] if epsilon else []
        )
        with self._locked():
            stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
            aside, answered = {}, self.witness.answered() if self.witness is not None else set()
            proposals = set[str]()
            for file in (self.path, self.head):
                if file.exists():
                    kept, content = file.with_name(f"{file.name}.{stamp}"), file.read_bytes()
                    aside[kept.name] = hashlib.sha256(content).hexdigest()
                    replace_file(kept, content)
                    # Works for a damaged ledger too, and includes names in its own decisions.
                    text = content.decode("ascii", "replace")
                    answered |= set(BY_FILE.findall(text))
                    proposals |= set(PROPOSAL.findall(text))
            entries = (
                Ledger(self.path.parent, self.dataset)._read()
                if keep
                else [chained(None, self._header())]
            )
            if not entries:
                raise LedgerError(
                    f"there is no ledger {str(self.path)!r} to keep; reopen it without --keep"
                )
            seen = max(seen, self._seen_by_witness())
            missing = seen - before_decisions(entries)
            if keep and missing > 0 and not epsilon:
                raise ConfigError(
                    f"{missing} of {seen} entries are missing, and epsilon 0 would say that they cost "
                    "nothing; state what they cost: the coordinator's runs, or the site's log, show it"
                )
            decision = {
                "kind": "decision",
                "reason": reason,
                "epsilon": epsilon,
                "delta": delta,
                "kept": keep,
            }
            last = chained(
                entries[-1],
                decision
                | {
                    "events": events,
                    "aside": aside,
                    "answered": sorted(answered),
                    "flower_run": "",
                }
                # A ledger that is kept has the runs that used them.
                | ({"proposals": sorted(proposals)} if proposals and not keep else {})
                | ({"seen": seen} if keep and missing > 0 else {}),
            )
            self._begin(*entries, last)

    def _seen_by_witness(self) -> int:
        """Entries that the witness has seen; 0 without one, or for a damaged one."""
        try:
            known = self.witnessed()
        except LedgerError:
            return 0
        return known.length if known is not None else 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock for one process at a time; the operating system releases it when the process is
        killed.
        """
        from filelock import FileLock

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"))
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.01)
        except OSError as error:
            raise LedgerError(
                f"ledger {str(self.path)!r} cannot be locked ({error}); {REMEDY}"
            ) from None
        try:
            yield
        except OSError as error:
            raise LedgerError(
                f"ledger {str(self.path)!r} cannot be read or written ({error}); {REMEDY}"
            ) from None
        finally:
            lock.release()

    def _read(self) -> list[Entry]:
        """All entries, header first, each checked; repairs an interrupted write."""
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
        # Without a head, at most the header itself was written.
        if behind not in (0, 1) or (anchored and entries[anchored - 1]["hash"] != last):
            raise LedgerError(
                f"ledger {str(self.path)!r} has {len(entries)} entries, but {self.head.name} "
                f"counts {anchored}: lines were removed, or one of the files was replaced; {REMEDY}"
            )
        late = self.witness is not None and self.witness.compare(
            [entry["hash"] for entry in entries]
        )
        if torn:
            if behind:
                raise LedgerError(
                    f"ledger {str(self.path)!r} ends in half a line, which no kill can leave; "
                    f"{REMEDY}"
                )
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
                broken = entry["previous"] != (entries[-1]["hash"] if entries else "") or entry[
                    "hash"
                ] != digest(entry)
                broken = broken or entry["sequence"] != number or line != canonical(entry)
            except (ValueError, KeyError, TypeError, RecursionError):
                broken = True
            if broken:
                raise LedgerError(
                    f"ledger {str(self.path)!r}, line {number + 1}: edited, moved or damaged; "
                    f"{REMEDY}"
                )
            entries.append(entry)
        if entries and (entries[0].get("kind"), entries[0].get("dataset")) != (
            "header",
            self.dataset,
        ):
            raise LedgerError(
                f"ledger {str(self.path)!r} is that of data set {entries[0].get('dataset')!r}; "
                f"{REMEDY}"
            )
        if entries and entries[0].get("format") != FORMAT:
            raise LedgerError(
                f"ledger {str(self.path)!r} has a format other than {FORMAT}; {REMEDY}"
            )
        return entries

    def _read_head(self) -> tuple[int, str]:
        try:
            count, last = self.head.read_text().split()
            if int(count) < 1:
                raise ValueError
            return int(count), last
        except ValueError:
            raise LedgerError(
                f"{str(self.head)!r}, the end of the ledger, is damaged; {REMEDY}"
            ) from None

    def _append(self, previous: Entry | None, fields: Entry) -> Entry:
        """Write and flush one line, then the head. Removes the line again if it does not fit on the
        disk.
        """
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
        """Write a whole ledger, witness first: if this stops half-way, the ledger is refused."""
        if self.witness is not None:
            self.witness.begin(len(entries), entries[-1]["hash"])
        replace_file(self.path, b"".join(canonical(entry) + b"\n" for entry in entries))
        self._write_head(entries[-1])

    def _write_head(self, entry: Entry) -> None:
        """Write and flush the ledger's length and last hash: to the head file, then to the witness."""
        replace_file(self.head, f"{entry['sequence'] + 1} {entry['hash']}\n".encode())
        if self.witness is not None:
            self.witness.record(entry["sequence"] + 1, entry["hash"])

    def _files(self) -> list[Path]:
        return [self.path, self.head] + ([self.witness.file] if self.witness is not None else [])

    def _header(self) -> Entry:
        return {"kind": "header", "format": FORMAT, "dataset": self.dataset}


def own_ledger(node: NodeConfig) -> Ledger | None:
    """The ledger of a site's own data, which has a witness and is opened once; None for public
    data.
    """
    if node.data in PUBLIC_KINDS:
        return None
    dataset = dataset_id(node.data, node.data_dir)
    return Ledger(node.state / "ledgers", dataset, Witness(node.witness, dataset, node.state))


def budget_of(policy: Policy, bags: bool = False) -> Budget:
    """The limits of a policy on one folder of data; bags: see `Budget`."""
    return Budget(
        policy.epsilon_total,
        policy.delta,
        policy.epsilon_per_run,
        policy.without_dp,
        policy.delta_total,
        policy.exact_runs_may_differ,
        bags,
    )


def one_run(policy: Policy) -> tuple[GaussianEvent, ...]:
    """The release of the most expensive run of noisy sums that a policy allows."""
    return (GaussianEvent(gaussian_noise_multiplier(policy.epsilon_per_run, policy.delta)),)
