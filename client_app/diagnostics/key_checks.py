"""Checks for `site doctor` of the keys in a node-config: of other sites (sealed chains, secure
sums) and the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import coordinator_key
from fedsurrogate.common.errors import ConfigError, FedSurrogateError
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.settings import DataKind

PEERS_REMEDY = (
    "set peers in the node-config (PEERS in the .env of a kit) to a file with the "
    "lines that `site key` prints there"
)


def check_keys(data: DataKind, node: NodeConfig) -> Iterator[Finding]:
    """Check each key file in the node-config, and fail if a required one is not set."""
    try:
        policy = open_gate(node, data, "doctor").policy
        demanded = (
            "require-seal"
            if policy.require_seal
            else "require-secure-sum"
            if policy.require_secure_sum
            else ""
        )
    except FedSurrogateError:
        demanded = ""  # Another check reports the policy.
    if node.peers:
        try:
            names = ", ".join(sorted(read_keys(Path(node.peers).expanduser())))
            yield Finding("peers", "PASS", f"{node.peers} has the keys of {names or 'no site'}")
        except (ConfigError, RuntimeError) as error:
            yield Finding("peers", "FAIL", str(error), PEERS_REMEDY)
    elif demanded:
        facts = (
            f"{demanded} = true, but the keys of other sites are not set: this site refuses "
            "every run"
        )
        yield Finding("peers", "FAIL", facts, PEERS_REMEDY)
    if node.coordinator_key:
        try:
            yield Finding(
                "requests",
                "PASS",
                f"answered when signed under {coordinator_key(node).hex()[:16]}...",
            )
        except ConfigError as error:
            remedy = (
                "take coordinator.pub from the site kit, or the output of `coordinator key` "
                "at the coordinator"
            )
            yield Finding("requests", "FAIL", str(error), remedy)
