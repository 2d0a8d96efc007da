"""A site's key for sealed relays, and whose keys it trusts."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from client_app.settings import NodeConfig
from common.errors import SealError
from common.sealing import PUBLIC_BYTES, SEED_BYTES, new_key, read_keys

log = logging.getLogger("fedsurrogate.site")


def private_key(node: NodeConfig, site: str) -> bytes:
    """This site's private key, made when first needed; only its owner may read the file."""
    file = node.state / "keys" / f"{site}.key"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            # Made aside and linked: two processes at once agree on one key, and nobody ever reads half of it.
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


def told_keys(node: NodeConfig, text: object) -> dict[str, bytes]:
    """Public keys by site as the coordinator tells them (JSON of hex); those that `peers` does not confirm are left out.

    A site whose key is left out can neither read what is sealed here nor have its own relays opened. Without `peers` in
    the node-config the coordinator is believed: then it must not be one that lies about keys. Raises SealError,
    ConfigError.
    """
    try:
        listed = dict(json.loads(str(text)))
        whole = {name: key for name, key in listed.items() if isinstance(key, str) and len(key) == 2 * PUBLIC_BYTES}
        told = {name: bytes.fromhex(key) for name, key in whole.items()}
    except (ValueError, TypeError):
        raise SealError("keys of other sites that cannot be read") from None
    if node.peers:
        known = read_keys(Path(node.peers).expanduser())
        for name in [name for name, key in told.items() if known.get(name) != key]:
            log.error("the key told for site %s is not the one in peers = %s; nothing is sealed for it", name, node.peers)
            del told[name]
    return told
