"""The ledger of one folder of data: a hash chain of its releases, each written to disk before it
leaves.

Two files. `ID.jsonl` has one canonical JSON line for each entry, with the hash of the entry before.
`ID.head` has the number of entries and the last hash, so that removed lines at the end are
detected. A line is flushed before the head, and the head before the release leaves. After a kill
between the two, the ledger is one line ahead of the head, and the head is updated. After a kill
within a line, the torn line is cut off: its release never left. Everything else is refused.
Check logs outside this folder detect that both files were lost or replaced by older copies
(below).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import ConfigError, LedgerError, told_as
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    epsilon_spent,
    gaussian_noise_multiplier,
)
from fedsurrogate.common.security.registrations import Receipt

from ..node_config import NodeConfig
from .budget import (
    Budget,
    Entry,
    Release,
    canonical,
    chained,
    check_budget,
    events_of,
    read_entry,
)
from .policy import PUBLIC_KINDS, Policy

OPEN = "if these data are new and nothing has left them, a person runs `site ledger open` once"
DECIDE = (
    "nothing leaves until a person has looked at it; `site ledger reopen` takes the "
    "decision, --keep where it is whole"
)
PLACE = (
    "set check-log-dir in the node-config to a folder outside state-dir that this user may write"
)
FORM = re.compile(r"witness 1 (\S+) ([0-9]{1,11}) ([0-9]{1,9}) ([0-9a-f]{64}) ([0-9a-f]{64})\n")


@dataclass(frozen=True)
class CheckLogEntry:
    """Content of the check log file.

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


class CheckLog:
    """The second check log of one data set's ledger. The ledger's lock guards it.

    Args:
        folder: of the check log files; outside `state`.
        dataset: name of the data set.
        state: the state folder, with the ledger.

    Raises:
        LedgerError: by all methods.
    """

    def __init__(self, folder: Path, dataset: str, state: Path) -> None:
        self.file = folder / f"{dataset}.witness"
        self.dataset = dataset
        self._state = state

    def read(self) -> CheckLogEntry | None:
        """The content of the file; None if there is no file."""
        try:
            text = self.file.read_text("ascii")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._untrusted(f"cannot be read ({error})") from None
        match = FORM.fullmatch(text)
        if match is None or match[1] != self.dataset:
            raise self._untrusted("is damaged, or of other data")
        return CheckLogEntry(int(match[2]), int(match[3]), match[4], match[5])

    def begin(self, length: int, last: str) -> None:
        """Write the check log of a ledger that a person has just begun, with a new secret."""
        self.check_place()
        try:
            before = self.read()
        except LedgerError:
            before = None
        opened = max(int(time.time()), before.opened + 1 if before else 0)
        self._write(CheckLogEntry(opened, length, last, secrets.token_hex(32)))

    def record(self, length: int, last: str) -> None:
        """Write the ledger's new length and last hash. Only then may the release leave."""
        before = self.read()
        if before is None:
            raise self._untrusted("is gone")
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
            with told_as(LedgerError, f"{str(self._answers)!r} cannot be written", PLACE):
                replace_file(
                    self._answers,
                    "".join(f"{each}\n" for each in sorted({*known, request})).encode(),
                )

    @property
    def _answers(self) -> Path:
        return self.file.with_suffix(".answered")

    def compare(self, hashes: Sequence[str]) -> bool:
        """Whether the check log is one entry behind a ledger with these hashes, as after a kill."""
        self.check_place()
        seen = self.read()
        if seen is None:
            if not hashes:
                raise LedgerError(f"no ledger is open for data set {self.dataset}; {OPEN}")
            raise self._untrusted("is missing, the ledger is not")
        if len(hashes) < seen.length:
            raise LedgerError(
                f"the ledger has {len(hashes)} entries, but {self.file} has seen {seen.length}; "
                f"{DECIDE}"
            )
        if len(hashes) > seen.length + 1 or hashes[seen.length - 1] != seen.last:
            raise LedgerError(f"the ledger is not the one that {self.file} has seen; {DECIDE}")
        if not os.access(self.file.parent, os.W_OK):
            raise LedgerError(
                f"the check log folder {str(self.file.parent)!r} cannot be written; {PLACE}"
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
                    f"that no check log in {str(self.file.parent)!r} knows: it was lost, or it is of "
                    f"other data, whose check-log-dir must then be the same; {DECIDE}"
                )

    def _others(self) -> list[CheckLogEntry]:
        """Check logs of other data sets of this site."""
        check_logs = []
        for file in self.file.parent.glob("*.witness"):
            if file != self.file:
                try:
                    check_logs.append(CheckLog(file.parent, file.stem, self._state).read())
                except LedgerError:
                    continue
        return [each for each in check_logs if each is not None]

    def _write(self, content: CheckLogEntry) -> None:
        line = (
            f"witness 1 {self.dataset} {content.opened} {content.length} {content.last} "
            f"{content.secret}\n"
        )
        what = f"the ledger's check log {str(self.file)!r} cannot be written"
        with told_as(LedgerError, what, PLACE):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.file, line.encode())

    def _untrusted(self, why: str) -> LedgerError:
        return LedgerError(f"the ledger's check log {str(self.file)!r} {why}; {DECIDE}")

    def check_place(self) -> None:
        """Raise LedgerError for a check log inside `state-dir`: a restored backup would replace both."""
        if self.file.parent.resolve().is_relative_to(self._state.resolve()):
            raise LedgerError(
                f"the check log folder {str(self.file.parent)!r} is inside state-dir; {PLACE}"
            )


