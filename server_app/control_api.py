"""The SuperLink's Control API: its runs, listed, found, stopped and followed to their end; and the
sites that it knows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.interface import FlowerNode, FlowerRun, UnreachableError
from fedsurrogate.common.security.documents import key_fingerprint
from fedsurrogate.common.security.registrations import Registration, read_table

from .deployment.fleet_guard import fingerprint_of
from .deployment.supernodes import table_file
from .lifecycle.ends import complete_killed
from .runs.reader import POLL_SECONDS, LiveRun, run_folders
from .runs.state import PARTS, SiteState, as_table

UNKNOWN = "unknown"


def list_runs(address: str, authority: Path | None) -> list[FlowerRun]:
    """All runs of a SuperLink.

    Args:
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Returns:
        The runs, newest first.

    Raises:
        RunError: the SuperLink does not answer.
    """
    with flower().control(address, authority) as control:
        runs = control.runs()
    return sorted(runs, key=lambda run: run.begun.timestamp() if run.begun else 0.0, reverse=True)


def status_of(run_id: str, address: str, authority: Path | None) -> str:
    """Flower's status of a run.

    Args:
        run_id: Flower's number.
        address: as for `list_runs`.
        authority: as for `list_runs`.

    Returns:
        Such as "running"; "unknown" where the SuperLink does not answer, or does not know the run.
    """
    try:
        runs = list_runs(address, authority)
    except RunError:
        return UNKNOWN
    return next((run.status for run in runs if run.id == run_id), UNKNOWN)


def stop(run_id: str, address: str, authority: Path | None) -> bool:
    """Stop a run.

    Args:
        run_id: Flower's number.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Returns:
        Whether the SuperLink stopped it.

    Raises:
        RunError: the SuperLink does not answer, or the run has ended.
    """
    with flower().control(address, authority) as control:
        return control.stop(run_id)


# Flower: a node is online until two intervals have passed since its last heartbeat.
PATIENCE = 2
# Runs that are searched for the versions of sites.
NEWEST = 20
Health = Literal["connected", "silent", "never connected", "key revoked", "not registered"]


@dataclass(frozen=True)
class KnownSite:
    """A site, as the SuperLink knows it.

    Attributes:
        name: in the table of registered sites; else made of its key or its node id.
        key: SHA-256 of its public key, hex; empty without one.
        health: state of its connection and of its key.
        since: when its present or last connection began; None if there was none.
        seen: its last heartbeat; None if there was none.
        last_run: its part in the newest run.
        version: of its software, as it reported in its last run.
    """

    name: str
    key: str
    health: Health
    since: datetime | None
    seen: datetime | None
    last_run: str = ""
    version: str = ""

    @property
    def nameless(self) -> bool:
        """Whether its key, or its node, stands for its name. Names of sites have no blanks."""
        return " " in self.name

    def facts(self) -> dict[str, Any]:
        """As a JSON object."""
        times = {"since": self.since, "seen": self.seen}
        return asdict(self) | {
            name: moment and moment.isoformat(timespec="seconds") for name, moment in times.items()
        }


def known_sites(
    folder: Path | None, output: Path, address: str, authority: Path | None
) -> list[KnownSite]:
    """All sites, with their part in the newest run, and their versions from the newest runs.

    Args:
        folder: of `coordinator sites certs`, for the table of registered sites; None without one.
        output: folder of all runs.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Returns:
        The sites, as from `list_sites`.

    Raises:
        RunError: the SuperLink does not answer, or the table cannot be read.
    """
    file = table_file(folder or Path())
    table = read_table(file) if file.is_file() or folder is not None else {}
    runs = [_sites_of(run) for run in run_folders(output)[:NEWEST]]
    sites = list_sites(address, authority, table)
    return [
        replace(site, last_run=_part(runs, site.name), version=_version(runs, site.name))
        for site in sites
    ]


def _sites_of(run: Path) -> Mapping[str, SiteState]:
    live = LiveRun(run)
    live.refresh()
    return live.state.sites


def _version(runs: list[Mapping[str, SiteState]], name: str) -> str:
    versions = (sites[name].version for sites in runs if name in sites)
    return next(filter(None, versions), "")


def _part(runs: list[Mapping[str, SiteState]], name: str) -> str:
    if not runs or (site := runs[0].get(name)) is None:
        return ""
    return site.fate + (f": {site.reason}" if site.reason else "")


def list_sites(
    address: str, authority: Path | None, table: Mapping[str, Registration]
) -> list[KnownSite]:
    """All sites that the SuperLink knows.

    Args:
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        table: names of keys, from `coordinator sites register`.

    Returns:
        The sites by name. Nodes without a name in the table come last; each is named by its key, or
        by its node id where no keys are used.

    Raises:
        RunError: the SuperLink does not answer.
    """
    with flower().control(address, authority) as control:
        nodes = control.nodes()
    names = {each.node: name for name, each in table.items()}
    known = [_site(node, names.get(node.id)) for node in nodes]
    lost = [
        KnownSite(name, key_fingerprint(each.key.encode()), "not registered", None, None)
        for name, each in table.items()
        if each.node not in {node.id for node in nodes}
    ]
    return sorted((*known, *lost), key=lambda site: (site.nameless, site.name))


def _site(node: FlowerNode, name: str | None) -> KnownSite:
    since = node.activated
    health: Health = "silent" if since else "never connected"
    if node.online:
        health = "connected"
    elif node.revoked:
        health = "key revoked"
    seen = None
    if since and node.online_until:
        beat = node.online_until
        if health in ("connected", "silent") and not (
            node.deactivated and node.deactivated > since
        ):
            beat -= PATIENCE * node.heartbeat_interval
        seen = max(since, min(datetime.fromtimestamp(beat, UTC), datetime.now(UTC)))
    key = _key(node.key)
    return KnownSite(
        name or (f"key {key[:8]}" if key else f"node {node.id}"), key, health, since, seen
    )


def _key(public: bytes) -> str:
    """SHA-256 of a public key, as `coordinator sites certs` shows it; empty without one."""
    return fingerprint_of(public) if public else ""


LATEST = "latest"
PENDING = "pending"
LOOK_SECONDS, REMIND_SECONDS = 2.0, 60.0
NOT_STARTED = (
    "the SuperLink has not started the run; check that it starts apps itself, or that `coordinator app` runs, and "
    "that no other run is active"
)
# How long a run that its SuperLink has ended may take to complete its folder.
END_SECONDS = 60.0
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Handle:
    """A run.

    Attributes:
        id: Flower's number, "" if unknown.
        folder: its run folder, None if it has none here.
    """

    id: str
    folder: Path | None


def find_handle(run: str, output: Path) -> Handle:
    """The run that a person names.

    Args:
        run: Flower's number, a run folder, the name of one in `output`, or "latest".
        output: folder of all runs.

    Returns:
        The run.

    Raises:
        RunError: there is none.
    """
    if run.isdecimal():
        return Handle(run, find_folder(output, run))
    if run == LATEST:
        newest = next(iter(run_folders(output)), None)
        if newest is None:
            raise RunError(
                f"there is no run in {str(output)!r}; `coordinator runs` lists those of the "
                "SuperLink"
            )
        return Handle(flower_id(newest), newest)
    for folder in (Path(run).expanduser(), output / run):
        if any((folder / part).is_file() for part in PARTS):
            return Handle(flower_id(folder), folder)
    raise RunError(
        f"{run!r} is no run: give a run folder, its name in {str(output)!r}, Flower's number of a "
        f"run, or {LATEST!r}; `coordinator runs` lists them"
    )


def find_folder(output: Path, run_id: str) -> Path | None:
    """The run folder in `output` of Flower's run of this number; None if there is none yet."""
    return next((folder for folder in run_folders(output) if flower_id(folder) == run_id), None)


