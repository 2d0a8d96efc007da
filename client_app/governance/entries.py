"""Entries of a ledger: what a release records, the hash chain of the lines, and what a list of
entries adds up to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from fedsurrogate.common.privacy.accounting import GaussianEvent, Unit
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS

Entry = dict[str, Any]
# What a ledger counts: one of these for all its private releases.
Charged = Unit | Literal["bag"]


@dataclass(frozen=True)
class Release:
    """A release's entry in the ledger.

    Attributes:
        run: full digest of the run's settings; in entries of earlier versions its first 16 digits.
        flower_run: id of the run.
        method: its name.
        round: number of the round, from one.
        mechanism: name of the privacy mechanism; "none" without privacy.
        events: cost, empty without privacy.
        unit: what is protected: a record, which is an image where runs take images, a bag of images,
            or a patient.
        epsilon: of the claim; 0 without privacy.
        delta: of the claim; 0 without privacy.
        sigmas: noise of each statistic.
        sensitivities: of each statistic.
        facts: stay here.
        bytes: size of the payload.
        sha256: of the payload.
        sealed: for other sites only.
        sample_rate: the lowest of all rounds of the run, or one if no round samples; it shows the
            plan of a run from its first release.
        disclosure: address of the sheet that a person has read before, in the state folder; empty
            for none.
        rounds: private releases that the settings of the run plan; 0 without privacy, and in
            entries of earlier versions.
        opens: whether the first round of the run has another cost than the others; entries of
            earlier versions have none of it, and there the method says so.
        selection: the settings that select which records are in it, in words; empty with privacy.
            Entries of earlier versions have none of it.
    """

    run: str
    flower_run: str
    method: str
    round: int
    mechanism: str
    events: tuple[GaussianEvent, ...]
    unit: Charged
    epsilon: float
    delta: float
    sigmas: dict[str, float]
    sensitivities: dict[str, float]
    facts: dict[str, float]
    bytes: int
    sha256: str
    sealed: bool = False
    sample_rate: float = 1.0
    disclosure: str = ""
    rounds: int = 0
    opens: bool = False
    proposal: str = ""
    allowed_by: str = ""
    selection: Mapping[str, str] = field(default_factory=dict)


def chained(previous: Entry | None, fields: Entry) -> Entry:
    """The entry that follows another one.

    Args:
        previous: the entry before; None for the first.
        fields: of the new entry.

    Returns:
        The fields with time, sequence number and both hashes.
    """
    entry = fields | {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sequence": previous["sequence"] + 1 if previous else 0,
        "previous": previous["hash"] if previous else "",
    }
    return entry | {"hash": digest(entry)}


def canonical(entry: Entry) -> bytes:
    """The bytes of an entry in its line; equal entries give equal bytes."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()


def digest(entry: Entry) -> str:
    """SHA-256 of an entry, as hexadecimal digits; covers all fields except the hash itself."""
    return hashlib.sha256(
        canonical({key: value for key, value in entry.items() if key != "hash"})
    ).hexdigest()


def events_of(entries: Sequence[Entry], flower_run: str = "") -> list[GaussianEvent]:
    """The noise of all releases, or of those of one run.

    Args:
        entries: of the ledger, without its header.
        flower_run: id of the run; empty for all.
    """
    chosen = (entry for entry in entries if not flower_run or entry["flower_run"] == flower_run)
    return [GaussianEvent(**event) for entry in chosen for event in entry["events"]]


def non_private_releases(entries: Sequence[Entry]) -> int:
    """Number of releases without differential privacy, apart from counts that the policy has
    excluded from the total.
    """
    return sum(
        entry["kind"] == "release" and not entry["events"] and entry["mechanism"] != EXACT_COUNTS
        for entry in entries
    )
