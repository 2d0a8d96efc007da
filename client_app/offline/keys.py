"""Keys of a site: its own, and the trusted ones of others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fedsurrogate.common.errors import LOG, ConfigError, SealError, told_as
from fedsurrogate.common.files import kept_secret
from fedsurrogate.common.security.sealing import PUBLIC_BYTES, SEED_BYTES, read_keys

from ..node_config import NodeConfig

HEX_KEY, LARGEST_KEY_FILE = re.compile(rf"[0-9a-f]{{{2 * PUBLIC_BYTES}}}"), 4096


def private_key(node: NodeConfig, site: str) -> bytes:
    """This site's private key, created when first needed; only the file's owner may read it.

    Args:
        node: the site's settings.
        site: name of the site.

    Raises:
        SealError: for a key file that cannot be used or is damaged.
    """
    file = node.state / "keys" / f"{site}.key"
    todo = "see state-dir in the node-config"
    with told_as(SealError, f"the key {str(file)!r} cannot be used", todo):
        key = kept_secret(file, SEED_BYTES)
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

    Keys that `peers` does not confirm are left out. A site whose key is left out cannot read chain messages
    sealed here, and its own chain messages are refused. Without `peers` in the node-config, this site must
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
            LOG.error(
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
