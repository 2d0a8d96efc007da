"""The names of registered sites: which site a node is, by the key the coordinator has registered for it.

A SuperLink that authenticates its SuperNodes gives each registered public key one node id, and lets only the holder of the
private key act as that node. `coordinator register` writes down whose key it registered, so the coordinator knows the name
of every node before it answers, and what a site calls itself decides nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from common.errors import RunError, SurrogateError
from common.wire.records import INFO, Info
from common.wire.validation import SITE_NAME
from strategies.base.collection import Recorder
from strategies.base.outcome import Outcome, Site, nameless

# Set where the coordinator's app runs: the file with the table.
VARIABLE = "FEDSURROGATE_REGISTERED"
TABLE = "registered.json"
NOT_REGISTERED = "its key is not in the table of registered sites, which `coordinator register` writes"
ABSENT = "registered, and not connected"


@dataclass(frozen=True)
class Registration:
    """A site's public key (one line, as OpenSSH writes it), and the node id that the SuperLink has given it."""

    key: str
    node: int


def read_table(file: Path) -> dict[str, Registration]:
    """The registered sites by name. Raises RunError where the file is missing or not what `write_table` writes."""
    try:
        found = {name: Registration(**each) for name, each in json.loads(file.read_text())["sites"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(
            f"{file}: the table of registered sites cannot be read ({type(error).__name__}); the SuperLink lets only "
            "registered sites in, and `coordinator register` writes whose keys these are; run that first"
        ) from None
    nodes = [each.node for each in found.values()]
    sound = all(isinstance(node, int) for node in nodes) and all(map(SITE_NAME.fullmatch, found))
    if not sound or len(set(nodes)) < len(nodes):
        raise RunError(f"{file}: each site needs a name and a node id of its own; run `coordinator register` again")
    return found


def write_table(file: Path, table: Mapping[str, Registration]) -> None:
    """Replace the table in one step, so that a run that reads it meanwhile finds the old one or the new one."""
    content = {"sites": {name: asdict(table[name]) for name in sorted(table)}}
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)


@dataclass(frozen=True)
class Registered:
    """The table of registered sites in a file, read anew each time: a key may be replaced during a run."""

    file: Path

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> Registered | None:
        """The table that the environment names; None where it names none."""
        return cls(Path(environment[VARIABLE])) if environment.get(VARIABLE) else None

    def names(self) -> dict[int, str]:
        """Names by node id. Raises RunError."""
        return {each.node: name for name, each in read_table(self.file).items()}


def admit(
    outcome: Outcome, recorder: Recorder, nodes: Sequence[int], names: Mapping[int, str] | None, number: int | None = None
) -> list[int]:
    """Enter the connected nodes into the outcome; return those that may be asked, which are the registered ones.

    names: of registered sites by node id, or None where there is no table: then every node may be asked, and has no name
    before it answers. number: of the round, for the events. Records who is absent, and who is refused.
    """
    sites = outcome.sites
    if names is None:
        for node in nodes:
            sites.setdefault(node, Site(name=nameless(node)))
        return list(nodes)
    for node in nodes:
        if node in names:
            _enter(sites, node, names[node])
        elif node not in sites or sites[node].registered:
            site = sites.setdefault(node, Site(name=nameless(node)))
            site.fate, site.reason, site.barred, site.registered = "rejected", NOT_REGISTERED, True, False
            recorder.event("rejected", site=site.name, reason=NOT_REGISTERED, round=number)
    there = {site.name for site in sites.values()}
    absent = sorted(set(names.values()) - there)
    for name in absent:
        if name not in outcome.absent:
            recorder.event("absent", site=name, reason=ABSENT, round=number)
    outcome.absent = absent
    return [node for node in nodes if node in names]


def _enter(sites: dict[int, Site], node: int, name: str) -> None:
    """Give a registered node its site, which may have been another node before: its key was replaced."""
    if node in sites and sites[node].name == name:
        return
    site = sites[node] = Site(name=name, registered=True)
    for other in [each for each in sites if each != node and sites[each].name == name]:
        before = sites.pop(other)
        site.bytes_up, site.bytes_down = site.bytes_up + before.bytes_up, site.bytes_down + before.bytes_down


def check_name(site: Site, info: Info) -> None:
    """Raise SurrogateError unless a reply of a registered site is in the name its key is registered under.

    A site that cannot read its own settings reports a failure without a name; that is all it can say.
    """
    claimed = info.get("site")
    if claimed is None and info.get("status") != "ok":
        return
    if claimed != site.name:
        raise SurrogateError(
            f"a site that calls itself {str(claimed)[:64]!r}, and whose key is registered as {site.name!r}; set "
            f'site="{site.name}" in its node-config, or register its key under its own name'
        )
    site.heard = True


def addressed(record: RecordDict, name: str) -> RecordDict:
    """A question with the name of the site it is for, so that a site of another name refuses before it is charged."""
    return RecordDict({**record, INFO: ConfigRecord({**record.config_records[INFO], "site": name})})
