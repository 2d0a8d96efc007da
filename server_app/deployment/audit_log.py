"""The audit log of a federation at its coordinator: who started, stopped, accepted, revoked or
exported what, and when; and how many people must have signed it.

A file of JSON lines to which commands append before they act. Each line holds the SHA-256 of the
line before, so a line that is changed, removed or inserted shows. That lines were cut off at the end
shows only to who has noted a digest before (`--holds`), or ships the lines elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import socket
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedsurrogate.common.errors import ConfigError, RunError, SealError
from fedsurrogate.common.security import documents
from fedsurrogate.common.security.sealing import public_key, read_keys, sign, verify

from .supernodes import table_file

RULES, APPROVERS = "federation.toml", "approvers.toml"
MOST = 20


def approvals_needed(folder: Path) -> int:
    """How many people must have signed a run, or a change of who is in.

    Args:
        folder: of the rules.

    Returns:
        Zero without rules.

    Raises:
        ConfigError: the file is there and cannot be read.
    """
    file = folder / RULES
    if not file.exists():
        return 0
    try:
        rules = tomllib.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__})") from None
    number = rules.get("approvals")
    # A truth value is a whole number for Python.
    if set(rules) != {"approvals"} or type(number) is not int or not 0 <= number <= MOST:
        raise ConfigError(
            f"{file}: must be the line approvals = N, with 0 to {MOST} people whose signature is "
            "needed"
        )
    return int(number)


def check_allowed(
    folder: Path, action: documents.Action, digest: str, signed: documents.SignedProposal | None
) -> list[str]:
    """Who has allowed an action of the coordinator.

    Args:
        folder: of the rules.
        action: what it is about to do.
        digest: of that, as `Proposal.digest` computes it.
        signed: the proposal; None without one.

    Returns:
        Their names; none where the federation asks for none and no proposal is given.

    Raises:
        ConfigError: too few have.
    """
    needed = approvals_needed(folder)
    if signed is None:
        if needed:
            raise ConfigError(
                f"{folder / RULES}: approvals = {needed}, so this needs a proposal that {needed} of "
                f"the people in {APPROVERS} have signed: `coordinator approval propose`, `coordinator "
                "approval approve`, then the same command with --proposal FILE"
            )
        return []
    if signed.proposal.action != action:
        raise ConfigError(f"the proposal is to {signed.proposal.action}, not to {action}")
    file = folder / APPROVERS
    known: Mapping[str, bytes] = read_keys(file) if needed or file.exists() else {}
    return documents.check_signed(signed, digest, known, needed, datetime.now(UTC).date())


def check_run_allowed(folder: Path, digest: str, approval: str) -> list[str]:
    """Who has allowed a run.

    Args:
        folder: of the rules.
        digest: of the run, `full_digest`.
        approval: its setting of this name; empty without a proposal.

    Returns:
        As `check_allowed`.

    Raises:
        ConfigError: too few have.
    """
    return check_allowed(
        folder, "run", digest, documents.read_setting(approval) if approval else None
    )


NAME = "audit-log.jsonl"
# Environment variables: the file, and the key of `coordinator approval key` of the person at work.
VARIABLE, OPERATOR = "FEDSURROGATE_AUDIT_LOG", "FEDSURROGATE_OPERATOR_KEY"
FOR = b"fedsurrogate audit log 1"
LOCK_SECONDS = 60
FIELDS = {"number", "time", "account", "action", "facts", "before", "key", "signature"}


def audit_file(folder: Path | None) -> Path | None:
    """The file of the audit log.

    Args:
        folder: of `coordinator sites certs`; None where a command knows none.

    Returns:
        What the environment names, else a file next to the table of registered sites; None where
        neither is known, as on a machine without keys.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return None if folder is None else table_file(folder).with_name(NAME)


def note(folder: Path | None, action: str, facts: Mapping[str, object]) -> None:
    """Append an entry, before the action.

    Args:
        folder: as for `audit_file`; without a file nothing is noted.
        action: such as "start".
        facts: of it; texts, numbers, and lists of them.

    Raises:
        RunError: the entry cannot be written; then the action must not happen.
        ConfigError: the operator's key cannot be read.
    """
    file = audit_file(folder)
    if file is None:
        return
    private = _operator_key()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(file.with_name(f"{file.name}.lock"), timeout=LOCK_SECONDS):
            last = _last_line(file)
            entry: dict[str, Any] = {
                "number": json.loads(last)["number"] + 1 if last else 1,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "account": f"{_account()}@{socket.gethostname()}",
                "action": action,
                "facts": dict(facts),
                "before": hashlib.sha256(last).hexdigest() if last else "",
                "key": public_key(private).hex() if private else "",
                "signature": "",
            }
            if private:
                entry["signature"] = sign(documents.canonical_json(entry), private, FOR).hex()
            _append(file, documents.canonical_json(entry) + b"\n")
    except (OSError, Timeout, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{file}: the audit log cannot be written ({type(error).__name__}), so nothing is done; "
            "`coordinator approval log --verify` shows what is wrong with it"
        ) from None


def entries(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """All entries, each with the SHA-256 of its line, checked one by one.

    Args:
        file: of the audit log.

    Raises:
        RunError: at the first line that does not fit the one before.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RunError(f"{file} cannot be read ({error.strerror})") from None
    before = ""
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        entry = _entry(file, line, number, before)
        before = hashlib.sha256(line.rstrip(b"\n")).hexdigest()
        yield entry, before


def _entry(file: Path, line: bytes, number: int, before: str) -> dict[str, Any]:
    """One entry. Raises RunError."""
    where = f"{file}, line {number}"
    if not line.endswith(b"\n"):
        raise RunError(f"{where}: its end is missing; a command was killed while it wrote")
    try:
        entry = json.loads(line)
        sound = isinstance(entry, dict) and set(entry) == FIELDS
        if not sound or documents.canonical_json(entry) + b"\n" != line:
            raise ValueError
    except (ValueError, RecursionError):
        raise RunError(f"{where}: this is no entry of the audit log") from None
    if entry["number"] != number or entry["before"] != before:
        raise RunError(
            f"{where}: it does not follow the line before; a line was changed, removed or inserted"
        )
    if entry["key"]:
        try:
            unsigned = documents.canonical_json(entry | {"signature": ""})
            verify(unsigned, bytes.fromhex(entry["signature"]), bytes.fromhex(entry["key"]), FOR)
        except (SealError, ValueError, TypeError):
            raise RunError(f"{where}: its signature does not fit") from None
    return dict(entry)


def _last_line(file: Path) -> bytes:
    """The last line without its end; empty for no file. Raises ValueError for a torn line."""
    if not file.exists() or not file.stat().st_size:
        return b""
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
        if content[-1:] != b"\n":
            raise ValueError("a torn line")
        return content[content.rfind(b"\n", 0, -1) + 1 : -1]


def _append(file: Path, line: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("a part of a line was written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _account() -> str:
    # Not LOGNAME or USER, which anyone sets as they like.
    with suppress(KeyError):  # A container's account may have no name.
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _operator_key() -> bytes:
    """The key of the person at work; empty without one. Raises ConfigError."""
    named = os.environ.get(OPERATOR)
    return documents.read_approver_key(Path(named)) if named else b""
