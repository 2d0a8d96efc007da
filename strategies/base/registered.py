"""Registered sites in a run: the coordinator knows the name of every node from the table of registered
sites before its first reply, and need not trust the name that a site reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.security.registrations import VARIABLE, read_table
from fedsurrogate.common.wire.records import INFO, Info
from fedsurrogate.strategies.base.collection import Recorder
from fedsurrogate.strategies.base.outcome import Outcome, Site, nameless

NOT_REGISTERED = (
    "its key is not in the table of registered sites, which `coordinator register` writes"
)
ABSENT = "registered, and not connected"


@dataclass(frozen=True)
class Registered:
    """The table of registered sites in a file. It is read again each time: a key may be replaced
    during a run.

    Attributes:
        file: in the format of `write_table`.
    """

    file: Path

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> Registered | None:
        """The table that the environment variable names; None if it is not set."""
        return cls(Path(environment[VARIABLE])) if environment.get(VARIABLE) else None

    def names(self) -> dict[int, str]:
        """Site names by node id. Raises RunError."""
        return {each.node: name for name, each in read_table(self.file).items()}


def admit(
    outcome: Outcome,
    recorder: Recorder,
    nodes: Sequence[int],
    names: Mapping[int, str] | None,
    number: int | None = None,
) -> list[int]:
    """Add the connected nodes to the outcome. Records absent sites and refused nodes.

    Args:
        outcome: of the run, whose sites are changed.
        recorder: of the events.
        nodes: that are connected.
        names: names of registered sites by node id. None without a table: then every node may take
            part, and has no name before its first reply.
        number: the round, for the events.

    Returns:
        The nodes that may take part, which are the registered ones.
    """
    sites = outcome.sites
    if names is None:
        for node in nodes:
            sites.setdefault(node, Site(name=nameless(node), node=node))
        return list(nodes)
    # As it was before: keys may be replaced and exchanged between two looks at the table.
    earlier = {site.name: (node, site) for node, site in sites.items()}
    for node in nodes:
        if node in names:
            _enter(sites, node, names[node], earlier.get(names[node]))
    for node in nodes:
        if node not in names and (node not in sites or sites[node].registered):
            site = sites.setdefault(node, Site(name=nameless(node), node=node))
            site.fate, site.reason, site.barred, site.registered = (
                "rejected",
                NOT_REGISTERED,
                True,
                False,
            )
            recorder.event("rejected", site=site.name, reason=NOT_REGISTERED, round=number)
    there = {site.name for site in sites.values()}
    absent, known = sorted(set(names.values()) - there), set(outcome.absent)
    for name in absent:
        if name not in known:
            recorder.event("absent", site=name, reason=ABSENT, round=number)
    outcome.absent = absent
    return [node for node in nodes if node in names]


def _enter(sites: dict[int, Site], node: int, name: str, earlier: tuple[int, Site] | None) -> None:
    """Assign a registered node to its site. The site had another node, in `earlier`, if its key was
    replaced. It takes part again if its key was taken out of the table and registered again.
    """
    if node in sites and sites[node].name == name and sites[node].registered:
        return
    site = Site(name=name, registered=True, node=node)
    if earlier is not None:
        place, before = earlier
        site.bytes_up, site.bytes_down = before.bytes_up, before.bytes_down
        if sites.get(place) is before:
            del sites[place]
    sites[node] = site


def check_name(site: Site, info: Info) -> None:
    """Check that a registered site reports the name that its key is registered under.

    A failure report without a name is accepted: a site that cannot read its settings does not know
    its name.

    Args:
        site: with that name.
        info: what it reports.

    Raises:
        SurrogateError: for another name.
    """
    claimed = info.get("site")
    if claimed is None and info.get("status") != "ok":
        return
    if claimed != site.name:
        raise SurrogateError(
            f"the site reports the name {str(claimed)[:64]!r}, but its key is registered as {site.name!r}; set "
            f'site="{site.name}" in its node-config, or register its key under its own name'
        )
    site.heard = True


def addressed(record: RecordDict, name: str) -> RecordDict:
    """A request with the name of its receiver, so that a site with another name refuses it before
    it is charged.

    Args:
        record: content of the request.
        name: of the site that it is for.
    """
    return RecordDict({**record, INFO: ConfigRecord({**record.config_records[INFO], "site": name})})
