"""Keys of a site, its own and the trusted ones of others; and a dry run, which computes a release
in full without sending or charging it.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import ConfigError, FedSurrogateError, SealError
from fedsurrogate.common.files import kept_secret
from fedsurrogate.common.privacy.accounting import budget_remarks
from fedsurrogate.common.run import Run
from fedsurrogate.common.security.sealing import PUBLIC_BYTES, SEED_BYTES, read_keys

from ..audit.output import check_attacks
from ..features.site_features import site_name
from ..governance.gate import open_gate
from ..governance.release import prepare
from ..methods.task import SiteRequest
from ..node_config import NodeConfig

HEX_KEY, LARGEST_KEY_FILE = re.compile(rf"[0-9a-f]{{{2 * PUBLIC_BYTES}}}"), 4096

log = logging.getLogger("fedsurrogate.site")


def private_key(node: NodeConfig, site: str) -> bytes:
    """This site's private key, created when first needed; only the file's owner may read it.

    Args:
        node: the site's settings.
        site: name of the site.

    Raises:
        SealError: for a key file that cannot be used or is damaged.
    """
    file = node.state / "keys" / f"{site}.key"
    try:
        key = kept_secret(file, SEED_BYTES)
    except OSError as error:
        raise SealError(
            f"the key {str(file)!r} cannot be used ({error}); see state-dir in the node-config"
        ) from None
    if len(key) != SEED_BYTES:
        raise SealError(
            f"the key {str(file)!r} is damaged; remove it, and send the other sites the new public "
            "key"
        )
    return key


def key_name(node: NodeConfig) -> str:
    """The name by which others know this site's key. Raises ConfigError if it has none."""
    if not (node.site or node.num_partitions > 1):
        raise ConfigError("the node-config names no site, and others know keys by name; set site")
    return node.site or str(node.partition_id)


def received_keys(node: NodeConfig, text: object) -> dict[str, bytes]:
    """Public keys by site, as received from the coordinator.

    Keys that `peers` does not confirm are left out. A site whose key is left out cannot read relays
    sealed here, and its own relays are refused. Without `peers` in the node-config, this site must
    trust the coordinator to send the right keys.

    Args:
        node: the site's settings.
        text: JSON of hexadecimal keys by site.

    Raises:
        SealError: for a text that cannot be read.
        ConfigError: for a file of peers that cannot be read.
    """
    try:
        listed = dict(json.loads(str(text)))
        whole = {
            name: key
            for name, key in listed.items()
            if isinstance(key, str) and len(key) == 2 * PUBLIC_BYTES
        }
        received = {name: bytes.fromhex(key) for name, key in whole.items()}
    except (ValueError, TypeError, RecursionError):
        raise SealError("the keys of other sites in the request cannot be read") from None
    if node.peers:
        known = read_keys(Path(node.peers).expanduser())
        for name in [name for name, key in received.items() if known.get(name) != key]:
            log.error(
                "the key received for site %s is not the one in peers = %s; nothing is sealed for "
                "it",
                name,
                node.peers,
            )
            del received[name]
    return received


def coordinator_key(node: NodeConfig) -> bytes:
    """The public key of the coordinator whose requests this site answers. Raises ConfigError if
    none is set.
    """
    named = node.coordinator_key
    if not named:
        raise ConfigError(
            "the node-config has no key of the coordinator, so a request could come from anyone; "
            "set coordinator-key to the output of `coordinator sites key` there, or to a file that "
            "contains it (coordinator.pub of the site kit)"
        )
    text = named
    if not HEX_KEY.fullmatch(text):
        try:
            with Path(named).expanduser().open("rb") as stream:
                text = stream.read(LARGEST_KEY_FILE).decode("ascii", "replace").strip()
        # RuntimeError: the home of a user who does not exist; ValueError: not a path.
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"coordinator-key = {named[:200]!r} is neither a key nor a readable file ({error})"
            ) from None
    if not HEX_KEY.fullmatch(text):
        raise ConfigError(
            f"coordinator-key = {named[:200]!r}: must hold {2 * PUBLIC_BYTES} hexadecimal digits "
            "and nothing else"
        )
    return bytes.fromhex(text)


DRY = "dry-run"


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        facts: about the release, by name.
        refusal: why the release may not leave; empty if it may.
    """

    facts: dict[str, Any]
    refusal: str


def dry_run(run: Run, node: NodeConfig) -> DryRun:
    """Make the surrogate that this site would send, and check it at the gate.

    A real release draws new noise, so the surrogate of a dry run never leaves.

    Args:
        run: whose release is made.
        node: the site's settings.

    Raises:
        FedSurrogateError: if none can be made.
    """
    if not run.plan.releases_once:
        raise ConfigError(
            f"method = {run.settings.method!r}: a dry run shows the release of a one-shot method; "
            "this method replies to received models, or releases nothing; `coordinator plan` "
            "shows its bytes"
        )
    gate = open_gate(node, run.settings.data, DRY)
    request = SiteRequest(run, node, site_name(node, 0), flower_run=DRY, info={"lineage": "dryrun"})
    prepared = prepare(request, gate, affordable=False)
    release, classes = prepared.release, prepared.found.classes
    own, records = run.settings, len(prepared.found.train.labels)
    facts: dict[str, Any] = {
        "mechanism": release.mechanism,
        "unit": gate.unit_of(release) if release.events else None,
        "epsilon": release.epsilon or None,
        "delta": release.delta or None,
        "bytes": release.bytes,
        # A private release draws new noise each time, so this one's hash would be that of nothing
        # that leaves.
        "sha256": None if release.events else release.sha256,
        "classes": list(classes),
        "records": records,
        "sigmas": release.sigmas,
        "sensitivities": release.sensitivities,
        "facts": release.facts,
        "left_out": [each.why for each in prepared.found.report.left_out],
        "odd": [*prepared.found.report.odd, *budget_remarks(own.epsilon, own.delta, records)],
        "failure": prepared.failure.text or None,
        "epsilon_before": gate.spent(),
        "epsilon_total": gate.policy.epsilon_total,
        "runs_left": gate.runs_left(run.mechanism.events)
        if run.mechanism and release.events
        else None,
    }
    refusal = ""
    if failure := prepared.failure.text:
        refusal = f"THE RECORDS CANNOT BE USED, and pure noise would leave instead: {failure}"
    try:
        facts["epsilon_after"] = gate.check(release)
        check_attacks(run, node, gate.policy)
    except FedSurrogateError as error:
        refusal = f"{refusal}; {error}" if refusal else str(error)
    return DryRun(facts | {"may_leave": not refusal, "refusal": refusal or None}, refusal)
