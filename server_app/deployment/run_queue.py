"""Runs that wait for their turn, their time, or signatures: files in the folder of all runs, so that
they outlast a restart.

Each is a proposal, which people can sign while it waits. One process starts them, one at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from filelock import FileLock, Timeout

from fedsurrogate.common.errors import ConfigError, FedSurrogateError, RunError
from fedsurrogate.common.files import READABLE, replace_file
from fedsurrogate.common.security.proposals import (
    ID,
    SignedProposal,
    read_proposal,
    read_setting,
)
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.deployment.federation_rules import check_run_allowed
from fedsurrogate.server_app.lifecycle.interruption import Interrupted
from fedsurrogate.server_app.runs.json_files import MANIFEST
from fedsurrogate.server_app.runs.reader import run_folders

FOLDER, LOCK = "queue", ".lock"
# Whoever asks whether a queue is served holds its lock for an instant.
LOCK_SECONDS = 1.0
STATES = ("queued", "scheduled", "waiting for approval", "running", "ended")
LOOK_SECONDS = 5.0
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
UNKNOWN = (
    "the queue was restarted while this run began, and it has no folder; `coordinator runs` shows "
    "whether it runs. It is not started again by itself, because hospitals may have charged it"
)


@dataclass(frozen=True)
class QueuedRun:
    """A run in the queue.

    Attributes:
        id: of its proposal.
        added: when it came, ISO 8601.
        not_before: when it may start, ISO 8601; empty: at once.
        started: when it did; empty if it has not.
        ended: when it ended; empty if it has not.
        status: how, in words.

    Raises:
        ValueError: for an id that is none, or a time without date or zone.
    """

    id: str
    added: str
    not_before: str = ""
    started: str = ""
    ended: str = ""
    status: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.status, str) and ID.fullmatch(self.id)):
            raise ValueError
        for at in filter(
            lambda each: each != "", (self.added, self.not_before, self.started, self.ended)
        ):
            if datetime.fromisoformat(at).tzinfo is None:
                raise ValueError

    def state(self, allowed: bool, now: datetime) -> str:
        """Where it stands.

        Args:
            allowed: whether enough people have signed it.
            now: the time.

        Returns:
            One of `STATES`.
        """
        if self.ended or self.started:
            return "ended" if self.ended else "running"
        if not allowed:
            return "waiting for approval"
        later = self.not_before and datetime.fromisoformat(self.not_before) > now
        return "scheduled" if later else "queued"


def add(output: Path, signed: SignedProposal, not_before: str = "") -> Path:
    """Put a run at the end of the queue.

    Args:
        output: folder of all runs.
        signed: its proposal.
        not_before: when it may start, ISO 8601; empty: at once.

    Returns:
        The file of its proposal, which `coordinator approve` signs.

    Raises:
        ConfigError: it is there already, would start after its last day, or cannot be written.
    """
    proposal = signed.proposal
    if not_before and datetime.fromisoformat(not_before).date() > date.fromisoformat(
        proposal.expires
    ):
        raise ConfigError(
            f"not before {not_before[:16]}, and proposal {proposal.id[:8]} may be started until "
            f"{proposal.expires}; propose it with more --days, or start it earlier"
        )
    file = _file(output, proposal.id)
    if file.exists():
        raise ConfigError(f"proposal {proposal.id[:8]} is in the queue already; propose it anew")
    try:
        replace_file(file, signed.text() + "\n", mode=READABLE)
        write(output, QueuedRun(proposal.id, _now(), not_before))
    except OSError as error:
        raise ConfigError(f"{file.parent} cannot be written ({error.strerror})") from None
    return file


def read(output: Path) -> list[QueuedRun]:
    """The queue, oldest first.

    Args:
        output: folder of all runs.

    Raises:
        RunError: a file of it cannot be read.
    """
    found = []
    for file in (output / FOLDER).glob("*.state"):
        try:
            found.append(QueuedRun(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(
                f"{file} cannot be read ({type(error).__name__}); remove it and its .json, and queue the run again"
            ) from None
    return sorted(found, key=lambda each: (each.added, each.id))


def write(output: Path, queued: QueuedRun) -> None:
    """Keep where a run of the queue stands. Raises OSError."""
    replace_file(_file(output, queued.id).with_suffix(".state"), json.dumps(asdict(queued)) + "\n")


def remove(output: Path, id_: str) -> QueuedRun:
    """Take a run that has not started out of the queue.

    Args:
        output: folder of all runs.
        id_: of its proposal, or the beginning of it.

    Raises:
        ConfigError: there is none, or several, or it has started.
    """
    found = [each for each in read(output) if id_ and each.id.startswith(id_)]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} runs of the queue have an id that begins with {id_[:40]!r}"
        )
    if found[0].started:
        raise ConfigError(f"run {id_} has started; `coordinator stop` ends one that runs")
    for ending in (".state", ".json"):
        _file(output, found[0].id).with_suffix(ending).unlink(missing_ok=True)
    return found[0]


def proposal_of(output: Path, queued: QueuedRun) -> SignedProposal:
    """The proposal of a run, with the signatures that it has now. Raises ConfigError."""
    signed = read_proposal(file := _file(output, queued.id))
    if signed.proposal.id != queued.id:
        raise ConfigError(
            f"{file} has the proposal {signed.proposal.id[:8]}; queue that one itself"
        )
    return signed


def may_start(output: Path, rules: Path | None) -> Callable[[QueuedRun], bool]:
    """Whether enough people have signed a run of a queue.

    Args:
        output: folder of all runs.
        rules: folder of the federation's rules; None where it has none.
    """
    return lambda queued: not why_not(output, rules, queued)


def why_not(output: Path, rules: Path | None, queued: QueuedRun) -> str:
    """Why a run of a queue may not start; empty if it may, as far as its file and people decide.

    Args:
        output: folder of all runs.
        rules: folder of the federation's rules; None where it has none.
        queued: the run.
    """
    try:
        signed = proposal_of(output, queued)
        if rules is not None:
            check_run_allowed(rules, signed.proposal.digest(), signed.setting())
    except ConfigError as error:
        return str(error)
    return ""


def is_served(output: Path) -> bool:
    """Whether a process starts the runs of a queue.

    Args:
        output: folder of all runs; it may be read-only.
    """
    try:
        lock = os.open(output / FOLDER / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def next_one(
    queue: Sequence[QueuedRun], allowed: Callable[[QueuedRun], bool], now: datetime
) -> QueuedRun | None:
    """The run whose turn it is: the oldest that may start. One that waits for its time, or for
    signatures, stops no other.

    Args:
        queue: oldest first.
        allowed: whether enough people have signed one.
        now: the time.
    """
    return next((each for each in queue if each.state(allowed(each), now) == "queued"), None)


def serve(
    output: Path,
    allowed: Callable[[QueuedRun], bool],
    start: Callable[[Mapping[str, Scalar]], object],
    follow: Callable[[Path], object],
    forever: bool = True,
) -> None:
    """Start the runs of a queue, one at a time, and follow to its end one that a process before
    this one has started.

    Args:
        output: folder of all runs.
        allowed: whether enough people have signed one.
        start: runs a federation with these settings to its end.
        follow: follows a run folder to its end.
        forever: whether to wait for more when none can start.

    Raises:
        RunError: another process serves this queue.
    """
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / FOLDER / LOCK, timeout=LOCK_SECONDS):
            for each in read(output):
                if each.started and not each.ended:
                    _follow(output, each, follow)
            while True:
                chosen = next_one(read(output), allowed, datetime.now(UTC))
                if chosen is not None:
                    _start(output, chosen, start)
                elif not forever:
                    return
                else:
                    time.sleep(LOOK_SECONDS)
    except Timeout:
        raise RunError(f"another process serves the queue in {output / FOLDER}") from None


def _start(
    output: Path, queued: QueuedRun, start: Callable[[Mapping[str, Scalar]], object]
) -> None:
    signed = proposal_of(output, queued)
    queued = replace(queued, started=_now())
    write(output, queued)
    settings = {**signed.proposal.content, "approval": signed.setting()}
    _end(output, queued, lambda: start(settings))


def _follow(output: Path, queued: QueuedRun, follow: Callable[[Path], object]) -> None:
    folder = folder_of(output, queued.id)
    if folder is None:
        write(output, replace(queued, ended=_now(), status=UNKNOWN))
    else:
        _end(output, queued, lambda: follow(folder))


def _end(output: Path, queued: QueuedRun, work: Callable[[], object]) -> None:
    """Do the work of a run, and keep how it ended. A stopped process leaves it to the next one."""
    try:
        work()
        status = "finished"
    except Interrupted as stop:
        folder, status = folder_of(output, queued.id), f"interrupted by {stop}"
        if folder is not None:
            status += f"; `coordinator watch --once {folder}` shows the command that continues it"
        write(output, replace(queued, ended=_now(), status=status))
        raise
    except FedSurrogateError as error:
        status = str(error)
    write(output, replace(queued, ended=_now(), status=status))


def folder_of(output: Path, id_: str) -> Path | None:
    """The run folder of a run that was started from the queue, by its proposal.

    Args:
        output: folder of all runs.
        id_: of the proposal.
    """
    for folder in run_folders(output):
        try:
            text = json.loads((folder / MANIFEST).read_text())["config"]["approval"]
            if text and read_setting(text).proposal.id == id_:
                return folder
        except (OSError, ValueError, LookupError, TypeError, ConfigError):
            continue
    return None


def moment(text: str, now: datetime) -> str:
    """A time that a person has typed, ISO 8601 with a zone.

    Args:
        text: HH:MM, the next such time of this machine's clock; or a date and a time.
        now: by the same clock, without a zone: at another moment its offset may be another.

    Raises:
        ConfigError: for another text, or a date and time that are over.

    Example:
        >>> noon = datetime(2026, 3, 1, 12)
        >>> moment("22:00", noon)[:16], moment("9:30", noon)[:16]
        ('2026-03-01T22:00', '2026-03-02T09:30')
    """
    if clock := CLOCK.fullmatch(text.strip()):
        at = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        return (at if at > now else at + timedelta(days=1)).astimezone().isoformat()
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"--at {text[:40]!r}: must be HH:MM, or a date and a time such as 2026-03-31T22:00"
        ) from None
    at = at.astimezone()
    if at < now.astimezone():
        raise ConfigError(f"--at {text[:40]!r}: is over; without --at it starts at once")
    return at.isoformat()


def _file(output: Path, id_: str) -> Path:
    return output / FOLDER / f"{id_}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