def flower_id(folder: Path) -> str:
    """Flower's number of the run of this folder; "" if unknown."""
    try:
        number = json.loads((folder / PARTS[1]).read_text()).get("flower_run_id")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(number or "")


def follow_run(
    handle: Handle, output: Path, address: str, authority: Path | None, on_event: OnEvent
) -> Path | None:
    """Pass the events of a run on until it ends.

    A SuperLink that does not answer, or is started again, ends nothing as long as there is a
    folder.

    Args:
        handle: the run.
        output: folder of all runs.
        address: of the Control API, unix:/path or host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        on_event: takes each event of the run.

    Returns:
        The run folder; None if the SuperLink reports an end, and there is none here: the
        coordinator's app writes it on another machine, or has begun none.

    Raises:
        RunError: the SuperLink does not know the run and there is no folder, or its folder records no
            end.
    """
    live = None if handle.folder is None else LiveRun(handle.folder)
    link = _Link(handle.id, address, authority, on_event)
    while True:
        if live is None and (folder := find_handle(handle.id, output).folder) is not None:
            live = LiveRun(folder)
        if live is not None:
            complete_killed(live.folder)
            for event in live.refresh():
                on_event(event)
            if live.state.ended:
                return live.folder
        if handle.id and link.is_over(live):
            return None
        time.sleep(POLL_SECONDS)


