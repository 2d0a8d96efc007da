"""A site's key for sealed relays and bundles, and whose keys it trusts: other sites' and the coordinator's."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from client_app.node_config import NodeConfig
from common.errors import ConfigError, SealError
from common.security.sealing import PUBLIC_BYTES, SEED_BYTES, new_key, read_keys

HEX_KEY, LARGEST_KEY_FILE = re.compile(rf"[0-9a-f]{{{2 * PUBLIC_BYTES}}}"), 4096

log = logging.getLogger("fedsurrogate.site")


def private_key(node: NodeConfig, site: str) -> bytes:
    """This site's private key, made when first needed; only its owner may read the file."""
    file = node.state / "keys" / f"{site}.key"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            # Made aside and linked: two processes at once agree on one key, and half of it is never read.
            aside = file.with_name(f".{site}.{os.getpid()}")
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                stream.write(new_key())
            try:
                os.link(aside, file)
            except FileExistsError:
                log.info("another process has made the key of %s", site)
            finally:
                aside.unlink()
        key = file.read_bytes()
    except OSError as error:
        raise SealError(f"the key {str(file)!r} cannot be used ({error}); see state-dir in the node-config") from None
    if len(key) != SEED_BYTES:
        raise SealError(f"the key {str(file)!r} is damaged; remove it, and tell the other sites the new one")
    return key


def received_keys(node: NodeConfig, text: object) -> dict[str, bytes]:
    """Public keys by site as the coordinator tells them (JSON of hex); those that `peers` does not confirm are left out.

    A site whose key is left out can neither read what is sealed here nor have its own relays opened. Without `peers` in
    the node-config the coordinator is believed: then it must not be one that lies about keys. Raises SealError,
    ConfigError.
    """
    try:
        listed = dict(json.loads(str(text)))
        whole = {name: key for name, key in listed.items() if isinstance(key, str) and len(key) == 2 * PUBLIC_BYTES}
        received = {name: bytes.fromhex(key) for name, key in whole.items()}
    except (ValueError, TypeError, RecursionError):
        raise SealError("keys of other sites that cannot be read") from None
    if node.peers:
        known = read_keys(Path(node.peers).expanduser())
        for name in [name for name, key in received.items() if known.get(name) != key]:
            log.error(
                "the key received for site %s is not the one in peers = %s; nothing is sealed for it", name, node.peers
            )
            del received[name]
    return received


def coordinator_key(node: NodeConfig) -> bytes:
    """The public key of the coordinator whose requests this site answers. Raises ConfigError where none is pinned."""
    named = node.coordinator_key
    if not named:
        raise ConfigError(
            "the node-config pins no key of the coordinator, so a request could come from anyone; set coordinator-key to "
            "what `coordinator key` prints there, or to a file that holds it (coordinator.pub of the site kit)"
        )
    text = named
    if not HEX_KEY.fullmatch(text):
        try:
            with Path(named).expanduser().open("rb") as stream:
                text = stream.read(LARGEST_KEY_FILE).decode("ascii", "replace").strip()
        # RuntimeError: the home of a user who does not exist; ValueError: no path at all.
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"coordinator-key = {named[:200]!r} is no key, and no file that can be read ({error})"
            ) from None
    if not HEX_KEY.fullmatch(text):
        raise ConfigError(
            f"coordinator-key = {named[:200]!r}: must hold {2 * PUBLIC_BYTES} hexadecimal digits and nothing else"
        )
    return bytes.fromhex(text)