def before_decisions(entries: Sequence[Mapping[str, Any]]) -> int:
    """Number of entries before the decisions at the end: no release has left between those."""
    count = len(entries)
    while count and entries[count - 1]["kind"] == "decision":
        count -= 1
    return count


def _settled(receipt: Receipt, own: CheckLogEntry, entries: Sequence[Mapping[str, Any]]) -> bool:
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

    A hospital's own data have a check log, and a person opens their ledger; without a check log the
    first charge opens it.

    Args:
        folder: of the ledger's files.
        dataset: name of the data set, see `dataset_id`.
        check_log: outside the folder; None for public data.

    Attributes:
        path: file of the entries.
        head: file of their number and the last hash.

    Raises:
        LedgerError: by all methods, when the files cannot be trusted, read or written.
    """

    def __init__(self, folder: Path, dataset: str, check_log: CheckLog | None = None) -> None:
        self.path = folder / f"{dataset}.jsonl"
        self.head = folder / f"{dataset}.head"
        self.dataset, self.check_log = dataset, check_log

    def entries(self) -> list[Entry]:
        """All entries except the header, after all checks."""
        if self.check_log is None and not self.path.exists() and not self.head.exists():
            return []
        with self._locked():
            return self._read()[1:]

    def check(self, receipts: Sequence[Receipt] = ()) -> None:
        """Raise LedgerError if the ledger is older than its check log or one of these receipts."""
        if self.check_log is not None:
            with self._locked():
                self.check_log.hold_against(self._read(), receipts)

    def copied(self) -> dict[str, bytes]:
        """The ledger's files by name, as they are between two releases, after all checks."""
        with self._locked():
            self._read()
            return {each.name: each.read_bytes() for each in (self.path, self.head)}

    def logged(self) -> CheckLogEntry | None:
        """What the check log knows; None for public data, and before the first entry."""
        return None if self.check_log is None else self.check_log.read()

    @property
    def is_new(self) -> bool:
        """Whether a person has yet to open it: these data never had one. Raises LedgerError for a
        check log that is inside the state folder.
        """
        if self.check_log is None:
            return False
        self.check_log.check_place()
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
            if self.check_log is not None and BY_FILE.fullmatch(release.flower_run):
                self.check_log.record_answer(release.flower_run)
            return total

    def answered(self) -> set[str]:
        """Names of the runs of answered requests by file, including answers before this ledger was
        reopened.
        """
        entries = self.entries()
        names = {entry["flower_run"] for entry in entries} | {
            name for e in entries for name in e.get("answered", ())
        }
        return names | (self.check_log.answered() if self.check_log is not None else set())

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
            keep: continue with the entries of an intact ledger, even if its check log disagrees;
                `epsilon` is added to theirs.
            seen: entries that the coordinator has seen of a ledger that is kept; those that its check log
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
            aside, answered = {}, self.check_log.answered() if self.check_log is not None else set()
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
            entries = [chained(None, self._header())]
            if keep:
                entries = Ledger(self.path.parent, self.dataset)._read()
            if not entries:
                raise LedgerError(
                    f"there is no ledger {str(self.path)!r} to keep; reopen it without --keep"
                )
            # The check log counts decisions, too; for others those at the end are none of theirs.
            logged = self._seen_by_check_log()
            missing = max(seen - before_decisions(entries), logged - len(entries))
            seen = max(seen, logged)
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
                | {"events": events, "aside": aside, "answered": sorted(answered), "flower_run": ""}
                # A ledger that is kept has the runs that used them.
                | ({"proposals": sorted(proposals)} if proposals and not keep else {})
                | ({"seen": seen} if keep and missing > 0 else {}),
            )
            self._begin(*entries, last)

    def _seen_by_check_log(self) -> int:
        """Entries that the check log has seen; 0 without one, or for a damaged one."""
        try:
            known = self.logged()
        except LedgerError:
            return 0
        return known.length if known is not None else 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock for one process at a time; the operating system releases it when the process is
        killed.
        """
        from filelock import FileLock

        ledger = f"ledger {str(self.path)!r}"
        with told_as(LedgerError, f"{ledger} cannot be locked", REMEDY):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"))
            held = lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.01)
        with held, told_as(LedgerError, f"{ledger} cannot be read or written", REMEDY):
            yield

    def _read(self) -> list[Entry]:
        """All entries, header first, each checked; repairs an interrupted write."""
        if not self.path.exists() and not self.head.exists():
            if self.check_log is not None:
                self.check_log.compare([])
            return []
        content = self.path.read_bytes() if self.path.exists() else b""
        whole, _, torn = content.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        entries = self._check_chain(lines)
        anchored, last = self._read_head() if self.head.exists() else (0, "")
        behind = len(entries) - anchored
        # Without a head, at most the header itself was written.
        if behind not in (0, 1) or (anchored and entries[anchored - 1]["hash"] != last):
            raise self._untrusted(
                f" has {len(entries)} entries, but {self.head.name} counts {anchored}: lines were "
                "removed, or one of the files was replaced"
            )
        late = self.check_log is not None and self.check_log.compare(
            [entry["hash"] for entry in entries]
        )
        if torn:
            if behind:
                raise self._untrusted(" ends in half a line, which no kill can leave")
            with self.path.open("r+b") as file:
                file.truncate(len(content) - len(torn))
                os.fsync(file.fileno())
        if behind or late:
            self._write_head(entries[-1])
        return entries

    def _check_chain(self, lines: list[bytes]) -> list[Entry]:
        entries: list[Entry] = []
        for number, line in enumerate(lines):
            entry = read_entry(line)
            last = entries[-1]["hash"] if entries else ""
            if entry is None or (entry["previous"], entry["sequence"]) != (last, number):
                raise self._untrusted(f", line {number + 1}: edited, moved or damaged")
            entries.append({**entry})
        first = entries[0] if entries else self._header()
        if (first.get("kind"), first.get("dataset")) != ("header", self.dataset):
            raise self._untrusted(f" is that of data set {first.get('dataset')!r}")
        if first.get("format") != FORMAT:
            raise self._untrusted(f" has a format other than {FORMAT}")
        return entries

    def _untrusted(self, why: str) -> LedgerError:
        return LedgerError(f"ledger {str(self.path)!r}{why}; {REMEDY}")

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
        """Write a whole ledger, check log first: if this stops half-way, the ledger is refused."""
        if self.check_log is not None:
            self.check_log.begin(len(entries), entries[-1]["hash"])
        replace_file(self.path, b"".join(canonical(entry) + b"\n" for entry in entries))
        self._write_head(entries[-1])

    def _write_head(self, entry: Entry) -> None:
        """Write and flush the ledger's length and last hash: to the head file, then to the check log."""
        replace_file(self.head, f"{entry['sequence'] + 1} {entry['hash']}\n".encode())
        if self.check_log is not None:
            self.check_log.record(entry["sequence"] + 1, entry["hash"])

    def _files(self) -> list[Path]:
        return [self.path, self.head] + (
            [self.check_log.file] if self.check_log is not None else []
        )

    def _header(self) -> Entry:
        return {"kind": "header", "format": FORMAT, "dataset": self.dataset}


def own_ledger(node: NodeConfig) -> Ledger | None:
    """The ledger of a site's own data, which has a check log and is opened once; None for public
    data.
    """
    if node.data in PUBLIC_KINDS:
        return None
    dataset = dataset_id(node.data, node.data_dir)
    return Ledger(node.state / "ledgers", dataset, CheckLog(node.check_log, dataset, node.state))


def budget_of(policy: Policy, bags: bool = False) -> Budget:
    """The limits of a policy on one folder of data; bags: see `Budget`."""
    limits = policy.epsilon_total, policy.delta, policy.epsilon_per_run
    return Budget(
        *limits, policy.without_dp, policy.delta_total, policy.exact_runs_may_differ, bags
    )


def one_run(policy: Policy) -> tuple[GaussianEvent, ...]:
    """The release of the most expensive run of noisy sums that a policy allows."""
    return (GaussianEvent(gaussian_noise_multiplier(policy.epsilon_per_run, policy.delta)),)