def event_now(event: str, reason: str = "") -> dict[str, Any]:
    """An event of this command, in the form of those of a run."""
    made = {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}", "event": event}
    return made | ({"reason": reason} if reason else {})


class _Link:
    """Asks the SuperLink about a run now and then."""

    def __init__(
        self, run_id: str, address: str, authority: Path | None, on_event: OnEvent
    ) -> None:
        self._run_id, self._address, self._authority = run_id, address, authority
        self._on_event, self._problem = on_event, ""
        self._next = self._over = 0.0
        self._remind = time.monotonic() + REMIND_SECONDS

    def is_over(self, live: LiveRun | None) -> bool:
        """Whether the run has ended, and has no folder here. Raises RunError."""
        if (now := time.monotonic()) < self._next:
            return False
        self._next, before = now + LOOK_SECONDS, self._problem
        try:
            runs = list_runs(self._address, self._authority)
            run = next((run for run in runs if run.id == self._run_id), None)
            unknown = f"the SuperLink at {self._address} does not know run {self._run_id}"
            self._problem = "" if run else unknown
        except UnreachableError as error:
            run, self._problem = None, str(error)
        if self._problem and live is None:
            raise RunError(self._problem)
        if self._problem and not before:
            self._on_event(event_now("warning", self._problem))
        if live is None and run is not None and run.status == PENDING and now > self._remind:
            self._remind = now + REMIND_SECONDS
            self._on_event(event_now("waiting", NOT_STARTED))
        if run is not None and run.is_over:
            self._over = self._over or now
        if live is not None and self._over and now - self._over > END_SECONDS:
            raise RunError(f"the run has ended, but {live.folder} records no end")
        # A folder that was begun meanwhile is found before the next look.
        return live is None and 0 < self._over < now


@dataclass(frozen=True)
class Row:
    """A run, as a row of a table.

    Attributes:
        name: of its folder, "" without one.
        id: Flower's number.
        method: name of the method, "" without a folder.
        state: status of the run.
        progress: completed and planned steps, "" without a folder.
        sites: their numbers by fate, "" without a folder.
        age: seconds since it began.
    """

    name: str
    id: str
    method: str
    state: str
    progress: str
    sites: str
    age: float | None


def overview(
    output: Path, address: str, authority: Path | None, newest: int
) -> tuple[list[Row], str]:
    """The newest runs.

    Args:
        output: folder of all runs.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        newest: the most rows.

    Returns:
        The runs, newest first; and why the SuperLink's runs are missing, "" if they are not.
    """
    problem, flowers = "", list[FlowerRun]()
    try:
        flowers = list_runs(address, authority)
    except RunError as error:
        problem = str(error)
    by_id = {run.id: run for run in flowers}
    rows = []
    for folder in run_folders(output)[:newest]:
        live = LiveRun(folder)
        live.refresh()
        rows.append(_row(live, by_id.pop(flower_id(folder), None)))
    rows += [Row("", run.id, "", run.status, "", "", _age(run.begun)) for run in by_id.values()]
    return sorted(rows, key=lambda row: row.age if row.age is not None else 0.0)[:newest], problem


def _row(live: LiveRun, flower: FlowerRun | None) -> Row:
    state = live.state
    began = state.first or _started(live) or (flower.begun if flower else None)
    status = state.status
    if status == "running" and flower is not None and flower.is_over:
        status = f"running, but {flower.status} at the SuperLink"
    number = flower.id if flower else flower_id(live.folder)
    progress = f"{min(state.done, state.planned)} of {state.planned}"
    sites = ", ".join(f"{count} {fate}" for fate, count in state.fates.items() if count)
    return Row(live.folder.name, number, state.method, status, progress, sites, _age(began))


def _started(live: LiveRun) -> datetime | None:
    try:
        return datetime.fromisoformat(str(as_table(live.manifest).get("started")))
    except ValueError:
        return None


def _age(began: datetime | None) -> float | None:
    if began is None:
        return None
    began = began if began.tzinfo else began.replace(tzinfo=UTC)
    return max(0.0, (datetime.now(UTC) - began).total_seconds())
