"""The sites that a SuperLink knows, with the names of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.interface import FlowerNode
from fedsurrogate.common.security.registrations import Registration, read_table
from fedsurrogate.server_app.deployment.fleet_guard import fingerprint_of
from fedsurrogate.server_app.deployment.supernodes import table_file
from fedsurrogate.server_app.runs.reader import LiveRun, run_folders
from fedsurrogate.server_app.runs.state import SiteState

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
        folder: of `coordinator certs`, for the table of registered sites; None without one.
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
        table: names of keys, from `coordinator register`.

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
        KnownSite(name, _line_key(each.key), "not registered", None, None)
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
    """SHA-256 of a public key, as `coordinator certs` shows it; empty without one."""
    return fingerprint_of(public) if public else ""


def _line_key(line: str) -> str:
    from fedsurrogate.common.security.fingerprints import key_fingerprint

    return key_fingerprint(line.encode())
